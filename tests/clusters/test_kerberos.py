"""Jobs and training on an HDFS with Kerberos and encrypted blocks: by keytab, by ticket and by delegation token."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import JobError
from pipeline.core.storage.hdfs import LOGIN_ADVICE
from tests.clusters import QUICK_START, ROOT, Hdfs, Yarn, spark_submit
from tests.clusters.environments import KERBEROS
from tests.clusters.kerberos import BLOCK_HOST, REALM, SERVICE_HOST, USER, Kdc
from tests.clusters.machine import HOST
from tests.clusters.settings import class_archive
from tests.clusters.tap import Tap
from tests.support.commands import BATCH, JOBS, plan_batch, read_batch

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
MAGIC = b"PAR1"  # at the beginning and the end of every shard file
TRAIN = ("--model", "logistic", "--epochs", 1)


@dataclass(frozen=True)
class SecuredCluster:
    """HDFS and YARN of a Kerberos realm, and a sample on this machine. tap: records what passes to and from DataNodes."""

    kdc: Kdc
    hdfs: Hdfs
    yarn: Yarn
    sample: Path
    tap: Tap

    @property
    def web_uri(self) -> str:
        """The root of HDFS by its gateway, whose name is that of its service."""
        return f"webhdfs://{SERVICE_HOST}:{self.hdfs.http_port}"

    def environment(self, cache: Path | None = None) -> dict[str, str]:
        """The environment of a user's command. cache: the credential cache (default: none)."""
        conf = {"HADOOP_CONF_DIR": str(self.yarn.conf_dir)}
        return {
            **self.kdc.environment(cache),
            **conf,
            "SPARK_SUBMIT_OPTS": shlex.join([*QUICK_START, *class_archive(), self.kdc.java_option]),
        }

    def command(self, *arguments: object, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command without Spark."""
        command = [sys.executable, "-m", *map(str, arguments)]
        environment = {**os.environ, **self.environment(cache)}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    def shard_and_train(
        self,
        output: str,
        hosts: int,
        cache: Path | None,
        packages: Path | None = None,
        further: Sequence[tuple[object, ...]] = (),
        **submit: Any,
    ) -> None:
        """Run the main job, training on its shards, and further jobs in one application. packages: more, for Python."""
        sample = ("--input", self.sample, "--eval-input", self.sample)
        plan: list[tuple[object, ...]] = [
            (JOBS["distribution_aware.py"], *sample, "--output", f"{output}/set", "--workers", 2),
            (JOBS["train.py"], "--shards", f"{output}/set", "--output", f"{output}/run", "--hosts", hosts, *TRAIN),
            *further,
        ]
        batch = plan_batch(plan, path=[ROOT], spark=True)
        path = {"PYTHONPATH": str(packages)} if packages else {}
        for result in read_batch(spark_submit(BATCH, batch, env=self.environment(cache) | path, **submit)):
            assert result.code == 0, result.out[-3000:] + result.err[-3000:]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    sample = tmp_path_factory.mktemp("secured") / "sample"
    command = [sys.executable, "-m", "pipeline", "sample", "--to", str(sample), "--rows", "400", "--test-rows", "40"]
    with Kdc() as kdc, Hdfs(datanodes=1, kdc=kdc) as hdfs, Yarn(hdfs, kdc=kdc) as yarn:
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        with Tap(BLOCK_HOST, HOST, *hdfs.datanode_ports) as tap:
            yield SecuredCluster(kdc, hdfs, yarn, sample, tap)


@pytest.fixture(scope="module")
def by_keytab(secured: SecuredCluster) -> str:
    """A set that was made by a job with a keytab and without a ticket, and trained on in the same way."""
    conf = {"spark.kerberos.principal": f"{USER}@{REALM}", "spark.kerberos.keytab": str(secured.kdc.user_keytab)}
    secured.shard_and_train(f"{secured.hdfs.uri}/keytab", 1, None, conf=conf)
    return f"{secured.hdfs.uri}/keytab/set"


def test_a_keytab_suffices_for_a_job_and_training(by_keytab: str) -> None:
    assert by_keytab


def test_blocks_are_encrypted_on_their_way(secured: SecuredCluster, by_keytab: str) -> None:
    [(blocks, _)] = secured.hdfs.datanode_ports
    streams = secured.tap.recorded(blocks)
    assert by_keytab
    assert sum(map(len, streams)) > 100_000
    assert not any(MAGIC in stream or b"num_workers" in stream for stream in streams)


def test_a_ticket_suffices_over_webhdfs_and_its_blocks_can_be_read(secured: SecuredCluster, by_keytab: str) -> None:
    """WebHDFS is not encrypted without HTTPS: the recorder sees the magic number of Parquet files.

    A further job of the application reads and writes hdfs:// by the same ticket."""
    try:
        KERBEROS.make()
    except JobError as error:
        pytest.skip(str(error))
    output = f"{secured.hdfs.uri}/ticket/resharded"
    reshard = (JOBS["reshard.py"], "--input", by_keytab, "--output", output, "--workers", 3)
    secured.shard_and_train(f"{secured.web_uri}/web", 1, secured.kdc.kinit(), KERBEROS.packages, further=[reshard])
    [(_, web)] = secured.hdfs.datanode_ports
    assert any(MAGIC in stream for stream in secured.tap.recorded(web))


@pytest.mark.parametrize("scheme", ["hdfs", "webhdfs"])
def test_without_a_ticket_the_next_step_is_one_line(secured: SecuredCluster, by_keytab: str, scheme: str) -> None:
    uri = by_keytab if scheme == "hdfs" else f"{secured.hdfs.web_uri}/keytab/set"
    done = secured.command("trainer", "--shards", uri, "--output", secured.sample.parent / "none", *TRAIN)
    reason = LOGIN_ADVICE if scheme == "hdfs" else "install hdfs[kerberos] and run kinit first"
    assert done.returncode == 2
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_yarn_passes_delegation_tokens_to_its_containers(secured: SecuredCluster) -> None:
    option = secured.kdc.java_option
    conf = {f"spark.{part}.extraJavaOptions": " ".join([*QUICK_START, option]) for part in ("executor", "yarn.am")}
    secured.shard_and_train(f"{secured.hdfs.uri}/yarn", 2, secured.kdc.kinit(), master="yarn", conf=conf)
