"""Real clusters on this machine's loopback: HDFS, Spark standalone and YARN, each server its own JVM.

`python -m tests.clusters hdfs up|down|status` keeps one HDFS for a developer: fixed ports, data that
survives down and up. The classes Hdfs, Standalone and Yarn are context managers for tests: free ports, a
folder of their own, and nothing left behind even when the test process is killed. spark_submit() runs a job
on any of them.

The servers come from hadoop-client-minicluster in the version of pyspark's own Hadoop client (56 MB, fetched
once into .cache/hadoop; the environment variable SHARDING_CACHE names another folder than .cache).
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import fcntl
import importlib.util
import json
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import hdfs
import psutil

from pipeline.errors import JobError, UsageError

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
START_TIMEOUT = timedelta(seconds=120)

MINICLUSTER = ("org.apache.hadoop", "hadoop-client-minicluster")
# The ResourceManager signs its proxy's certificates with these; the minicluster jar leaves them out.
BOUNCY_CASTLE = {"bcprov-jdk18on": "8 MB", "bcpkix-jdk18on": "1 MB", "bcutil-jdk18on": "1 MB"}
BOUNCY_CASTLE_VERSION = "1.78.1"

# Start-up is most of what these JVMs do: the quick compiler and the simple collector leave cores to the tests.
QUICK_START = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto", "-XX:-UsePerfData")

LOG4J2 = """\
rootLogger.level = info
rootLogger.appenderRef.stdout.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1}: %m%n%ex
"""


# ----------------------------------------------------------------------------------------------------
# Programs: java, pyspark, the Hadoop jars


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where downloads and the developer's HDFS live: $SHARDING_CACHE, else .cache in the repository."""
    return Path(environ.get("SHARDING_CACHE") or ROOT / ".cache").absolute()


def spark_home() -> Path:
    """The folder of the running interpreter's pyspark wheel, which holds bin/ and jars/."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise UsageError(f"{sys.executable} has no pyspark: run `make setup` and use its environment")
    return Path(spec.origin).parent


def find_java(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> Path:
    """The java to run: JAVA_HOME's, else the one on PATH, else the one `make setup` put into .venv."""
    home = environ.get("JAVA_HOME")
    candidates = [Path(home) / "bin" / "java"] if home else []
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    candidates += [Path(on_path)] if on_path else []
    candidates += [root / ".venv" / "java" / "bin" / "java"]
    for java in candidates:
        if os.access(java, os.X_OK):
            return java
    raise UsageError("no java in JAVA_HOME, on PATH or in .venv/java: install Java 17 or run `make setup`")


def java_home(java: Path) -> Path:
    """The JAVA_HOME of a java program, which YARN's launch scripts need: follows links, asks a shim."""
    home = java.resolve().parent.parent
    if (home / "bin" / "java").exists():
        return home
    command = [str(java), "-XshowSettings:properties", "-version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    return Path(re.findall(r"java\.home = (.*)", shown.stderr)[0])


def hadoop_version(jars: Path) -> str:
    """The version of pyspark's Hadoop client: servers of another version may not speak its protocol."""
    found = sorted(jars.glob("hadoop-client-api-*.jar"))
    if not found:
        raise UsageError(f"{jars} has no hadoop-client-api jar: install pyspark from PyPI, which has it")
    return found[0].stem.removeprefix("hadoop-client-api-")


def fetch_jar(group: str, artifact: str, version: str, size: str, folder: Path) -> Path:
    """Return folder/artifact-version.jar, downloaded without its dependencies on first use.

    By Maven where it is installed (it knows its user's mirrors), else by the Ivy inside pyspark. The jar
    appears in the folder by rename, so an interrupted download leaves nothing that looks whole. Raises JobError.
    """
    jar = folder / f"{artifact}-{version}.jar"
    if jar.exists():
        return jar
    folder.mkdir(parents=True, exist_ok=True)
    # Tests run in several processes: the others wait for the first one's download.
    with _locked(folder.parent):
        if not jar.exists():
            _download(group, artifact, version, size, jar)
    return jar


def _download(group: str, artifact: str, version: str, size: str, jar: Path) -> None:
    print(f"downloading {group}:{artifact}:{version} ({size}) into {jar.parent}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=jar.parent) as scratch:
        reasons = []
        for name, command in _download_commands(group, artifact, version, scratch).items():
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
            fetched = Path(scratch) / jar.name
            if done.returncode == 0 and fetched.exists():
                os.replace(fetched, jar)
                return
            reasons.append(f"{name}: {_first_complaint(done.stdout + done.stderr)}")
    where = f"check the network, or put it into {jar.parent}"
    raise JobError(f"could not download {jar.name} ({'; '.join(reasons)}): {where}")


def _download_commands(group: str, artifact: str, version: str, folder: str) -> dict[str, list[str]]:
    commands = {}
    if maven := shutil.which("mvn"):
        goal = ["dependency:copy", f"-Dartifact={group}:{artifact}:{version}", f"-DoutputDirectory={folder}"]
        commands["mvn"] = [maven, "-B", "-q", *goal]
    ivy = next((spark_home() / "jars").glob("ivy-*.jar"))
    what = ["-dependency", group, artifact, version, "-notransitive", "-types", "jar"]
    where = ["-cache", f"{folder}/ivy", "-retrieve", f"{folder}/[artifact]-[revision].[ext]"]
    commands["ivy"] = [str(find_java()), "-jar", str(ivy), *what, *where]
    return commands


def _first_complaint(output: str) -> str:
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in output.splitlines()]
    complaint = re.compile(r"error|unresolved|not found|exception", re.IGNORECASE)
    complaints = [line for line in lines if complaint.search(line)]
    return (complaints or [line for line in lines if line] or ["no output"])[0][:200]


def unpack_webapps(jar: Path) -> Path:
    """Return a folder with the jar's webapps/, unpacked on first use; WebHDFS is one of them.

    Left in the jar, every server would go through all of it at every start: 4 s each.
    """
    folder = jar.with_suffix(".web")
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=jar.parent) as scratch:
            with zipfile.ZipFile(jar) as archive:
                archive.extractall(
                    f"{scratch}/web", [name for name in archive.namelist() if name.startswith("webapps/")]
                )
            # Another process may have been faster; its copy is as good.
            with contextlib.suppress(OSError):
                os.rename(f"{scratch}/web", folder)
    return folder


def hadoop_classpath() -> list[Path]:
    """What an HDFS server needs: its own jar and, from pyspark, the client libraries and logging."""
    jars = spark_home() / "jars"
    server = fetch_jar(*MINICLUSTER, hadoop_version(jars), "56 MB", cache_folder() / "hadoop")
    patterns = ("hadoop-client-api-*", "hadoop-client-runtime-*", "*slf4j*", "log4j*")
    libraries = sorted(jar for pattern in patterns for jar in jars.glob(f"{pattern}.jar"))
    return [unpack_webapps(server), server, *libraries]


def yarn_classpath() -> list[Path]:
    """What a YARN server needs: as HDFS, and Bouncy Castle (10 MB)."""
    folder = cache_folder() / "hadoop"
    group, version = "org.bouncycastle", BOUNCY_CASTLE_VERSION
    extra = [fetch_jar(group, name, version, size, folder) for name, size in BOUNCY_CASTLE.items()]
    return [*hadoop_classpath(), *extra]


# ----------------------------------------------------------------------------------------------------
# Ports, settings: pure decisions


def current_user() -> str:
    """The account the servers run as, which is HDFS's superuser (the JVM asks the system, not $USER)."""
    return pwd.getpwuid(os.getuid()).pw_name


def free_ports(count: int, host: str = HOST) -> list[int]:
    """Ports of an address, loopback if none is given, that nobody listens on: all different, drawn at random.

    From below the ephemeral range, so that no outgoing connection takes one between here and its use.
    """
    candidates = random.SystemRandom().sample(range(20000, 32000), 64 + 4 * count)
    free = [port for port in candidates if port_is_free(port, host)]
    return free[:count]


def port_is_free(port: int, host: str = HOST) -> bool:
    with socket.socket() as probe:
        # As the servers do: a port whose last connections are still closing may be listened on again.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def port_holder(port: int) -> str:
    """Who listens on the port, in words; other users' processes can only be guessed at."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                process = psutil.Process(connection.pid)
                return f"{process.name()}, pid {process.pid}"
    return "a process of another user"


def site_xml(settings: Mapping[str, str]) -> str:
    """A Hadoop configuration file."""
    row = "  <property><name>{}</name><value>{}</value></property>\n"
    rows = [row.format(name, escape(value)) for name, value in settings.items()]
    return f'<?xml version="1.0"?>\n<configuration>\n{"".join(rows)}</configuration>\n'


def core_settings(folder: Path, rpc_port: int) -> dict[str, str]:
    return {
        "fs.defaultFS": f"hdfs://{HOST}:{rpc_port}",
        "hadoop.tmp.dir": str(folder / "tmp"),
        # WebHDFS requests that name no user come from the superuser rather than from "dr.who".
        "hadoop.http.staticuser.user": current_user(),
    }


def hdfs_settings(folder: Path, rpc_port: int, http_port: int) -> dict[str, str]:
    """hdfs-site.xml for servers and clients: three replicas; a silent DataNode is avoided after 3 s, dead after 11."""
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
        # Dead after 2 recheck intervals and 10 heartbeats: a loaded machine must not lose a live node to a pause.
        "dfs.heartbeat.interval": "1",
        "dfs.namenode.heartbeat.recheck-interval": "500",
        "dfs.namenode.stale.datanode.interval": "3000",
        "dfs.namenode.avoid.read.stale.datanode": "true",
        "dfs.namenode.avoid.write.stale.datanode": "true",
        # With three nodes there is no fourth to replace a dead one: go on writing to those that are left.
        "dfs.client.block.write.replace-datanode-on-failure.policy": "NEVER",
        "dfs.client.block.write.locateFollowingBlock.retries": "8",
    }


def datanode_settings(folder: Path, index: int, ports: Sequence[int]) -> dict[str, str]:
    """What distinguishes DataNode `index` from the others; ports: data, HTTP (WebHDFS), IPC."""
    data, http, ipc = (f"{HOST}:{port}" for port in ports)
    return {
        "dfs.datanode.data.dir": f"file://{folder}/data{index}",
        "dfs.datanode.address": data,
        "dfs.datanode.http.address": http,
        "dfs.datanode.ipc.address": ipc,
        # They start together: look for the NameNode often until it is up.
        "ipc.client.connect.retry.interval": "200",
        "ipc.client.connect.max.retries": "300",
    }


def yarn_settings(folder: Path, ports: Sequence[int], memory_mb: int) -> dict[str, str]:
    """yarn-site.xml for one ResourceManager and one NodeManager; ports: eight free ones."""
    names = (
        "resourcemanager.address",
        "resourcemanager.scheduler.address",
        "resourcemanager.resource-tracker.address",
        "resourcemanager.admin.address",
        "resourcemanager.webapp.address",
        "nodemanager.address",
        "nodemanager.localizer.address",
        "nodemanager.webapp.address",
    )
    scheduler = "org.apache.hadoop.yarn.server.resourcemanager.scheduler.fifo.FifoScheduler"
    return {
        **{f"yarn.{name}": f"{HOST}:{port}" for name, port in zip(names, ports, strict=True)},
        "yarn.resourcemanager.hostname": HOST,
        "yarn.nodemanager.hostname": HOST,
        "yarn.resourcemanager.scheduler.class": scheduler,
        "yarn.scheduler.minimum-allocation-mb": "128",
        "yarn.nodemanager.resource.memory-mb": str(memory_mb),
        "yarn.nodemanager.resource.cpu-vcores": "4",
        # A JVM's virtual size means nothing here, and pyspark's forks are counted twice.
        "yarn.nodemanager.vmem-check-enabled": "false",
        "yarn.nodemanager.pmem-check-enabled": "false",
        "yarn.nodemanager.local-dirs": str(folder / "local"),
        "yarn.nodemanager.log-dirs": str(folder / "containers"),
        # A developer's disk is often fuller than 90 %, at which the NodeManager would refuse to work.
        "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": "100",
        "yarn.nodemanager.disk-health-checker.min-free-space-per-disk-mb": "0",
        # A killed application goes at once; the defaults wait for a drain that tests have no use for.
        "yarn.nodemanager.sleep-delay-before-sigkill.ms": "50",
        "yarn.resourcemanager.nodemanagers.heartbeat-interval-ms": "250",
        "yarn.am.liveness-monitor.expiry-interval-ms": "60000",
    }


def write_conf(folder: Path, files: Mapping[str, Mapping[str, str]]) -> None:
    """Write Hadoop configuration files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, settings in files.items():
        (folder / name).write_text(site_xml(settings))


def write_logging(folder: Path) -> Path:
    """Write the servers' logging and return its folder: not conf, which is on the class path of clients too."""
    logging = folder / "logging"
    logging.mkdir(parents=True, exist_ok=True)
    (logging / "log4j2.properties").write_text(LOG4J2)
    return logging


# ----------------------------------------------------------------------------------------------------
# Processes


class _Watcher:
    """A small process that kills what it was told of once this one is gone, however it went.

    It reads names of processes and folders from a pipe whose other end only this process holds: the end of
    the pipe is the end of this process, by exit, exception or SIGKILL. Works on every Unix, and, unlike
    Linux's parent-death signal, does not mistake the end of a thread for the end of the process.
    """

    PROGRAM = """
import psutil, shutil, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
processes, folders = [], []
for line in sys.stdin:
    kind, _, value = line.rstrip("\\n").partition(" ")
    if kind == "folder":
        folders.append(value)
    elif kind == "keep":
        folders.remove(value)
    else:
        try:
            processes.append(psutil.Process(int(value)))
        except psutil.NoSuchProcess:
            pass
doomed = []
for process in processes:
    try:
        doomed += [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        pass
for process in doomed:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass
psutil.wait_procs(doomed, timeout=10)
for folder in folders:
    shutil.rmtree(folder, ignore_errors=True)
"""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def watch(self, kind: str, value: object) -> None:
        """Have a "pid" killed or a "folder" removed at the end of this process; "keep" takes a folder back."""
        if self._process is None or self._owner != os.getpid():
            command = [sys.executable, "-c", self.PROGRAM]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, text=True, start_new_session=True)
            self._owner = os.getpid()
            atexit.register(self.close)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {value}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._process.communicate()
            self._process = None


_watcher = _Watcher()


def end_tree(processes: Iterable[psutil.Process], grace: timedelta = timedelta(0)) -> None:
    """End processes and all they started: politely where there is grace, else and afterwards by SIGKILL."""
    doomed: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            doomed += [*process.children(recursive=True), process]
    if grace:
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, doomed = psutil.wait_procs(doomed, timeout=grace.total_seconds())
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(doomed, timeout=10)


@dataclass
class Server:
    """One server process: how to start it, and the running process once started."""

    name: str
    command: Sequence[str | Path]
    log: Path
    env: Mapping[str, str]
    outlives_us: bool = False
    process: psutil.Popen | None = field(default=None, init=False)

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # Its own session: a terminal's Ctrl-C goes to us, and we decide what is stopped in which order.
        with self.log.open("ab") as log:
            self.process = psutil.Popen(
                [str(part) for part in self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.env),
                cwd=self.log.parent,
                start_new_session=True,
            )
        if not self.outlives_us:
            _watcher.watch("pid", self.process.pid)

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was never started"
        return int(self.process.pid)

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL, as a machine that loses power: no goodbye to its peers."""
        if self.process is not None:
            end_tree([self.process])

    def complaint(self) -> str:
        """The most telling line of the log of a server that did not come up."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        telling = [line for line in lines if re.search(r"BindException|Exception:|ERROR|FATAL|Error:", line)]
        return (telling or lines or ["nothing was logged"])[-1].strip()[:300]


def wait_until(ready: Callable[[], bool], what: str, servers: Sequence[Server], timeout: timedelta) -> None:
    """Poll a signal of the servers themselves until it holds. Raises JobError when one dies or time is up."""
    deadline = time.monotonic() + timeout.total_seconds()
    while not ready():
        for server in servers:
            if not server.running():
                fact = f"{server.name} ended while waiting for {what}"
                raise JobError(f"{fact}: {server.complaint()}; see {server.log}")
        if time.monotonic() > deadline:
            logs = servers[0].log.parent if servers else "the logs"
            raise JobError(f"{what}: not within {timeout.total_seconds():.0f} s; see {logs}")
        time.sleep(0.1)


def _get_json(url: str) -> dict[str, Any] | None:
    """The JSON at a URL of a local server, None while it does not answer with any."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as answer:
            return dict(json.load(answer))
    except (OSError, ValueError):
        return None


def jmx_bean(port: int, name: str) -> dict[str, Any]:
    """One bean of a Hadoop server's metrics page, empty while the server is not up."""
    page = _get_json(f"http://{HOST}:{port}/jmx?qry=Hadoop:{name}") or {}
    return dict((page.get("beans") or [{}])[0])


def hadoop_command(java: Path, folder: Path, classpath: Sequence[Path]) -> list[str | Path]:
    """How a Hadoop server's JVM starts, up to the class: settings from folder/conf, temporary files in folder/tmp."""
    scratch = folder / "tmp"
    # Whatever killed servers of an earlier start left there.
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    path = os.pathsep.join(map(str, [folder / "conf", write_logging(folder), *classpath]))
    return [java, "-Xmx256m", *QUICK_START, f"-Djava.io.tmpdir={scratch}", "-cp", path]


def server_environment(java: Path) -> dict[str, str]:
    """What a server inherits: nothing of the user's own Spark or Hadoop settings, nor another user name."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "HADOOP_", "YARN_", "PYSPARK_"))}
    return {
        **inherited,
        "JAVA_HOME": str(java_home(java)),
        "SPARK_LOCAL_IP": HOST,
        "SPARK_HOME": str(spark_home()),
    }


class Cluster:
    """What the three clusters share: a folder, servers, a sure end. Use as a context manager."""

    def __init__(self, folder: Path | None = None) -> None:
        self._temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="sharding-cluster-"))
        self.servers: list[Server] = []
        if self._temporary:
            _watcher.watch("folder", self.folder)

    def __enter__(self) -> Any:
        try:
            self.start()
        except BaseException:
            if self._temporary:
                # The error names a log in there: that must outlive this process.
                self._temporary = False
                _watcher.watch("keep", self.folder)
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """End every server and all it started; a folder made for this cluster goes too."""
        end_tree([server.process for server in self.servers if server.process is not None])
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def pids(self) -> list[int]:
        """The servers' process ids."""
        return [server.pid for server in self.servers if server.process is not None]


# ----------------------------------------------------------------------------------------------------
# The clusters


class Hdfs(Cluster):
    """One NameNode and three DataNodes with WebHDFS; the current user is the superuser. 9 s to start, 1 GB.

    uri: hdfs://127.0.0.1:PORT; webhdfs_url: http://127.0.0.1:PORT; conf_dir: for HADOOP_CONF_DIR.
    A folder that already holds a file system is served again, not formatted.
    """

    def __init__(
        self,
        folder: Path | None = None,
        rpc_port: int | None = None,
        http_port: int | None = None,
        datanodes: int = 3,
        outlives_us: bool = False,
    ) -> None:
        super().__init__(folder)
        ports = free_ports(2 + 3 * datanodes)
        self.rpc_port, self.http_port = rpc_port or ports[0], http_port or ports[1]
        self.uri = f"hdfs://{HOST}:{self.rpc_port}"
        self.webhdfs_url = f"http://{HOST}:{self.http_port}"
        self.conf_dir = self.folder / "conf"
        self._datanode_ports = [ports[2 + 3 * i : 5 + 3 * i] for i in range(datanodes)]
        self._outlives_us = outlives_us

    def start(self) -> None:
        """Start all servers and return when every DataNode is live and the file system accepts writes."""
        self.launch()
        self.wait_live(len(self._datanode_ports))

    def launch(self) -> None:
        """Start all servers, formatting a file system where the folder has none, and return at once."""
        java = find_java()
        settings = hdfs_settings(self.folder, self.rpc_port, self.http_port)
        core = core_settings(self.folder, self.rpc_port)
        write_conf(self.conf_dir, {"core-site.xml": core, "hdfs-site.xml": settings})
        base = hadoop_command(java, self.folder, hadoop_classpath())
        namenode = [*base, "org.apache.hadoop.hdfs.server.namenode.NameNode"]
        env = server_environment(java)
        if not (self.folder / "name" / "current").exists():
            self._format(namenode, env)
        datanode = [*base, "org.apache.hadoop.hdfs.server.datanode.DataNode"]
        self.servers = [self._server("namenode", namenode, env)]
        for i, ports in enumerate(self._datanode_ports):
            flags = [f"-D{k}={v}" for k, v in datanode_settings(self.folder, i, ports).items()]
            self.servers.append(self._server(f"datanode{i}", [*datanode, *flags], env))
        for server in self.servers:
            server.start()

    def _server(self, name: str, command: Sequence[str | Path], env: Mapping[str, str]) -> Server:
        return Server(name, command, self.folder / "logs" / f"{name}.log", env, self._outlives_us)

    def _format(self, namenode: Sequence[str | Path], env: Mapping[str, str]) -> None:
        log = self.folder / "logs" / "format.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        # A DataNode refuses a NameNode other than the one it knows: leftovers of a lost file system go as well.
        for data in self.folder.glob("data*"):
            shutil.rmtree(data)
        with log.open("wb") as out:
            command = [str(part) for part in [*namenode, "-format", "-nonInteractive"]]
            done = subprocess.run(command, stdout=out, stderr=out, env=dict(env), stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise JobError(f"NameNode -format ended with {done.returncode}: see {log}")

    def live_datanodes(self) -> int:
        """How many DataNodes the NameNode believes to be alive; -1 while it does not answer or is in safe mode."""
        return live_datanodes(self.http_port)

    def wait_live(self, count: int, timeout: timedelta = START_TIMEOUT) -> None:
        """Return when the NameNode counts exactly so many live DataNodes (it notices a killed one after 11 s)."""
        expected = [server for server in self.servers if server.running()]
        wait_until(lambda: self.live_datanodes() == count, f"{count} live DataNodes", expected, timeout)

    def kill_datanode(self, index: int) -> None:
        """SIGKILL one DataNode; its data stays for restart_datanode."""
        self.servers[1 + index].kill()

    def restart_datanode(self, index: int, timeout: timedelta = START_TIMEOUT) -> None:
        """Start a killed DataNode again on its ports and data; return when it has reported to the NameNode."""
        server = self.servers[1 + index]
        server.kill()
        server.start()
        port = self._datanode_ports[index][1]
        wait_until(lambda: _datanode_reported(port), f"{server.name} to report", [server], timeout)

    def client(self, user: str | None = None) -> hdfs.InsecureClient:
        """A WebHDFS client, as the superuser unless another user is named."""
        return hdfs.InsecureClient(self.webhdfs_url, user=user or current_user())


def live_datanodes(http_port: int) -> int:
    """How many DataNodes the NameNode at this port counts as alive; -1 while it is down or in safe mode."""
    info = jmx_bean(http_port, "service=NameNode,name=NameNodeInfo")
    if info.get("Safemode", "down") != "":
        return -1
    return len(json.loads(info["LiveNodes"]))


def _datanode_reported(http_port: int) -> bool:
    info = jmx_bean(http_port, "service=DataNode,name=DataNodeInfo")
    actors = json.loads(info.get("BPServiceActorInfo", "[]"))
    return bool(actors) and all(actor.get("ActorState") == "RUNNING" for actor in actors)


class Standalone(Cluster):
    """A Spark master and workers of one core each (settable). 5 s to start; executors come with each job."""

    def __init__(self, workers: int = 2, cores: int = 1, memory: str = "2g", folder: Path | None = None) -> None:
        super().__init__(folder)
        self._workers, self._cores, self._memory = workers, cores, memory
        self.port, self.http_port, *self._worker_ports = free_ports(2 + workers)
        self.master_url = f"spark://{HOST}:{self.port}"

    def start(self) -> None:
        """Start master and workers and return when the master counts every worker as alive."""
        env = {
            **server_environment(find_java()),
            "SPARK_CONF_DIR": str(write_logging(self.folder)),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": " ".join(QUICK_START),
        }
        run: list[str | Path] = [spark_home() / "bin" / "spark-class"]
        package = "org.apache.spark.deploy"
        where = ["--host", HOST, "--port", str(self.port), "--webui-port", str(self.http_port)]
        logs = self.folder / "logs"
        self.servers = [Server("master", [*run, f"{package}.master.Master", *where], logs / "master.log", env)]
        for i, port in enumerate(self._worker_ports):
            size = ["--host", HOST, "-c", str(self._cores), "-m", self._memory, "--webui-port", str(port)]
            command = [
                *run,
                f"{package}.worker.Worker",
                *size,
                "-d",
                self.folder / f"work{i}",
                self.master_url,
            ]
            self.servers.append(Server(f"worker{i}", command, logs / f"worker{i}.log", env))
        for server in self.servers:
            server.start()
        self.wait_live(self._workers)

    def wait_live(self, count: int, timeout: timedelta = START_TIMEOUT) -> None:
        """Return when the master counts exactly so many live workers."""
        expected = [server for server in self.servers if server.running()]
        wait_until(lambda: self.live_workers() == count, f"{count} live workers", expected, timeout)

    def live_workers(self) -> int:
        state = _get_json(f"http://{HOST}:{self.http_port}/json/") or {}
        return int(state.get("aliveworkers", -1))

    def executors(self) -> list[psutil.Process]:
        """The executor JVMs now running, by worker."""
        found = []
        for server in self.servers[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(server.pid).children(recursive=True)
                found += [child for child in children if _is_executor(child)]
        return found

    def kill_executor(self, index: int = 0) -> None:
        """SIGKILL one executor and its Python workers; Spark starts another on the same worker."""
        end_tree([self.executors()[index]])

    def kill_worker(self, index: int) -> None:
        """SIGKILL a worker and its executors, as a machine that is lost."""
        self.servers[1 + index].kill()


def _is_executor(process: psutil.Process) -> bool:
    # The script that started a worker may leave it a zombie for a child, which has no command line.
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("CoarseGrainedExecutorBackend" in part for part in process.cmdline())
    return False


class Yarn(Cluster):
    """A ResourceManager and one NodeManager on top of an Hdfs. 9 s to start, 0.5 GB, plus what containers take.

    conf_dir holds YARN's and HDFS's configuration: all that spark-submit needs as HADOOP_CONF_DIR.
    """

    def __init__(self, hdfs: Hdfs, memory_mb: int = 6144, folder: Path | None = None) -> None:
        super().__init__(folder)
        self.hdfs = hdfs
        self.conf_dir = self.folder / "conf"
        self._ports = free_ports(8)
        self._memory_mb = memory_mb

    def start(self) -> None:
        """Start both servers and return when the ResourceManager counts the NodeManager as active."""
        java = find_java()
        write_conf(self.conf_dir, {"yarn-site.xml": yarn_settings(self.folder, self._ports, self._memory_mb)})
        for name in ("core-site.xml", "hdfs-site.xml"):
            shutil.copy(self.hdfs.conf_dir / name, self.conf_dir / name)
        env = {**server_environment(java), "HADOOP_CONF_DIR": str(self.conf_dir)}
        base = hadoop_command(java, self.folder, yarn_classpath())
        package, logs = "org.apache.hadoop.yarn.server", self.folder / "logs"
        self.servers = [
            Server("resourcemanager", [*base, f"{package}.resourcemanager.ResourceManager"], logs / "rm.log", env),
            Server("nodemanager", [*base, f"{package}.nodemanager.NodeManager"], logs / "nm.log", env),
        ]
        for server in self.servers:
            server.start()
        wait_until(lambda: self.active_nodes() == 1, "an active NodeManager", self.servers, START_TIMEOUT)

    def active_nodes(self) -> int:
        metrics = jmx_bean(self._ports[4], "service=ResourceManager,name=ClusterMetrics")
        return int(metrics.get("NumActiveNMs", -1))

    def container_logs(self) -> str:
        """What the containers of the latest application wrote: in cluster mode also the job's own output."""
        applications = sorted((self.folder / "containers").glob("application_*"), key=lambda p: p.stat().st_mtime)
        files = sorted(applications[-1].glob("*/std*")) if applications else []
        return "".join(f"== {f.parent.name}/{f.name}\n{f.read_text(errors='replace')}" for f in files)


# ----------------------------------------------------------------------------------------------------
# Jobs


def submit_environment(extra: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a spark-submit: this interpreter and its pyspark, no configuration but what is given."""
    dropped = ("SPARK_", "HADOOP_", "YARN_", "PYSPARK_", "PYTHONPATH")
    inherited = {k: v for k, v in environ.items() if not k.startswith(dropped)}
    # spark-submit and the Python workers find their interpreter by PATH: not to be resolved, a venv's is a link.
    path = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    return {
        **inherited,
        "PATH": path,
        "JAVA_HOME": str(java_home(find_java(environ))),
        "SPARK_HOME": str(spark_home()),
        "SPARK_LOCAL_IP": HOST,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_SUBMIT_OPTS": " ".join(QUICK_START),
        **extra,
    }


def submit_conf(master: str, cores: int = 2) -> dict[str, str]:
    """Settings a job needs on these clusters and no job should set itself; the caller's own override them."""
    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    if master.startswith("local"):
        return quiet
    quiet["spark.executor.extraJavaOptions"] = " ".join(QUICK_START)
    if master != "yarn":
        return quiet
    python = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": HOST}
    return {
        **quiet,
        "spark.yarn.am.extraJavaOptions": " ".join(QUICK_START),
        "spark.yarn.jars": f"local:{spark_home()}/jars/*",
        **{f"spark.yarn.appMasterEnv.{k}": v for k, v in python.items()},
        **{f"spark.executorEnv.{k}": v for k, v in python.items()},
        "spark.executor.instances": str(cores),
        "spark.executor.memory": "800m",
        # One attempt: a second run of a job that failed would only hide why.
        "spark.yarn.maxAppAttempts": "1",
        "spark.yarn.am.waitTime": "60s",
    }


def spark_submit(
    script: str | Path,
    *args: object,
    master: str = "local[2]",
    conf: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    deploy_mode: str | None = None,
    timeout: timedelta = timedelta(seconds=280),
) -> subprocess.CompletedProcess[str]:
    """Run a script by the running interpreter's own spark-submit and return its exit code, stdout and stderr.

    conf: --conf settings; env: environment variables, such as HADOOP_CONF_DIR (YARN needs it) and SPARK_CONF_DIR
    (unset otherwise). Raises subprocess.TimeoutExpired, with what was printed, after ending all it started.
    """
    settings = {**submit_conf(master), **(conf or {})}
    command = [str(spark_home() / "bin" / "spark-submit"), "--master", master]
    command += ["--deploy-mode", deploy_mode] if deploy_mode else []
    command += [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]
    command += [str(script), *map(str, args)]
    process = psutil.Popen(
        command,
        env=submit_environment(env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _watcher.watch("pid", process.pid)
    try:
        stdout, stderr = process.communicate(timeout=timeout.total_seconds())
    except BaseException:
        end_tree([process])
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


# ----------------------------------------------------------------------------------------------------
# The developer's HDFS: `hdfs up`, `hdfs down`, `hdfs status`


@dataclass(frozen=True)
class Running:
    """What `hdfs up` remembers: ports, and each server's pid with its start time (pids are used again)."""

    rpc_port: int
    http_port: int
    servers: dict[str, tuple[int, float]]

    def alive(self) -> dict[str, psutil.Process]:
        found = {}
        for name, (pid, created) in self.servers.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                    found[name] = process
        return found


def read_running(folder: Path) -> Running | None:
    try:
        stored = json.loads((folder / "state.json").read_text())
    except FileNotFoundError:
        return None
    servers = {name: (int(pid), float(created)) for name, (pid, created) in stored["servers"].items()}
    return Running(stored["rpc_port"], stored["http_port"], servers)


def write_running(folder: Path, running: Running) -> None:
    scratch = folder / "state.json.tmp"
    scratch.write_text(json.dumps(vars(running), indent=2))
    os.replace(scratch, folder / "state.json")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time: two `up` would each start half of the servers."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def describe(folder: Path, running: Running) -> str:
    """What a user of the running HDFS needs to know."""
    return (
        f"  file system  hdfs://{HOST}:{running.rpc_port}\n"
        f"  WebHDFS      http://{HOST}:{running.http_port}\n"
        f"  for clients  export HADOOP_CONF_DIR={folder / 'conf'}\n"
        f"  stop it      make hdfs-down   (python -m tests.clusters hdfs down --delete also removes its files)"
    )


def hdfs_up(folder: Path, rpc_port: int, http_port: int) -> None:
    """Start the developer's HDFS, or say that it is up. Raises UsageError for a busy port; leaves nothing behind."""
    with _locked(folder):
        running = read_running(folder)
        alive = running.alive() if running else {}
        if running and len(alive) == len(running.servers):
            port, datanodes = running.http_port, len(alive) - 1
            wait_until(lambda: live_datanodes(port) == datanodes, "all DataNodes", [], START_TIMEOUT)
            print(f"HDFS is already up\n{describe(folder, running)}")
            return
        # A NameNode without its DataNodes, or the reverse, is of no use: start afresh on the same files.
        end_tree(alive.values())
        for port in (rpc_port, http_port):
            if not port_is_free(port):
                raise UsageError(
                    f"port {port} is in use by {port_holder(port)}: stop that, or pass another --port/--http-port"
                )
        began = time.monotonic()
        cluster = Hdfs(folder, rpc_port, http_port, outlives_us=True)
        # Ctrl-C and `kill` alike must end what was started so far.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        with contextlib.ExitStack() as stack:
            stack.callback(cluster.stop)
            cluster.launch()
            servers = {s.name: (s.pid, psutil.Process(s.pid).create_time()) for s in cluster.servers}
            running = Running(rpc_port, http_port, servers)
            # Before they are ready: should this process be killed while waiting, `down` finds them.
            write_running(folder, running)
            cluster.wait_live(len(servers) - 1)
            stack.pop_all()
    print(f"HDFS is up: one NameNode, three DataNodes ({time.monotonic() - began:.0f} s)\n{describe(folder, running)}")


def hdfs_down(folder: Path, delete: bool) -> None:
    """Stop the developer's HDFS if it is up; with delete, remove its files, logs and configuration too."""
    with _locked(folder):
        running = read_running(folder)
        alive = running.alive() if running else {}
        end_tree(alive.values(), grace=timedelta(seconds=10))
        (folder / "state.json").unlink(missing_ok=True)
        if delete:
            shutil.rmtree(folder)
    print(f"HDFS is {'down' if alive else 'not up'}{', its files are removed' if delete else ''}")


def hdfs_status(folder: Path) -> bool:
    """Say whether the developer's HDFS is up and takes writes, and return it."""
    running = read_running(folder)
    alive = running.alive() if running else {}
    if running is None or "namenode" not in alive:
        print("HDFS is not up: start it with make hdfs-up")
        return False
    live = live_datanodes(running.http_port)
    if live < 0:
        print(f"HDFS is starting (or in safe mode): see {folder / 'logs'}")
        return False
    print(f"HDFS is up: {live} live DataNodes\n{describe(folder, running)}")
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clusters", description="A real HDFS on this machine.")
    hdfs_parser = parser.add_subparsers(dest="cluster", required=True).add_parser("hdfs")
    actions = hdfs_parser.add_subparsers(dest="action", required=True)
    up = actions.add_parser("up", help="start it; files of an earlier one are still there")
    up.add_argument("--port", type=int, default=9820, help="of the NameNode (default 9820)")
    up.add_argument("--http-port", type=int, default=9870, help="of WebHDFS (default 9870)")
    down = actions.add_parser("down", help="stop it")
    down.add_argument("--delete", action="store_true", help="remove its files, logs and configuration too")
    actions.add_parser("status", help="say whether it is up (exit 0) or not (exit 1)")
    options = parser.parse_args(arguments)
    folder = cache_folder() / "hdfs"
    try:
        if options.action == "up":
            hdfs_up(folder, options.port, options.http_port)
        elif options.action == "down":
            hdfs_down(folder, options.delete)
        else:
            return 0 if hdfs_status(folder) else 1
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: nothing is left running", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
