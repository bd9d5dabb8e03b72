"""HDFS: what its clients may rely on while DataNodes die, and the pipeline and its commit on it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hdfs.util import HdfsError
from hdfs_native import Client, WriteOptions
from pyspark.sql import SparkSession

from pipeline.core.errors import DataError
from pipeline.core.storage.retries import with_retries
from pipeline.core.storage.store import Store
from pipeline.input.files import input_files
from tests.clusters import Hdfs
from tests.clusters.cluster_runs import (
    FIT,
    LAYOUT,
    QUIET,
    STORE,
    Source,
    run_here,
)
from tests.support.application import run_application
from tests.support.trainer_runs import until

pytestmark = pytest.mark.full

MEGABYTE = os.urandom(1 << 20)
RECORD_BYTES = 193


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


def test_nothing_is_written_in_a_folder_that_is_not_there(hdfs: Hdfs) -> None:
    with pytest.raises(FileNotFoundError):
        Store().write_new(f"{hdfs.uri}/gone/attempt/beat", b"here")
    assert not Store().exists(f"{hdfs.uri}/gone")


def test_patterns_and_partition_folders_are_found(hdfs: Hdfs) -> None:
    store, root = Store(), f"{hdfs.uri}/patterns"
    for path in ("day=01/label=3/a.parquet", "day=02/b.parquet", "day=11/c.parquet", "_staging/d.parquet"):
        store.makedirs(f"{root}/{path}".rpartition("/")[0])
        store.write_new(f"{root}/{path}", b"rows")
    found = [file.path.removeprefix(root) for file in input_files(store, f"{root}/day=0*", False)]
    assert found == ["/day=01/label=3/a.parquet", "/day=02/b.parquet"]
    everything = input_files(store, f"{hdfs.uri}/*terns", False)
    assert len(everything) == 3
    with pytest.raises(DataError, match=r"day=9\* matches no file or folder"):
        input_files(store, f"{root}/day=9*", False)


def test_the_pipeline_writes_a_file_though_a_datanode_died_just_now(three_datanodes: Hdfs) -> None:
    """The NameNode still sends writers to it; the client's report of that must not hide that trying again may help."""
    store, uri = Store(), f"{three_datanodes.uri}/just-now/file"
    store.makedirs(uri.rpartition("/")[0])
    three_datanodes.kill_datanode(1)
    store.write_new(uri, MEGABYTE)
    assert store.read(uri) == MEGABYTE


@pytest.mark.parametrize(
    ("umask", "file", "folder"), [(None, 0o644, 0o755), ("027", 0o640, 0o750), ("077", 0o600, 0o700)]
)
def test_the_umask_that_hadoop_was_told_is_applied(umask: str | None, file: int, folder: int, hdfs: Hdfs) -> None:
    """The NameNode takes the permissions that a client sends."""
    store = Store((("fs.permissions.umask-mode", umask),) if umask else ())
    root = f"{hdfs.uri}/umask-{umask}"
    store.put_new(f"{root}/a/file", b"data")
    store.makedir(f"{root}/b")
    client = Client(hdfs.uri)
    found = {path: client.get_file_info(f"/umask-{umask}/{path}").permission & 0o777 for path in ("a", "b", "a/file")}
    assert found == {"a": folder, "b": folder, "a/file": file}


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
    until(
        lambda: hdfs.replicas("/kill/read") == 3, "three replicas are known"
    )  # a reader knows those of its beginning to its end
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
    until(lambda: tried(lambda: put(client, "/kill/native", MEGABYTE)), "a write goes well")
    hdfs.client().write("/kill/web", data=MEGABYTE)
    assert client.read("/kill/web").read() == MEGABYTE
    with hdfs.client().read("/kill/native") as file:
        assert file.read() == MEGABYTE
    hdfs.restart_datanode(victim)
    hdfs.wait_live(3)


def test_a_datanode_killed_under_hdfs_natives_writer_is_survived(three_datanodes: Hdfs) -> None:
    """The writer goes on with the other nodes, or its caller begins again, as all of this project's writing does."""
    hdfs, store, victims = three_datanodes, Store(), list[int]()

    @with_retries
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


# The pipeline


def test_shards_read_through_webhdfs_are_the_rows_of_the_input(
    hdfs: Hdfs, small_input: str, small_set: Source, spark: SparkSession
) -> None:
    output = f"{hdfs.uri}/web/out"
    run_here(spark, small_input, output, 3)
    client = hdfs.client()
    with client.read("/web/out/manifest.json", encoding="utf-8") as file:
        manifest = json.load(file)
    records: dict[int, tuple[int, bytes]] = {}
    for worker in manifest["workers"]:
        for listed in worker["files"]:
            with client.read(f"/web/out/{listed['path']}") as file:
                data = file.read()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (listed["bytes"], listed["sha256"])
            for row in pq.read_table(pa.BufferReader(data)).to_pylist():
                if row["copy"] == 0:
                    assert row["id"] not in records
                    records[row["id"]] = (row["label"], row["image"])
    raw = b"".join(path.read_bytes() for path in sorted(small_set.folder.iterdir()))
    expected = [raw[at : at + RECORD_BYTES] for at in range(0, len(raw), RECORD_BYTES)]
    assert [bytes([label]) + image for _, (label, image) in sorted(records.items())] == expected


def test_what_hdfs_refuses_is_one_line_and_leaves_nothing_behind(
    hdfs: Hdfs, small_input: str, small_set: Source, tmp_path: Path
) -> None:
    boss = hdfs.client()
    batch = (small_set.folder / "data_batch_1.bin").read_bytes()
    for name in ("locked", "sealed", "cut", "secret"):
        boss.write(f"/wrong/{name}/data_batch_1.bin", data=batch)
    boss.write("/wrong/cut/data_batch_2.bin", data=batch[: 3 * RECORD_BYTES + 5])
    boss.write("/wrong/secret/data_batch_2.bin", data=batch)
    boss.makedirs("/wrong/out", permission="777")
    boss.set_permission("/wrong/locked", "700")
    boss.set_permission("/wrong/sealed", "711")
    boss.set_permission("/wrong/secret/data_batch_2.bin", "600")
    before = STORE.walk(f"{hdfs.uri}/wrong")

    def job(source: str, output: str) -> tuple[object, ...]:
        return ("distribution_aware.py", "--input", source, "--output", output, "--workers", 3, *LAYOUT, *FIT)

    wrong, out = f"{hdfs.uri}/wrong", f"{hdfs.uri}/wrong/out/set"
    cases = [
        (job(f"{wrong}/nowhere", out), 3, f"{wrong}/nowhere does not exist"),
        (job(f"{wrong}/locked/data_batch_1.bin", out), 3, f"{wrong}/locked/data_batch_1.bin cannot be read"),
        (job(f"{wrong}/sealed", out), 3, f"{wrong}/sealed cannot be listed"),
        (job(f"{wrong}/secret", out), 3, f"{wrong}/secret/data_batch_2.bin cannot be read"),
        (job(f"{wrong}/cut", out), 3, f"{wrong}/cut/data_batch_2.bin"),
        (job(small_input, f"{wrong}/set"), 2, f"--output {wrong}/set may not be written"),
        (job(small_input, f"{wrong}/locked/set"), 2, f"--output {wrong}/locked/set may not be written"),
    ]
    # permissions are the NameNode's, so the job must not run as its superuser
    env = {**QUIET, "HADOOP_USER_NAME": "nobody"}
    done, rest = run_application(tmp_path, [command for command, _, _ in cases], env=env)
    for ended, (command, code, fact) in zip(done, cases, strict=True):
        *progress, last = ended.err.splitlines()
        assert (ended.code, last.startswith(f"error: {fact}")) == (code, True), (command, ended)
        assert all(re.match(r"[\d-]+T[\d:]+Z \[", line) for line in progress), ended.err
        assert ended.out == ""
    assert str(3 * RECORD_BYTES) in done[4].err.splitlines()[-1], "the place in the file"
    for sign in ("Traceback", "\tat ", "Exception"):
        assert sign not in rest
    assert STORE.walk(wrong) == before
    assert not STORE.exists(out)
    assert not STORE.exists(f"{wrong}/set")
