"""The clusters that other tests stand on are real, survive what they claim to survive, and leave nothing behind."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from hdfs.util import HdfsError
from hdfs_native import Client, WriteOptions

from pipeline.errors import JobError, UsageError
from tests import clusters
from tests.clusters import Hdfs, Standalone, Yarn, spark_submit

MEGABYTE = os.urandom(1 << 20)

# Each task reads a file of HDFS by itself, as the pipeline's tasks do, without Spark's help.
JOB = """
import os, sys, time
from pyspark.sql import SparkSession

uri, path, exit_code, gate = sys.argv[1:]

def read(rows):
    from hdfs_native import Client
    from pyspark import TaskContext
    content = Client(uri).read(path).read()
    while gate and not os.path.exists(gate):
        open(f"{gate}.{TaskContext.get().partitionId()}", "a").close()
        time.sleep(0.05)
    yield from ((row, len(content)) for row in rows)

spark = SparkSession.builder.getOrCreate()
print("RESULT", sorted(spark.sparkContext.parallelize(range(4), 2).mapPartitions(read).collect()))
sys.exit(int(exit_code))
"""
RESULT = "RESULT [(0, 1000), (1, 1000), (2, 1000), (3, 1000)]"


@pytest.fixture
def job(hdfs: Hdfs, tmp_path: Path) -> Path:
    hdfs.client().write("/job/input", data=b"x" * 1000, overwrite=True)
    script = tmp_path / "job.py"
    script.write_text(JOB)
    return script


@pytest.fixture
def three_datanodes(hdfs: Hdfs) -> Iterator[Hdfs]:
    """The session's HDFS, with whatever DataNodes the test kills brought back."""
    yield hdfs
    for index, server in enumerate(hdfs.servers[1:]):
        if not server.running():
            hdfs.restart_datanode(index)
    hdfs.wait_live(3)


def run_cli(*arguments: object, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.clusters", *map(str, arguments)]
    env = {**os.environ, "SHARDING_CACHE": str(cache)}
    return subprocess.run(command, cwd=clusters.ROOT, env=env, capture_output=True, text=True, timeout=120)


def datanodes_connected(hdfs: Hdfs, kind: int) -> list[int]:
    """The DataNodes this process has a connection to; kind 0: data transfer, 1: WebHDFS."""
    index = {ports[kind]: i for i, ports in enumerate(hdfs._datanode_ports)}
    connections = psutil.Process().net_connections()
    established = [c for c in connections if c.raddr and c.status == psutil.CONN_ESTABLISHED]
    return [index[c.raddr.port] for c in established if c.raddr.port in index]


def put(client: Client, path: str, content: bytes, overwrite: bool = False) -> None:
    with client.create(path, WriteOptions(overwrite=overwrite)) as file:
        file.write(content)


# HDFS


def test_what_one_client_puts_the_other_reads(hdfs: Hdfs) -> None:
    web, native = hdfs.client(), Client(hdfs.uri)
    web.write("/both/by-web", data=MEGABYTE)
    put(native, "/both/by-native", MEGABYTE)
    assert native.read("/both/by-web").read() == MEGABYTE
    with web.read("/both/by-native") as file:
        assert file.read() == MEGABYTE
    assert native.get_file_info("/both/by-native").replication == 3


def test_hdfs_native_renames_onto_an_existing_file_only_when_told(hdfs: Hdfs) -> None:
    client = Client(hdfs.uri)
    put(client, "/rename/new", b"new")
    put(client, "/rename/old", b"old")
    with pytest.raises(FileExistsError):
        client.rename("/rename/new", "/rename/old")
    client.rename("/rename/new", "/rename/old", overwrite=True)
    assert client.read("/rename/old").read() == b"new"
    assert [Path(s.path).name for s in client.list_status("/rename")] == ["old"]


def test_clients_find_the_file_system_in_the_conf_dir(hdfs: Hdfs) -> None:
    put(Client(config_dir=str(hdfs.conf_dir)), "/conf/file", b"found")
    assert Client(hdfs.uri).read("/conf/file").read() == b"found"


def test_another_user_is_refused_what_the_superuser_may(hdfs: Hdfs) -> None:
    hdfs.client().write("/private/file", data=b"mine")
    hdfs.client().set_permission("/private", "700")
    with pytest.raises(HdfsError, match=r"Permission denied: user=alice"), hdfs.client("alice").read("/private/file"):
        pass


def test_a_datanode_killed_under_a_reader_is_survived(three_datanodes: Hdfs) -> None:
    hdfs = three_datanodes
    client = Client(hdfs.uri, config_dir=str(hdfs.conf_dir))
    put(client, "/kill/read", MEGABYTE * 32)
    received, victim = [], None
    for chunk in client.read("/kill/read"):
        received.append(bytes(chunk))
        if victim is None and len(received) == 2:
            victim = datanodes_connected(hdfs, kind=0)[-1]
            hdfs.kill_datanode(victim)
    assert victim is not None
    assert b"".join(received) == MEGABYTE * 32
    # With a node gone for good the other two serve both clients. A node that is merely silent is still given out where
    # three replicas are wanted of three nodes, and hdfs-native gives up when such a one is the first of the three.
    hdfs.wait_live(2)
    put(client, "/kill/native", MEGABYTE)
    hdfs.client().write("/kill/web", data=MEGABYTE)
    assert client.read("/kill/web").read() == MEGABYTE
    with hdfs.client().read("/kill/native") as file:
        assert file.read() == MEGABYTE
    hdfs.restart_datanode(victim)
    hdfs.wait_live(3)


def test_a_datanode_killed_under_hdfs_natives_writer_is_survived(three_datanodes: Hdfs) -> None:
    hdfs = three_datanodes
    # The cluster's settings matter: by default a writer insists on a third node in place of the dead one.
    client = Client(hdfs.uri, config_dir=str(hdfs.conf_dir))
    with client.create("/kill/written", WriteOptions(overwrite=True)) as file:
        for written in range(24):
            file.write(MEGABYTE)
            if written == 8:
                hdfs.kill_datanode(datanodes_connected(hdfs, kind=0)[-1])
    assert client.read("/kill/written").read() == MEGABYTE * 24


def test_a_datanode_killed_behind_webhdfs_writer_is_survived(three_datanodes: Hdfs) -> None:
    hdfs = three_datanodes

    def content() -> Iterator[bytes]:
        for sent in range(24):
            yield MEGABYTE
            if sent == 8:
                # The node spoken to is a gateway that dies with the request; it copes with the loss of another.
                hdfs.kill_datanode((datanodes_connected(hdfs, kind=1)[-1] + 1) % 3)

    hdfs.client().write("/kill/web-written", data=content(), overwrite=True)
    assert Client(hdfs.uri).read("/kill/web-written").read() == MEGABYTE * 24


# Spark on the clusters


def test_a_job_on_standalone_survives_a_killed_executor(
    standalone: Standalone, hdfs: Hdfs, job: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with ThreadPoolExecutor(1) as background:
        done = background.submit(spark_submit, job, hdfs.uri, "/job/input", 3, gate, master=standalone.master_url)
        try:
            waiting = [Path(f"{gate}.{partition}") for partition in range(2)]
            wait_for(lambda: done.done() or all(marker.exists() for marker in waiting))
            standalone.kill_executor(0)
        finally:
            gate.touch()
        result = done.result()
    assert RESULT in result.stdout, result.stderr
    assert result.returncode == 3
    assert "Lost executor" in result.stderr


@pytest.mark.parametrize(("deploy_mode", "exit_code"), [("client", 3), ("cluster", 0)])
def test_a_job_on_yarn_reads_hdfs_in_its_tasks(
    yarn: Yarn, hdfs: Hdfs, job: Path, deploy_mode: str, exit_code: int
) -> None:
    env = {"HADOOP_CONF_DIR": str(yarn.conf_dir)}
    conf = {"spark.executor.instances": "1"}
    arguments = [hdfs.uri, "/job/input", exit_code, ""]
    result = spark_submit(job, *arguments, master="yarn", deploy_mode=deploy_mode, env=env, conf=conf)
    output = result.stdout if deploy_mode == "client" else yarn.container_logs()
    assert RESULT in output, result.stderr + output
    assert result.returncode == exit_code


# Nothing is left behind


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def test_nothing_is_left_of_a_cluster_that_ended() -> None:
    with Hdfs(datanodes=1) as cluster:
        pids = cluster.pids()
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
        assert not clusters.port_is_free(cluster.rpc_port)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not cluster.folder.exists()
    assert clusters.port_is_free(cluster.rpc_port)


def test_nothing_is_left_of_a_cluster_whose_test_process_was_killed() -> None:
    program = """
import time
from tests.clusters import Standalone
with Standalone(workers=1) as cluster:
    print(cluster.folder, *cluster.pids(), flush=True)
    time.sleep(300)
"""
    test = subprocess.Popen([sys.executable, "-c", program], cwd=clusters.ROOT, stdout=subprocess.PIPE, text=True)
    assert test.stdout is not None
    with test.stdout:
        folder, *pids = test.stdout.readline().split()
    servers = [psutil.Process(int(pid)) for pid in pids]
    assert len(servers) == 2
    assert all(is_alive(server) for server in servers)
    test.send_signal(signal.SIGKILL)
    test.wait()
    wait_for(lambda: not any(is_alive(server) for server in servers) and not Path(folder).exists(), 30)


def is_alive(process: psutil.Process) -> bool:
    """Whether the process runs: where nobody reaps orphans, a killed one stays in the table as a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


# The command line


def test_hdfs_up_and_down_keep_the_files_and_can_be_repeated(tmp_path: Path) -> None:
    clusters.hadoop_classpath()
    (tmp_path / "hadoop").symlink_to(clusters.cache_folder() / "hadoop")
    rpc_port, http_port = clusters.free_ports(2)
    up = ("hdfs", "up", "--port", rpc_port, "--http-port", http_port)
    uri = f"hdfs://127.0.0.1:{rpc_port}"
    try:
        first = run_cli(*up, cache=tmp_path)
        assert first.returncode == 0, first.stderr
        assert f"{uri}\n" in first.stdout
        assert f"export HADOOP_CONF_DIR={tmp_path}/hdfs/conf" in first.stdout
        put(Client(uri), "/kept", b"kept")
        again = run_cli(*up, cache=tmp_path)
        assert (again.returncode, again.stdout.splitlines()[0]) == (0, "HDFS is already up")
        assert "3 live DataNodes" in run_cli("hdfs", "status", cache=tmp_path).stdout
        assert run_cli("hdfs", "down", cache=tmp_path).returncode == 0
        assert clusters.port_is_free(rpc_port)
        assert run_cli("hdfs", "status", cache=tmp_path).returncode == 1
        assert run_cli("hdfs", "down", cache=tmp_path).returncode == 0
        assert run_cli(*up, cache=tmp_path).returncode == 0
        assert Client(uri).read("/kept").read() == b"kept"
    finally:
        running = clusters.read_running(tmp_path / "hdfs")
        deleted = run_cli("hdfs", "down", "--delete", cache=tmp_path)
    assert deleted.returncode == 0
    assert not (tmp_path / "hdfs").exists()
    assert running is not None
    assert running.alive() == {}


def test_a_busy_port_is_one_line_that_names_the_port_and_its_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        result = run_cli("hdfs", "up", "--port", port, cache=tmp_path)
    assert result.returncode == 2
    assert re.fullmatch(rf"error: port {port} is in use by .*pid {os.getpid()}: .*\n", result.stderr)
    assert result.stdout == ""
    assert not (tmp_path / "hdfs" / "state.json").exists()


# Programs


def test_java_home_comes_before_path_and_path_before_the_environments_own(tmp_path: Path) -> None:
    def java(folder: str) -> Path:
        program = tmp_path / folder / "bin" / "java"
        program.parent.mkdir(parents=True)
        program.touch(mode=0o755)
        return program

    home, on_path, own = java("home"), java("path"), java(".venv/java")
    environ = {"JAVA_HOME": str(tmp_path / "home"), "PATH": str(on_path.parent)}
    assert clusters.find_java(environ, tmp_path) == home
    del environ["JAVA_HOME"]
    assert clusters.find_java(environ, tmp_path) == on_path
    assert clusters.find_java({"PATH": ""}, tmp_path) == own
    own.unlink()
    with pytest.raises(UsageError, match="no java in JAVA_HOME"):
        clusters.find_java({"PATH": ""}, tmp_path)


def test_a_download_without_a_network_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = "-Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=9"
    monkeypatch.setenv("JDK_JAVA_OPTIONS", nowhere)
    monkeypatch.setenv("MAVEN_OPTS", f"{nowhere} -Dmaven.repo.local={tmp_path}/repository")
    with pytest.raises(JobError, match=r"could not download hadoop-client-minicluster-3\.5\.0\.jar \(.*") as error:
        clusters.fetch_jar(*clusters.MINICLUSTER, "3.5.0", "56 MB", tmp_path / "jars")
    assert "\n" not in str(error.value)
    assert list((tmp_path / "jars").iterdir()) == []
