"""Conversion of Hadoop's S3A settings (fs.s3a.*) to the configuration of obstore's S3 client.

Settings of access rights, encryption, payment and the proxy are applied or refused; none of them is ignored. Settings
of performance (thread pools, buffers, connections) belong to Hadoop's client and are left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

from pipeline.core.errors import UsageError
from pipeline.core.storage.hadoop_conf import is_true

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
# These settings change who reads, signs or pays, or where bytes go, and obstore's client has no counterpart.
REFUSED = (
    r"acl\.default|assumed\.role\..+|access\.grants\..+|accesspoint\..+|custom\.signers|(.+\.)?signing-algorithm"
    r"|delegation\.token\..+|security\.credential\.provider\.path|create\.storage\.class|endpoint\.fips"
    r"|encryption\.context|encryption\.cse\..+|encryption\.client\..+|proxy\.(domain|workstation)"
)
_SETTING = re.compile(rf"fs\.s3a\.(?:bucket\..+?\.)?((?:{'|'.join(map(re.escape, sorted(APPLIED)))})|(?:{REFUSED}))")
_REFUSED = re.compile(REFUSED)
PROVIDER_PATH = "hadoop.security.credential.provider.path"  # Hadoop's credential files, which only a JVM can read
S3A_PROVIDER_PATH = "fs.s3a.security.credential.provider.path"
OFF = ("", "false", "none")  # values that turn a setting off
HADOOPS_DEFAULT = "s3.amazonaws.com"  # an endpoint that serves buckets of one region only
ENCRYPTION = {"AES256": "AES256", "SSE-S3": "AES256", "SSE-KMS": "aws:kms", "DSSE-KMS": "aws:kms:dsse"}
# The credential providers that obstore supports, by the last part of their class names.
PROVIDERS = {
    "SimpleAWSCredentialsProvider", "TemporaryAWSCredentialsProvider", "AnonymousAWSCredentialsProvider",
    "EnvironmentVariableCredentialsProvider", "IAMInstanceCredentialsProvider", "InstanceProfileCredentialsProvider",
    "EC2ContainerCredentialsProviderWrapper", "ContainerCredentialsProvider", "DefaultCredentialsProvider",
    "DefaultAWSCredentialsProviderChain", "WebIdentityTokenCredentialsProvider", "WebIdentityTokenFileCredentialsProvider",
}  # fmt: skip


def is_s3a_setting(key: str) -> bool:
    """True if a Hadoop setting, for all buckets or for one, is applied or refused here."""
    return bool(_SETTING.fullmatch(key))


def s3a_settings(bucket: str, conf: Mapping[str, str]) -> dict[str, str]:
    """Return Hadoop's settings for a bucket, without their prefix and under their current names.

    Settings of a bucket override settings for all buckets. Raises UsageError for a setting that cannot be applied."""
    values_by_name: dict[str, tuple[str, str]] = {}  # value and full name of each setting
    for prefix in (PREFIX, f"{PREFIX}bucket.{bucket}."):
        # Legacy names are read first, so that current names override them.
        for key in sorted(conf, key=lambda key: key.removeprefix(prefix) not in LEGACY_NAMES):
            name = key.removeprefix(prefix)
            is_ours = key.startswith(prefix) and not name.startswith("bucket.")
            if is_ours and (name in APPLIED or _REFUSED.fullmatch(name)):
                values_by_name[LEGACY_NAMES.get(name, name)] = (conf[key].strip(), key)
    for name, (value, key) in values_by_name.items():
        _check(name, value, key)
    return {name: value for name, (value, _) in values_by_name.items() if value}


def _check(name: str, value: str, key: str) -> None:
    """Raise UsageError for a setting that cannot be applied.

    name: the setting without its prefix. key: the setting's full name, for the message. A setting that is switched off
    is valid."""
    if value.lower() in OFF:
        return
    advice = f"; remove it, or set it for other buckets only ({PREFIX}bucket.NAME.{name})"
    # Credential files are the one refused setting with a workaround of its own.
    if name == S3A_PROVIDER_PATH.removeprefix(PREFIX):
        raise UsageError(
            f"{key}: only jobs on Spark read a file of keys, which then holds for all buckets; elsewhere set"
            " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if _REFUSED.fullmatch(name):
        raise UsageError(f"{key}={value} cannot be applied: the S3 client has no such setting{advice}")
    if name == "encryption.algorithm" and value.upper() not in ENCRYPTION:
        raise UsageError(f"{key}={value} cannot be applied; use {', '.join(ENCRYPTION)}")
    if name == "aws.credentials.provider":
        for provider in value.replace(",", " ").split():
            if re.split(r"[.$]", provider)[-1] not in PROVIDERS:
                raise UsageError(
                    f"{key}: {provider} is no supported provider of credentials; set {PREFIX}access.key and"
                    f" {PREFIX}secret.key (and session.token), or AWS_* variables"
                )


def s3_config(settings: Mapping[str, str]) -> S3Config:
    """Return obstore's configuration for a bucket's settings. obstore takes missing values from AWS_* variables."""
    config: S3Config = {}
    endpoint = settings.get("endpoint", "")
    # Hadoop's default endpoint is left out, so that obstore uses the endpoint of the bucket's region.
    if endpoint and not endpoint.endswith(HADOOPS_DEFAULT):
        config["endpoint"] = (
            endpoint if "://" in endpoint else f"{'https' if _uses_tls(settings) else 'http'}://{endpoint}"
        )
    if region := settings.get("endpoint.region"):
        config["region"] = region
    if settings.get("path.style.access", "").lower() == "false" and "endpoint" not in config:
        config["virtual_hosted_style_request"] = True
    if "Anonymous" in settings.get("aws.credentials.provider", ""):
        config["skip_signature"] = True
    algorithm = settings.get("encryption.algorithm", "")
    if algorithm.lower() not in OFF:
        config["server_side_encryption"] = ENCRYPTION[algorithm.upper()]
        if key := settings.get("encryption.key"):
            config["sse_kms_key_id"] = key
    if is_true(settings.get("requester.pays.enabled", "")):
        config["request_payer"] = True
    return config


def _uses_tls(settings: Mapping[str, str]) -> bool:
    return settings.get("connection.ssl.enabled", "").lower() != "false"


def proxy_config(settings: Mapping[str, str]) -> ClientConfig:
    """Return obstore's configuration of the proxy in a bucket's settings; empty without a proxy."""
    host = settings.get("proxy.host", "")
    if not host:
        return {}
    secure = is_true(settings.get("proxy.ssl.enabled", ""))
    user, password = (quote(settings.get(f"proxy.{name}", ""), safe="") for name in ("username", "password"))
    login = f"{user}:{password}@" if user else ""
    # As in Hadoop, the default port follows from the protocol of the endpoint.
    tls = not settings.get("endpoint", "").startswith("http://") and _uses_tls(settings)
    port = settings.get("proxy.port") or ("443" if tls else "80")
    return {"proxy_url": f"{'https' if secure else 'http'}://{login}{host}:{port}"}


def s3_credential(settings: Mapping[str, str]) -> S3Credential:
    """Return Hadoop's three key settings as one credential, so that they are never mixed with AWS_* variables."""
    return {
        "access_key_id": settings["access.key"],
        "secret_access_key": settings.get("secret.key", ""),
        "token": settings.get("session.token"),
        "expires_at": None,
    }
