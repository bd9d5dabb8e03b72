"""A Spark standalone cluster on this machine: the class Standalone."""

from __future__ import annotations

import shlex
from datetime import timedelta
from pathlib import Path

from tests.clusters.artifacts import find_java, spark_home
from tests.clusters.machine import HOST, free_ports
from tests.clusters.servers import START_TIMEOUT, Server, SparkCluster, get_json, server_environment, wait_until
from tests.clusters.settings import LAUNCHER_OPTIONS, QUICK_START, class_archive, write_logging


class Standalone(SparkCluster):
    """A Spark master and workers, by default of one core each. They take 5 s to start.

    Each job starts executors of its own.
    """

    def __init__(self, workers: int = 2, cores: int = 1, memory: str = "2g", folder: Path | None = None) -> None:
        super().__init__(folder)
        self._workers, self._cores, self._memory = workers, cores, memory
        self.port, self.http_port, *self._worker_ports = free_ports(2 + workers)
        self.master_url = f"spark://{HOST}:{self.port}"

    def start(self) -> None:
        """Start the master and the workers. Return when the master counts every worker as live."""
        log = f"-Dlog4j2.configurationFile={write_logging(self.folder) / 'log4j2.properties'}"
        env = {
            **server_environment(find_java()),
            # A folder that is not there, for the sake of the class archive. The executors inherit it.
            "SPARK_CONF_DIR": str(self.folder / "no-conf"),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": shlex.join([*QUICK_START, *class_archive(), log]),
            "SPARK_LAUNCHER_OPTS": LAUNCHER_OPTIONS,
        }
        run: list[str | Path] = [spark_home() / "bin" / "spark-class"]
        package = "org.apache.spark.deploy"
        where = ["--host", HOST, "--port", str(self.port), "--webui-port", str(self.http_port)]
        logs = self.folder / "logs"
        self.servers = [Server("master", [*run, f"{package}.master.Master", *where], logs / "master.log", env)]
        for i, port in enumerate(self._worker_ports):
            size = ["--host", HOST, "-c", str(self._cores), "-m", self._memory, "--webui-port", str(port)]
            work = ["-d", str(self.folder / f"work{i}"), self.master_url]
            command = [*run, f"{package}.worker.Worker", *size, *work]
            self.servers.append(Server(f"worker{i}", command, logs / f"worker{i}.log", env))
        for server in self.servers:
            server.start()
        self.wait_live(self._workers)

    def wait_live(self, count: int, timeout: timedelta = START_TIMEOUT) -> None:
        """Return when the master counts exactly so many live workers."""
        expected = [server for server in self.servers if server.running()]
        wait_until(lambda: self.live_workers() == count, f"{count} live workers", expected, timeout)

    def live_workers(self) -> int:
        """How many workers the master counts as live; -1 while it is down."""
        state = get_json(f"http://{HOST}:{self.http_port}/json/") or {}
        return int(state.get("aliveworkers", -1))

    def kill_worker(self, index: int) -> None:
        """End a worker and its executors with SIGKILL, as the loss of a machine does."""
        self.servers[1 + index].kill()
