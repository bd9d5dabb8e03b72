"""The servers' settings: JVM flags, Hadoop's site files and logging."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tests.clusters.machine import HOST, current_user

# Start-up is most of these JVMs' work. The C1 compiler and the serial collector leave the cores to the tests.
QUICK_START = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto", "-XX:-UsePerfData")
# The JVM of spark-submit and spark-class that only composes a command line.
LAUNCHER_OPTIONS = " ".join(QUICK_START)
# Spark composes and compiles Java for every new query, for stages and for single expressions, which takes longer than to
# interpret it on a test's few rows.
INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
# Spark's own defaults, for jobs as a user submits them.
COMPILED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}


def class_archive(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The options of .venv/env.sh that name its class archive, which starts Spark's JVMs sooner and changes nothing else.

    A JVM refuses the archive where a folder with files, such as a SPARK_CONF_DIR, leads its class path.
    """
    options = shlex.split(environ.get("SPARK_SUBMIT_OPTS", ""))
    return [option for option in options if option.startswith(("-XX:SharedArchiveFile=", "-Xlog:"))]


LOG4J2 = """\
rootLogger.level = info
rootLogger.appenderRef.stdout.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1}: %m%n%ex
"""

# YARN's settings that hold an address, without the prefix "yarn.".
YARN_ADDRESSES = (
    "resourcemanager.address",
    "resourcemanager.scheduler.address",
    "resourcemanager.resource-tracker.address",
    "resourcemanager.admin.address",
    "resourcemanager.webapp.address",
    "nodemanager.address",
    "nodemanager.localizer.address",
    "nodemanager.webapp.address",
)

# ----------------------------------------------------------------------------------------------------
# The content of the site files


def core_settings(folder: Path, rpc_port: int) -> dict[str, str]:
    """core-site.xml of servers and clients."""
    return {
        "fs.defaultFS": f"hdfs://{HOST}:{rpc_port}",
        "hadoop.tmp.dir": str(folder / "tmp"),
        # The user of a WebHDFS request that names none. The default is "dr.who".
        "hadoop.http.staticuser.user": current_user(),
    }


def hdfs_settings(folder: Path, rpc_port: int, http_port: int) -> dict[str, str]:
    """hdfs-site.xml of servers and clients.

    A block has three replicas. A silent DataNode is avoided after 3 s and dead after 11 s.
    """
    return {
        "dfs.replication": "3",
        "dfs.permissions.enabled": "true",
        "dfs.namenode.name.dir": f"file://{folder}/name",
        "dfs.namenode.rpc-bind-host": HOST,
        "dfs.namenode.http-address": f"{HOST}:{http_port}",
        "dfs.namenode.safemode.extension": "0",
        # Tests split small files into several blocks.
        "dfs.namenode.fs-limits.min-block-size": "1024",
        "dfs.namenode.handler.count": "5",
        "dfs.datanode.handler.count": "3",
        "dfs.datanode.hostname": HOST,
        "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        # A DataNode is dead after 2 recheck intervals and 10 heartbeats. A shorter time would lose live nodes to the
        # pauses of a loaded machine.
        "dfs.heartbeat.interval": "1",
        "dfs.namenode.heartbeat.recheck-interval": "500",
        "dfs.namenode.stale.datanode.interval": "3000",
        "dfs.namenode.avoid.read.stale.datanode": "true",
        "dfs.namenode.avoid.write.stale.datanode": "true",
        # There is no fourth node to replace a dead one. A writer goes on with the nodes that are left.
        "dfs.client.block.write.replace-datanode-on-failure.policy": "NEVER",
        "dfs.client.block.write.locateFollowingBlock.retries": "8",
    }


def datanode_settings(folder: Path, index: int, ports: Sequence[int]) -> dict[str, str]:
    """The settings of one DataNode. ports: data, HTTP (WebHDFS) and IPC, in this order."""
    data, http, ipc = (f"{HOST}:{port}" for port in ports)
    return {
        "dfs.datanode.data.dir": f"file://{folder}/data{index}",
        "dfs.datanode.address": data,
        "dfs.datanode.http.address": http,
        "dfs.datanode.ipc.address": ipc,
        # The DataNodes start together with the NameNode. They retry often until it is up.
        "ipc.client.connect.retry.interval": "200",
        "ipc.client.connect.max.retries": "300",
    }


def yarn_settings(folder: Path, ports: Sequence[int], memory_mb: int) -> dict[str, str]:
    """yarn-site.xml of one ResourceManager and one NodeManager. ports: one for each of YARN_ADDRESSES."""
    scheduler = "org.apache.hadoop.yarn.server.resourcemanager.scheduler.fifo.FifoScheduler"
    return {
        **{f"yarn.{name}": f"{HOST}:{port}" for name, port in zip(YARN_ADDRESSES, ports, strict=True)},
        "yarn.resourcemanager.hostname": HOST,
        "yarn.nodemanager.hostname": HOST,
        "yarn.resourcemanager.scheduler.class": scheduler,
        "yarn.scheduler.minimum-allocation-mb": "128",
        "yarn.nodemanager.resource.memory-mb": str(memory_mb),
        "yarn.nodemanager.resource.cpu-vcores": "4",
        # A JVM's virtual size says little about its memory, and the memory of pyspark's forks is counted twice.
        "yarn.nodemanager.vmem-check-enabled": "false",
        "yarn.nodemanager.pmem-check-enabled": "false",
        "yarn.nodemanager.local-dirs": str(folder / "local"),
        "yarn.nodemanager.log-dirs": str(folder / "containers"),
        # The NodeManager refuses to work on a disk that is 90 % full, as a developer's disk often is.
        "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": "100",
        "yarn.nodemanager.disk-health-checker.min-free-space-per-disk-mb": "0",
        # A killed application ends at once. The default waits for it to drain.
        "yarn.nodemanager.sleep-delay-before-sigkill.ms": "50",
        "yarn.resourcemanager.nodemanagers.heartbeat-interval-ms": "250",
    }


# ----------------------------------------------------------------------------------------------------
# Files


def site_xml(settings: Mapping[str, str]) -> str:
    """The text of a Hadoop configuration file."""
    row = "  <property><name>{}</name><value>{}</value></property>\n"
    rows = [row.format(name, escape(value)) for name, value in settings.items()]
    return f'<?xml version="1.0"?>\n<configuration>\n{"".join(rows)}</configuration>\n'


def write_conf(folder: Path, files: Mapping[str, Mapping[str, str]]) -> None:
    """Write Hadoop configuration files, by name, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, settings in files.items():
        (folder / name).write_text(site_xml(settings))


def write_logging(folder: Path) -> Path:
    """Write the servers' logging configuration and return its folder.

    It is a folder of its own because conf/ is on the class path of clients too.
    """
    logging = folder / "logging"
    logging.mkdir(parents=True, exist_ok=True)
    (logging / "log4j2.properties").write_text(LOG4J2)
    return logging
