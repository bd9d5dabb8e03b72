"""Hadoop's S3A settings (fs.s3a.*) as the configuration of obstore's S3 client.

A setting that says who may read an object, how it is encrypted, who pays for a request or through which proxy it goes is
applied or refused; no such setting is ignored. Settings about speed (thread pools, buffers, connections) belong to
Hadoop's client and are left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

from pipeline.core.errors import UsageError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config, S3Credential

PREFIX = "fs.s3a."
LEGACY_NAMES = {
    "server-side-encryption-algorithm": "encryption.algorithm",
    "server-side-encryption.key": "encryption.key",
}
APPLIED = {
    "access.key", "secret.key", "session.token", "aws.credentials.provider",
    "endpoint", "endpoint.region", "path.style.access", "connection.ssl.enabled",
    "encryption.algorithm", "encryption.key", *LEGACY_NAMES, "requester.pays.enabled",
    "proxy.host", "proxy.port", "proxy.username", "proxy.password", "proxy.ssl.enabled",
}  # fmt: skip
# A value of one of these would change who reads, signs or pays, or where the bytes go. The client has no such setting.
REFUSED = (
    r"acl\.default|assumed\.role\..+|access\.grants\..+|accesspoint\..+|custom\.signers|(.+\.)?signing-algorithm"
    r"|delegation\.token\..+|security\.credential\.provider\.path|create\.storage\.class|endpoint\.fips"
    r"|encryption\.context|encryption\.cse\..+|encryption\.client\..+|proxy\.(domain|workstation)"
)
_SETTING = re.compile(rf"fs\.s3a\.(?:bucket\..+?\.)?((?:{'|'.join(map(re.escape, sorted(APPLIED)))})|(?:{REFUSED}))")
_REFUSED = re.compile(REFUSED)
PROVIDER_PATH = "hadoop.security.credential.provider.path"  # Hadoop's files of keys, which only a JVM reads
S3A_PROVIDER_PATH = "fs.s3a.security.credential.provider.path"
OFF = ("", "false", "none")  # values that leave a setting as if it were not there
HADOOPS_DEFAULT = "s3.amazonaws.com"  # an endpoint that knows buckets of one region only
ENCRYPTION = {"AES256": "AES256", "SSE-S3": "AES256", "SSE-KMS": "aws:kms", "DSSE-KMS": "aws:kms:dsse"}
# The sources of credentials that obstore knows, by the last part of their classes' names.
PROVIDERS = {
    "SimpleAWSCredentialsProvider", "TemporaryAWSCredentialsProvider", "AnonymousAWSCredentialsProvider",
    "EnvironmentVariableCredentialsProvider", "IAMInstanceCredentialsProvider", "InstanceProfileCredentialsProvider",
    "EC2ContainerCredentialsProviderWrapper", "ContainerCredentialsProvider", "DefaultCredentialsProvider",
    "DefaultAWSCredentialsProviderChain", "WebIdentityTokenCredentialsProvider", "WebIdentityTokenFileCredentialsProvider",
}  # fmt: skip


def is_s3a_setting(key: str) -> bool:
    """Tell whether a Hadoop setting is one that is applied or refused here: for all buckets or for one."""
    return bool(_SETTING.fullmatch(key))


def s3a_settings(bucket: str, conf: Mapping[str, str]) -> dict[str, str]:
    """Return Hadoop's settings for a bucket, without their prefix and with today's names.

    A bucket's own settings win over those for all buckets. Raises UsageError for one that cannot be applied."""
    found: dict[str, tuple[str, str]] = {}  # value and full name of each setting
    for prefix in (PREFIX, f"{PREFIX}bucket.{bucket}."):
        # The old name of a setting is read first, so that today's name wins.
        for key in sorted(conf, key=lambda key: key.removeprefix(prefix) not in LEGACY_NAMES):
            name = key.removeprefix(prefix)
            is_ours = key.startswith(prefix) and not name.startswith("bucket.")
            if is_ours and (name in APPLIED or _REFUSED.fullmatch(name)):
                found[LEGACY_NAMES.get(name, name)] = (conf[key].strip(), key)
    for name, (value, key) in found.items():
        _check(name, value, key)
    return {name: value for name, (value, _) in found.items() if value}


def _check(name: str, value: str, key: str) -> None:
    if value.lower() in OFF:
        return
    advice = f"; remove it, or set it for other buckets only ({PREFIX}bucket.NAME.{name})"
    if name == S3A_PROVIDER_PATH.removeprefix(PREFIX):
        raise UsageError(
            f"{key}: a file of keys is read by jobs on Spark, for all buckets; elsewhere set AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY"
        )
    if _REFUSED.fullmatch(name):
        raise UsageError(f"{key}={value} cannot be applied: the S3 client has no such setting{advice}")
    if name == "encryption.algorithm" and value.upper() not in ENCRYPTION:
        raise UsageError(f"{key}={value} cannot be applied; use {', '.join(ENCRYPTION)}")
    if name == "aws.credentials.provider":
        for provider in value.replace(",", " ").split():
            if re.split(r"[.$]", provider)[-1] not in PROVIDERS:
                raise UsageError(
                    f"{key}: {provider} cannot be asked for credentials; set {PREFIX}access.key and {PREFIX}secret.key"
                    " (and session.token), or AWS_* variables"
                )


def s3_config(settings: Mapping[str, str]) -> S3Config:
    """Return obstore's configuration for a bucket's settings; obstore takes what they leave out from AWS_* variables."""
    config: S3Config = {}
    endpoint = settings.get("endpoint", "")
    if endpoint and not endpoint.endswith(HADOOPS_DEFAULT):
        plain = settings.get("connection.ssl.enabled") == "false"
        config["endpoint"] = endpoint if "://" in endpoint else f"{'http' if plain else 'https'}://{endpoint}"
    if region := settings.get("endpoint.region"):
        config["region"] = region
    if settings.get("path.style.access") == "false" and "endpoint" not in config:
        config["virtual_hosted_style_request"] = True
    if "Anonymous" in settings.get("aws.credentials.provider", ""):
        config["skip_signature"] = True
    algorithm = settings.get("encryption.algorithm", "")
    if algorithm.lower() not in OFF:
        config["server_side_encryption"] = ENCRYPTION[algorithm.upper()]
        if key := settings.get("encryption.key"):
            config["sse_kms_key_id"] = key
    if settings.get("requester.pays.enabled", "").lower() == "true":
        config["request_payer"] = True
    return config


def proxy_config(settings: Mapping[str, str]) -> ClientConfig:
    """Return obstore's configuration of the proxy that a bucket's settings name; empty without one."""
    host = settings.get("proxy.host", "")
    if not host:
        return {}
    secure = settings.get("proxy.ssl.enabled", "").lower() == "true"
    user, password = (quote(settings.get(f"proxy.{name}", ""), safe="") for name in ("username", "password"))
    login = f"{user}:{password}@" if user else ""
    # Hadoop's defaults of the port are those of the endpoint's protocol.
    tls = not settings.get("endpoint", "").startswith("http://") and settings.get("connection.ssl.enabled") != "false"
    port = settings.get("proxy.port") or ("443" if tls else "80")
    return {"proxy_url": f"{'https' if secure else 'http'}://{login}{host}:{port}"}


def s3_credential(settings: Mapping[str, str]) -> S3Credential:
    """Return Hadoop's three settings as one credential, so that none of them is mixed with an AWS_* variable."""
    return {
        "access_key_id": settings["access.key"],
        "secret_access_key": settings.get("secret.key", ""),
        "token": settings.get("session.token"),
        "expires_at": None,
    }
