"""What Spark's Hadoop configuration says of storage reaches the store, and is applied or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession

from pipeline.core.errors import UsageError
from pipeline.core.storage.hdfs import PROXY_USER
from pipeline.core.storage.s3a import PROVIDER_PATH
from pipeline.core.storage.store import ENCRYPTED_SPILL
from pipeline.spark.store import open_store
from tests.support.application import run_job
from tests.unit.test_jobs import assert_one_line

Configure = Callable[[str, str], None]


@pytest.fixture
def configure(spark: SparkSession) -> Iterator[Configure]:
    """Set one of the session's Hadoop settings until the test ends."""
    java: Any = cast(Any, spark.sparkContext)._jsc.hadoopConfiguration()
    before: dict[str, str | None] = {}

    def set_one(name: str, value: str) -> None:
        before.setdefault(name, java.getRaw(name))
        java.set(name, value)

    yield set_one
    for name, value in before.items():
        java.unset(name) if value is None else java.set(name, value)


def test_settings_of_hdfs_and_s3_reach_the_store(spark: SparkSession, configure: Configure) -> None:
    told = {
        "fs.permissions.umask-mode": "027",
        "dfs.data.transfer.protection": "privacy",
        "dfs.client.failover.resolve-needed.ha": "true",
        "dfs.ha.namenodes.ha": "a,b",
        "hadoop.security.key.provider.path": "kms://http@host:9600/kms",
        "fs.viewfs.mounttable.cluster.link./data": "hdfs://h:1/data",
        "fs.s3a.bucket.mine.encryption.algorithm": "SSE-KMS",
        "fs.s3a.acl.default": "Private",
    }
    for name, value in told.items():
        configure(name, value)
    conf = dict(open_store(spark.sparkContext).conf)
    assert told.items() <= conf.items()
    assert "fs.s3a.threads.max" not in conf


def test_executors_have_the_region_of_the_driver(
    spark: SparkSession, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark takes keys from the driver's AWS_* variables into Hadoop's settings, and leaves the region out."""
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    configure("fs.s3a.access.key", "key")
    assert dict(open_store(spark.sparkContext).conf)["fs.s3a.endpoint.region"] == "eu-west-1"
    configure("fs.s3a.endpoint.region", "us-east-2")
    assert dict(open_store(spark.sparkContext).conf)["fs.s3a.endpoint.region"] == "us-east-2"


def test_a_file_of_keys_is_read(spark: SparkSession, configure: Configure, tmp_path: Path) -> None:
    """Its keys win over those in the clear, as Hadoop has it; those for one bucket are there too."""
    jvm: Any = spark.sparkContext._jvm
    configure(PROVIDER_PATH, f"jceks://file{tmp_path}/keys.jceks")
    configure("fs.s3a.access.key", "in the clear")
    java: Any = cast(Any, spark.sparkContext)._jsc.hadoopConfiguration()
    keys = {"fs.s3a.access.key": "id", "fs.s3a.secret.key": "s\u00e9cret", "fs.s3a.bucket.mine.secret.key": "mine"}
    for name, value in (keys | {"another.password": "none of ours"}).items():
        words = ["create", name, "-value", value, "-provider", java.get(PROVIDER_PATH)]
        arguments = spark.sparkContext._gateway.new_array(jvm.java.lang.String, len(words))  # type: ignore[union-attr]
        for at, word in enumerate(words):
            arguments[at] = word
        shell = jvm.org.apache.hadoop.security.alias.CredentialShell()
        assert jvm.org.apache.hadoop.util.ToolRunner.run(java, shell, arguments) == 0
    store = open_store(spark.sparkContext)
    conf = dict(store.conf)
    assert {name: conf.get(name) for name in keys} == keys
    assert "none of ours" not in conf.values()
    assert "s\u00e9cret" not in repr(store)


def test_a_file_of_keys_that_cannot_be_read_is_one_line(
    spark: SparkSession, configure: Configure, tmp_path: Path
) -> None:
    (tmp_path / "keys.jceks").write_bytes(b"no keys")
    configure(PROVIDER_PATH, f"jceks://file{tmp_path}/keys.jceks")
    with pytest.raises(UsageError, match=r"keys\.jceks cannot be read") as caught:
        open_store(spark.sparkContext)
    assert "\n" not in str(caught.value)


def test_a_job_refuses_a_setting_that_it_cannot_apply(spark: SparkSession, configure: Configure) -> None:
    configure("fs.s3a.acl.default", "PublicRead")
    done = run_job("baseline.py", "--input", "s3://bucket/in", "--output", "s3://bucket/out", "--workers", 2)
    assert_one_line(done, 2, "fs.s3a.acl.default=PublicRead cannot be applied")


def test_unencrypted_temporary_files_are_refused_if_spark_encrypts(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary files in the clear are refused where spark is to encrypt them."""
    conf: Any = spark.sparkContext._conf
    before = conf.get(ENCRYPTED_SPILL)
    conf.set(ENCRYPTED_SPILL, "TRUE")
    try:
        assert open_store(spark.sparkContext).encrypts_spill
        done = run_job("baseline.py", "--input", tmp_path, "--output", "s3://bucket/out", "--workers", 2)
    finally:
        conf.set(ENCRYPTED_SPILL, before or "false")
    assert_one_line(done, 2, "unencrypted temporary files, which spark.io.encryption.enabled=true forbids")


def test_the_user_that_a_job_is_for_reaches_the_store(spark: SparkSession) -> None:
    """As spark-submit --proxy-user has it; its own user is the driver's in the other case."""
    context = spark.sparkContext
    users: Any = context._jvm.org.apache.hadoop.security.UserGroupInformation  # type: ignore[union-attr]
    own = users.getLoginUser()
    assert PROXY_USER not in dict(open_store(context).conf)
    users.setLoginUser(users.createProxyUser("alice", own))
    try:
        assert dict(open_store(context).conf)[PROXY_USER] == "alice"
    finally:
        users.setLoginUser(own)
