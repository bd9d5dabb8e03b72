"""YARN on this machine: the class Yarn."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.clusters.artifacts import find_java, yarn_classpath
from tests.clusters.hdfs import Hdfs
from tests.clusters.kerberos import Kdc
from tests.clusters.machine import free_ports
from tests.clusters.servers import (
    START_TIMEOUT,
    Server,
    SparkCluster,
    hadoop_command,
    jmx_bean,
    server_environment,
    wait_until,
)
from tests.clusters.settings import YARN_ADDRESSES, write_conf, yarn_settings

RESOURCEMANAGER = "org.apache.hadoop.yarn.server.resourcemanager.ResourceManager"
NODEMANAGER = "org.apache.hadoop.yarn.server.nodemanager.NodeManager"


class Yarn(SparkCluster):
    """A ResourceManager and one NodeManager on an Hdfs. They take 9 s to start and 0.5 GB besides the containers.

    conf_dir holds the configuration of YARN and of HDFS, which spark-submit needs as HADOOP_CONF_DIR.
    """

    def __init__(self, hdfs: Hdfs, memory_mb: int = 6144, folder: Path | None = None, kdc: Kdc | None = None) -> None:
        super().__init__(folder)
        self.hdfs = hdfs
        self.conf_dir = self.folder / "conf"
        self._ports = free_ports(len(YARN_ADDRESSES))
        self._memory_mb = memory_mb
        self._kdc = kdc

    def start(self) -> None:
        """Start both servers. Return when the ResourceManager counts the NodeManager as active."""
        java = find_java()
        settings = yarn_settings(self.folder, self._ports, self._memory_mb)
        settings |= self._kdc.yarn_settings() if self._kdc else {}
        write_conf(self.conf_dir, {"yarn-site.xml": settings})
        for name in ("core-site.xml", "hdfs-site.xml"):
            shutil.copy(self.hdfs.conf_dir / name, self.conf_dir / name)
        env = {**server_environment(java), "HADOOP_CONF_DIR": str(self.conf_dir)}
        options = [self._kdc.java_option] if self._kdc else []
        self.servers = [
            self._server(name, hadoop_command(java, self.folder, yarn_classpath(), main, options), env)
            for name, main in (("resourcemanager", RESOURCEMANAGER), ("nodemanager", NODEMANAGER))
        ]
        for server in self.servers:
            server.start()
        wait_until(lambda: self.active_nodes() == 1, "an active NodeManager", self.servers, START_TIMEOUT)

    def _server(self, name: str, command: Sequence[str | Path], env: Mapping[str, str]) -> Server:
        return Server(name, command, self.folder / "logs" / f"{name}.log", env)

    def active_nodes(self) -> int:
        """How many NodeManagers the ResourceManager counts as active; -1 while it is down."""
        port = self._ports[YARN_ADDRESSES.index("resourcemanager.webapp.address")]
        metrics = jmx_bean(port, "service=ResourceManager,name=ClusterMetrics")
        return int(metrics.get("NumActiveNMs", -1))

    def container_logs(self) -> str:
        """The output of the latest application's containers. In cluster mode the driver's own output is among it."""
        applications = sorted((self.folder / "containers").glob("application_*"), key=lambda p: p.stat().st_mtime)
        files = sorted(applications[-1].glob("*/std*")) if applications else []
        return "".join(f"== {f.parent.name}/{f.name}\n{f.read_text(errors='replace')}" for f in files)
