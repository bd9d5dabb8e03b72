"""A store that knows what Spark's Hadoop configuration knows."""

from __future__ import annotations

import os
from typing import Any

from pyspark import SparkContext

from pipeline.storage.hdfs import HDFS_DEFAULTS
from pipeline.storage.object_client import is_s3a_setting
from pipeline.storage.store import Store

CLIENT_SETTINGS = (
    "fs.defaultFS",
    "dfs.nameservices",
    "dfs.internal.nameservices",
    "dfs.client.use.datanode.hostname",
    *HDFS_DEFAULTS,
)


def open_store(context: SparkContext) -> Store:
    """A store that knows what Spark's Hadoop configuration knows of name services, the default file system and S3."""
    java = context._jsc.hadoopConfiguration()  # type: ignore[attr-defined, unused-ignore]
    conf = {key: java.get(key) for key in CLIENT_SETTINGS if _configured(java, key)}
    for entry in java.getPropsWithPrefix("dfs.ha.namenodes.").items():
        conf[f"dfs.ha.namenodes.{entry[0]}"] = entry[1]
    for prefix in ("dfs.namenode.rpc-address.", "dfs.client.failover.proxy.provider."):
        for entry in java.getPropsWithPrefix(prefix).items():
            conf[prefix + entry[0]] = entry[1]
    s3a = [f"fs.s3a.{name}" for name in java.getPropsWithPrefix("fs.s3a.")]
    conf |= {key: java.get(key) for key in s3a if is_s3a_setting(key) and _configured(java, key)}
    # Spark takes keys and endpoint from the driver's AWS_* variables into these, but not the region.
    if any(key.startswith("fs.s3a.") for key in conf) and (region := _first("AWS_REGION", "AWS_DEFAULT_REGION")):
        conf.setdefault("fs.s3a.endpoint.region", region)
    return Store(tuple(sorted((key, value) for key, value in conf.items() if value)))


def _first(*names: str) -> str | None:
    """The value of the first of some variables that is set."""
    return next((value for name in names if (value := os.environ.get(name))), None)


def _configured(java: Any, key: str) -> bool:
    """Whether somebody set a key, rather than Hadoop's own defaults."""
    return any(not source.endswith("-default.xml") for source in java.getPropertySources(key) or [])
