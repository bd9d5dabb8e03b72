"""A store with the settings of Spark's Hadoop configuration."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark import SparkConf, SparkContext

from pipeline.core.errors import UsageError
from pipeline.core.storage.hdfs import HDFS_SETTINGS, KEYTAB, PRINCIPAL, PROXY_USER, is_hdfs_setting
from pipeline.core.storage.s3a import PROVIDER_PATH, S3A_PROVIDER_PATH, is_s3a_setting
from pipeline.core.storage.store import ENCRYPTED_SPILL, SETTINGS, Store
from pipeline.spark.jvm import hadoop_configuration, hadoop_settings, jvm_of, spark_setting, start_jvm


def open_store(context: SparkContext) -> Store:
    """Return a store with the HDFS and S3 settings of Spark's Hadoop configuration, including keys in credential files.

    Raises UsageError if a setting cannot be applied or a credential file cannot be read."""
    java = hadoop_configuration(context)
    prefixes = ("dfs.", "fs.viewfs.mounttable.", "fs.s3a.")
    names = [name for prefix in prefixes for name in hadoop_settings(context, prefix)]
    ours = [name for name in names if is_hdfs_setting(name) or is_s3a_setting(name)]
    conf = {key: java.get(key) for key in {*ours, *HDFS_SETTINGS} if _is_set(java, key)}
    conf |= _credentials(context, java)
    conf.pop(S3A_PROVIDER_PATH, None)  # its content has been read
    # Spark copies keys and endpoint from the driver's AWS_* variables into these settings, but not the region.
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if any(key.startswith("fs.s3a.") for key in conf) and region:
        conf.setdefault("fs.s3a.endpoint.region", region)
    if user := proxied_user(context):
        conf[PROXY_USER] = user
    setting = partial(spark_setting, context)
    conf |= _login(setting)
    conf[ENCRYPTED_SPILL] = setting(ENCRYPTED_SPILL)
    return Store(tuple(sorted((key, value) for key, value in conf.items() if value)))


def export_login() -> None:
    """Let the stores of this process use spark-submit's keytab before there is a Spark context."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return
    start_jvm()  # connects to the JVM of spark-submit, which has its settings
    if login := _login(SparkConf().get):
        os.environ[SETTINGS] = json.dumps(login)


def _login(setting: Callable[[str], str | None]) -> dict[str, str]:
    """Return the keytab and the principal of spark-submit; none without a keytab. setting: returns one of Spark's."""
    names = {KEYTAB: "spark.kerberos.keytab", PRINCIPAL: "spark.kerberos.principal"}
    login = {key: setting(name) or "" for key, name in names.items()}
    return login if all(login.values()) else {}


def proxied_user(context: SparkContext) -> str | None:
    """Return the user that spark-submit --proxy-user (or HADOOP_PROXY_USER) names, or None."""
    jvm = jvm_of(context)
    user = jvm.org.apache.hadoop.security.UserGroupInformation.getCurrentUser()
    if user.getRealUser() is not None:
        return str(user.getShortUserName())
    # From Java 24 on the thread that answers here does not inherit the user.
    return submitted_for(jvm.java.lang.System.getProperty("sun.java.command") or "")


def submitted_for(command: str) -> str | None:
    """Return the --proxy-user of spark-submit's command line, as its JVM knows it, or None."""
    match = re.match(r"org\.apache\.spark\.deploy\.SparkSubmit .*?--proxy-user[ =](\S+)", command)
    return match[1] if match else None


def _credentials(context: SparkContext, java: Any) -> dict[str, str]:
    """Return the S3 settings in Hadoop's credential files (JCEKS and the like), including those for one bucket."""
    paths = [path for name in (S3A_PROVIDER_PATH, PROVIDER_PATH) if (path := java.get(name))]
    if not paths:
        return {}
    jvm = jvm_of(context)
    # Hadoop's factory reads one property, so both paths are merged into it; earlier providers take precedence.
    combined = jvm.org.apache.hadoop.conf.Configuration(java)
    combined.set(PROVIDER_PATH, ",".join(paths))
    secrets_by_alias: dict[str, str] = {}
    try:
        for provider in jvm.org.apache.hadoop.security.alias.CredentialProviderFactory.getProviders(combined):
            for alias in provider.getAliases():
                if is_s3a_setting(alias):
                    secret = provider.getCredentialEntry(alias).getCredential()
                    secrets_by_alias.setdefault(str(alias), "".join(secret))
    except Py4JJavaError as error:
        cause = error.java_exception.getMessage()
        raise UsageError(f"{PROVIDER_PATH}={','.join(paths)} cannot be read: {cause}") from error
    return secrets_by_alias


def _is_set(java: Any, key: str) -> bool:
    """True if a key was set explicitly, not only by Hadoop's own defaults."""
    return any(not source.endswith("-default.xml") for source in java.getPropertySources(key) or [])
