"""HDFS on this machine: the class Hdfs."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import hdfs

from pipeline.core.errors import JobError
from tests.clusters.artifacts import find_java, hadoop_classpath
from tests.clusters.kerberos import Kdc
from tests.clusters.machine import HOST, current_user, free_ports
from tests.clusters.servers import (
    START_TIMEOUT,
    Cluster,
    Server,
    get_json,
    hadoop_command,
    jmx_bean,
    server_environment,
    wait_until,
)
from tests.clusters.settings import core_settings, datanode_settings, hdfs_settings, write_conf

NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
TRIES = 3  # to start, where a DataNode's port is taken


class Hdfs(Cluster):
    """One NameNode and three DataNodes with WebHDFS. They take 9 s to start and 1 GB of memory.

    The current user is the superuser. With a kdc it is ``hdfs``, and clients need tickets. A folder that already holds a
    file system is served again, not formatted.

    uri: hdfs://127.0.0.1:PORT; webhdfs_url: http://127.0.0.1:PORT; web_uri: webhdfs://127.0.0.1:PORT; conf_dir: for
    HADOOP_CONF_DIR.
    """

    def __init__(
        self,
        folder: Path | None = None,
        rpc_port: int | None = None,
        http_port: int | None = None,
        datanodes: int = 3,
        detached: bool = False,
        kdc: Kdc | None = None,
    ) -> None:
        super().__init__(folder)
        ports = free_ports(2 + 3 * datanodes)
        self.rpc_port, self.http_port = rpc_port or ports[0], http_port or ports[1]
        self.uri = f"hdfs://{HOST}:{self.rpc_port}"
        self.webhdfs_url = f"http://{HOST}:{self.http_port}"
        self.web_uri = f"webhdfs://{HOST}:{self.http_port}"
        self.conf_dir = self.folder / "conf"
        self._datanode_ports = [ports[2 + 3 * i : 5 + 3 * i] for i in range(datanodes)]
        self._detached = detached
        self._kdc = kdc

    def start(self, launched: Callable[[], object] = lambda: None) -> None:
        """Start all servers. Return when every DataNode is live and the file system accepts writes.

        Another process may take a port between its choice and its use: then all start again, DataNodes on other ports.
        launched: is called when the servers run, before they are waited for."""
        for tries_left in reversed(range(TRIES)):
            self.launch()
            launched()
            try:
                return self.wait_live(len(self._datanode_ports))
            except JobError as error:
                if not (tries_left and str(error).startswith("datanode") and "BindException" in str(error)):
                    raise
            for server in self.servers:
                server.kill()
            self._datanode_ports = [free_ports(3) for _ in self._datanode_ports]

    def launch(self) -> None:
        """Start all servers and return at once. A folder without a file system is formatted first."""
        java = find_java()
        settings = hdfs_settings(self.folder, self.rpc_port, self.http_port)
        core = core_settings(self.folder, self.rpc_port)
        if self._kdc:
            settings |= self._kdc.hdfs_settings()
            core |= self._kdc.core_settings()
        write_conf(self.conf_dir, {"core-site.xml": core, "hdfs-site.xml": settings})
        options = [self._kdc.java_option] if self._kdc else []
        namenode, datanode = (
            hadoop_command(java, self.folder, hadoop_classpath(), main, options) for main in (NAMENODE, DATANODE)
        )
        env = server_environment(java)
        if not (self.folder / "name" / "current").exists():
            self._format(namenode, env)
        self.servers = [self._server("namenode", namenode, env)]
        for i, ports in enumerate(self._datanode_ports):
            flags = [f"-D{k}={v}" for k, v in datanode_settings(self.folder, i, ports).items()]
            self.servers.append(self._server(f"datanode{i}", [*datanode, *flags], env))
        for server in self.servers:
            server.start()

    def _server(self, name: str, command: Sequence[str | Path], env: Mapping[str, str]) -> Server:
        return Server(name, command, self.folder / "logs" / f"{name}.log", env, self._detached)

    def _format(self, namenode: Sequence[str | Path], env: Mapping[str, str]) -> None:
        log = self.folder / "logs" / "format.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        # A DataNode with blocks of one file system refuses the NameNode of another.
        for data in self.folder.glob("data*"):
            shutil.rmtree(data)
        with log.open("wb") as out:
            command = [str(part) for part in [*namenode, "-format", "-nonInteractive"]]
            done = subprocess.run(command, stdout=out, stderr=out, env=dict(env), stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise JobError(f"NameNode -format ended with {done.returncode}: see {log}")

    def live_datanodes(self) -> int:
        """How many DataNodes the NameNode counts as live; -1 while it is down or in safe mode."""
        return live_datanodes(self.http_port)

    def wait_live(self, count: int, timeout: timedelta = START_TIMEOUT) -> None:
        """Return when the NameNode counts exactly so many live DataNodes. It notices a killed one after 11 s."""
        expected = [server for server in self.servers if server.running()]
        wait_until(lambda: self.live_datanodes() == count, f"{count} live DataNodes", expected, timeout)

    def replicas(self, path: str) -> int:
        """Of how many replicas of each block of a file, at least, the NameNode knows. A file that was closed just now may
        have fewer than three: its writer waits for the first one only, and each DataNode reports its own."""
        found = get_json(f"{self.webhdfs_url}/webhdfs/v1{path}?op=GETFILEBLOCKLOCATIONS") or {}
        blocks = found.get("BlockLocations", {}).get("BlockLocation", [])
        return min((len(block["hosts"]) for block in blocks), default=0)

    def kill_datanode(self, index: int) -> None:
        """End one DataNode with SIGKILL. Its data stay for restart_datanode()."""
        self.servers[1 + index].kill()

    def restart_datanode(self, index: int, timeout: timedelta = START_TIMEOUT) -> None:
        """Start a killed DataNode again with its ports and data. Return when it has registered with the NameNode."""
        server = self.servers[1 + index]
        server.kill()
        server.start()
        port = self._datanode_ports[index][1]
        wait_until(lambda: _datanode_reported(port), f"{server.name} to report", [server], timeout)

    @property
    def datanode_ports(self) -> list[tuple[int, int]]:
        """The ports at which clients reach each DataNode: for blocks, and by WebHDFS."""
        return [(blocks, web) for blocks, web, _ in self._datanode_ports]

    def client(self, user: str | None = None) -> hdfs.InsecureClient:
        """A WebHDFS client, as the superuser unless another user is named."""
        return hdfs.InsecureClient(self.webhdfs_url, user=user or current_user())


def live_datanodes(http_port: int) -> int:
    """How many DataNodes the NameNode at this port counts as live; -1 while it is down or in safe mode."""
    info = jmx_bean(http_port, "service=NameNode,name=NameNodeInfo")
    if info.get("Safemode", "down") != "":
        return -1
    return len(json.loads(info["LiveNodes"]))


def _datanode_reported(http_port: int) -> bool:
    info = jmx_bean(http_port, "service=DataNode,name=DataNodeInfo")
    actors = json.loads(info.get("BPServiceActorInfo", "[]"))
    return bool(actors) and all(actor.get("ActorState") == "RUNNING" for actor in actors)
