"""Hadoop's settings of S3: each that says who reads, signs, pays or encrypts is applied or refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.errors import UsageError
from pipeline.core.storage.s3a import is_s3a_setting, proxy_config, s3_config, s3a_settings
from pipeline.core.storage.store import Store, configured_settings

KEY_ID = "arn:aws:kms:eu-west-1:1:key/2"


@pytest.mark.parametrize(
    ("conf", "config"),
    [
        ({"encryption.algorithm": "AES256"}, {"server_side_encryption": "AES256"}),
        (
            {"encryption.algorithm": "SSE-KMS", "encryption.key": KEY_ID},
            {"server_side_encryption": "aws:kms", "sse_kms_key_id": KEY_ID},
        ),
        (
            {"server-side-encryption-algorithm": "SSE-KMS", "server-side-encryption.key": KEY_ID},
            {"server_side_encryption": "aws:kms", "sse_kms_key_id": KEY_ID},
        ),
        ({"encryption.algorithm": "DSSE-KMS"}, {"server_side_encryption": "aws:kms:dsse"}),
        ({"encryption.algorithm": "none"}, {}),
        (
            {"server-side-encryption-algorithm": "AES256", "bucket.mine.encryption.algorithm": "SSE-KMS"},
            {"server_side_encryption": "aws:kms"},
        ),
        (
            {"encryption.algorithm": "SSE-KMS", "bucket.other.acl.default": "PublicRead"},
            {"server_side_encryption": "aws:kms"},
        ),
        ({"requester.pays.enabled": "true"}, {"request_payer": True}),
        ({"requester.pays.enabled": "false", "acl.default": "", "endpoint.fips": "false"}, {}),
    ],
)  # fmt: skip
def test_settings_are_applied(conf: dict[str, str], config: dict[str, object]) -> None:
    full = {f"fs.s3a.{name}": value for name, value in conf.items()}
    assert all(map(is_s3a_setting, full))
    assert s3_config(s3a_settings("mine", full)) == config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acl.default", "BucketOwnerFullControl"),
        ("assumed.role.arn", "arn:aws:iam::1:role/r"),
        ("aws.credentials.provider", "org.apache.hadoop.fs.s3a.auth.AssumedRoleCredentialProvider"),
        ("aws.credentials.provider", "org.example.Own, org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"),
        ("encryption.algorithm", "SSE-C"),
        ("encryption.algorithm", "CSE-KMS"),
        ("encryption.context", "project=x"),
        ("server-side-encryption-algorithm", "SSE-C"),
        ("signing-algorithm", "V2"),
        ("s3.signing-algorithm", "V2"),
        ("custom.signers", "x"),
        ("create.storage.class", "glacier"),
        ("accesspoint.arn", "arn:aws:s3:eu-west-1:1:accesspoint/a"),
        ("endpoint.fips", "true"),
        ("delegation.token.binding", "org.example.Tokens"),
        ("proxy.domain", "d"),
        ("security.credential.provider.path", "jceks://hdfs/keys"),
    ],
)
@pytest.mark.parametrize("scope", ["", "bucket.mine."])
def test_settings_that_cannot_be_applied_are_refused_by_name(scope: str, name: str, value: str) -> None:
    """On the first use of the bucket, whatever it is, and for no other bucket."""
    key = f"fs.s3a.{scope}{name}"
    assert is_s3a_setting(key)
    with pytest.raises(UsageError, match=key) as caught:
        Store(((key, value),)).exists("s3://mine/x")
    assert "\n" not in str(caught.value)
    if scope:
        assert not s3a_settings("other", {key: value})


def test_settings_about_speed_are_left_out() -> None:
    for name in (
        "fast.upload.buffer",
        "threads.max",
        "connection.maximum",
        "multipart.size",
        "bucket.mine.threads.max",
    ):
        assert not is_s3a_setting(f"fs.s3a.{name}")


def test_a_proxy_and_its_login() -> None:
    settings = s3a_settings(
        "b", {f"fs.s3a.proxy.{name}": value for name, value in {"host": "p", "port": "3128"}.items()}
    )
    assert proxy_config(settings) == {"proxy_url": "http://p:3128"}
    login = {"proxy.username": "me", "proxy.password": "a/b@c"}
    assert proxy_config(settings | login) == {"proxy_url": "http://me:a%2Fb%40c@p:3128"}
    assert proxy_config({"proxy.host": "p"}) == {"proxy_url": "http://p:443"}
    assert proxy_config({"proxy.host": "p", "connection.ssl.enabled": "False"}) == {"proxy_url": "http://p:80"}
    assert proxy_config({}) == {}


def test_a_file_of_keys_is_refused_without_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without spark a file of keys is refused where no keys are known."""

    def site(**properties: str) -> None:
        parts = "".join(f"<property><name>{k}</name><value>{v}</value></property>" for k, v in properties.items())
        (tmp_path / "core-site.xml").write_text(f"<configuration>{parts}</configuration>")

    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    path = {"hadoop.security.credential.provider.path": "jceks://file/keys"}
    site(**path)
    with pytest.raises(UsageError, match="only jobs on Spark read a file of keys"):
        Store(configured_settings()).exists("s3://mine/x")
    site(**path, **{"fs.s3a.access.key": "a", "fs.s3a.secret.key": "b"})
    assert dict(configured_settings()) == {"fs.s3a.access.key": "a", "fs.s3a.secret.key": "b"}
