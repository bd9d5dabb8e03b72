"""The clusters that other tests stand on: what their clients may rely on, with DataNodes and executors killed."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from hdfs.util import HdfsError
from hdfs_native import Client, WriteOptions

from pipeline.storage.retries import patiently
from pipeline.storage.store import Store
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


def datanodes_connected(hdfs: Hdfs, kind: int) -> list[int]:
    """The DataNodes this process has a connection to; kind 0: data transfer, 1: WebHDFS."""
    index = {ports[kind]: i for i, ports in enumerate(hdfs._datanode_ports)}
    connections = psutil.Process().net_connections()
    established = [c for c in connections if c.raddr and c.status == psutil.CONN_ESTABLISHED]
    return [index[c.raddr.port] for c in established if c.raddr.port in index]


def put(client: Client, path: str, content: bytes) -> None:
    with client.create(path, WriteOptions(overwrite=True)) as file:
        file.write(content)


def tried(action: Callable[[], None]) -> bool:
    """Whether it went well; hdfs-native's close has a RuntimeError of its own."""
    try:
        action()
    except (OSError, RuntimeError):
        return False
    return True


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


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


def test_the_pipeline_writes_a_file_though_a_datanode_died_just_now(three_datanodes: Hdfs) -> None:
    """The NameNode still sends writers to it; the client's report of that must not hide that trying again may help."""
    store, uri = Store(), f"{three_datanodes.uri}/just-now/file"
    three_datanodes.kill_datanode(1)
    store.write_new(uri, MEGABYTE)
    assert store.read(uri) == MEGABYTE


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
    wait_for(lambda: tried(lambda: put(client, "/kill/native", MEGABYTE)))
    hdfs.client().write("/kill/web", data=MEGABYTE)
    assert client.read("/kill/web").read() == MEGABYTE
    with hdfs.client().read("/kill/native") as file:
        assert file.read() == MEGABYTE
    hdfs.restart_datanode(victim)
    hdfs.wait_live(3)


def test_a_datanode_killed_under_hdfs_natives_writer_is_survived(three_datanodes: Hdfs) -> None:
    """The writer goes on with the other nodes, or its caller begins again, as all of this project's writing does."""
    hdfs, store, victims = three_datanodes, Store(), list[int]()

    @patiently
    def write() -> str:
        uri = f"{hdfs.uri}/kill/written-{time.monotonic_ns()}"
        with store.create(uri) as file:
            for written in range(24):
                file.write(MEGABYTE)
                if written == 8 and not victims:
                    victims.append(datanodes_connected(hdfs, kind=0)[-1])
                    hdfs.kill_datanode(victims[0])
        return uri

    assert store.read(write()) == MEGABYTE * 24


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


def test_a_job_on_yarn_reads_hdfs_in_its_tasks_and_ends_with_its_own_exit_code(
    yarn: Yarn, hdfs: Hdfs, job: Path
) -> None:
    env, conf = {"HADOOP_CONF_DIR": str(yarn.conf_dir)}, {"spark.executor.instances": "1"}
    result = spark_submit(job, hdfs.uri, "/job/input", 3, "", master="yarn", env=env, conf=conf)
    assert RESULT in result.stdout, result.stderr
    assert result.returncode == 3
