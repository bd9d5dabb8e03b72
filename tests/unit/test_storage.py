"""File systems behind the store: clients that may wait for ever, disks without room, and which places URIs name."""

from __future__ import annotations

import errno
import io
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import MemoryStore

from pipeline.core.atomic import path_in_errors, write_durably
from pipeline.core.errors import UsageError
from pipeline.core.storage import hdfs as storage
from pipeline.core.storage import objects
from pipeline.core.storage.files import FileInfo, SpooledWriter
from pipeline.core.storage.hdfs import LOGIN_ADVICE, PROXY_USER, BufferedFile, HdfsFiles, HdfsWriter, parse_umask
from pipeline.core.storage.local import DurableWriter
from pipeline.core.storage.retries import NoTicketError, call_within, is_transient, unreadable_is_data_error
from pipeline.core.storage.store import REMOTE_CALLS, Store
from pipeline.doctor.places import output_error
from pipeline.spark.store import submitted_for
from tests.support.places import STORE, files_below, folder_on, on_each, put

DENIED = 'Permission denied: user=alice, access=WRITE, inode="/":root:supergroup:drwxr-xr-x'


@pytest.fixture(params=on_each("file", "hdfs", "webhdfs", "s3"))
def place(request: pytest.FixtureRequest) -> str:
    """A folder on a store of every client, which is not there yet."""
    return folder_on(request.param, request)


def test_work_that_ends_in_time_gives_its_result_or_its_error() -> None:
    assert call_within(10, lambda: 42) == 42
    assert call_within(10, lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        call_within(10, lambda: 1 // 0)


PROGRAM = """
import sys, time
from hdfs_native import Client
from pipeline.core.program import execute
from pipeline.core.errors import DataError
from pipeline.core.storage.retries import call_within

class Late:
    def __del__(self, sleep=time.sleep):
        sleep(2)  # Python takes its time to end

sys.late = Late()

def main():
    try:
        call_within(2, lambda: Client(sys.argv[1]).get_file_info("/x"))
    except TimeoutError:
        print("left behind", flush=True)
        raise DataError("it did not answer") from None

execute(main, interrupted="")
"""


@pytest.mark.full
def test_a_late_reply_to_a_client_changes_no_exit_code() -> None:
    """What was left behind takes a lock that is no more, in native code, which would abort the process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"hdfs://127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-c", PROGRAM, address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
            connection, _ = server.accept()
            assert program.stdout is not None
            assert program.stdout.readline() == "left behind\n"
            time.sleep(0.3)
            with suppress(OSError):
                connection.sendall(b"\x00\x00\x00\x05\x04\x08\x00\x10\x00")  # no answer of a NameNode, at last
            connection.close()
            _, said = program.communicate(timeout=60)
    assert (program.returncode, said) == (3, "error: it did not answer\n")


class Stuck(io.RawIOBase):
    """A client's file that takes nothing, as hdfs-native's sometimes does after a DataNode died under it. Like that one it
    never says that it is closed."""

    def __init__(self) -> None:
        self.wait, self.closes = threading.Event(), 0

    def write(self, data: Any) -> int:
        self.wait.wait()
        return len(data)

    def close(self) -> None:
        self.closes += 1
        self.wait.wait()


def test_a_write_that_never_ends_is_a_transient_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that never ends becomes an error that is worth another try."""
    monkeypatch.setattr(storage, "STALL_S", 0.1)
    inner, files = Stuck(), HdfsFiles.__new__(HdfsFiles)  # without a client, which would ask for a NameNode
    files.root = "hdfs://host"
    writer = HdfsWriter(files, "hdfs://host/file", inner)
    for action in (lambda: writer.write(b"data"), writer.close):
        with pytest.raises(OSError, match=r"hdfs://host/file: no answer in 0\.1 s") as caught:
            action()
        assert is_transient(caught.value)
    inner.__del__()  # once more, in the middle of somebody else's garbage collection, and with no limit
    assert inner.closes == 1
    inner.wait.set()


def test_the_error_of_a_small_file_is_that_of_its_write() -> None:
    """A small file is written when it is closed, and the client's close after a failed write only says that it failed."""

    class Refusing(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            raise OSError(errno.EDQUOT, "the quota is exceeded")

        def close(self) -> None:
            if not self.closed:
                super().close()
                raise OSError("close failed")

    raw = Refusing()
    with pytest.raises(OSError, match="the quota is exceeded"), BufferedFile(raw, 100) as file:
        file.write(b"data")
    assert raw.closed


def test_a_local_file_that_cannot_be_flushed_is_closed_all_the_same(tmp_path: Path) -> None:
    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    raw = Full(tmp_path / "f", "xb")
    file = DurableWriter(raw)
    file.write(b"data")
    with pytest.raises(OSError, match="No space left"):
        file.close()
    assert raw.closed
    file.close()  # a second time there is nothing to do


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("/a#b?c;d", "/a#b?c;d"),
        ("file:///a#b", "/a#b"),
        ("file:/a/../b/", "/b"),
        ("//tmp//x", "/tmp/x"),
        ("/data/a:b/c", "/data/a:b/c"),
        ("hdfs://h:1/a?b#c;d", "hdfs://h:1/a?b#c;d"),
        ("hdfs:///a", "hdfs://n:9/a"),
        ("s3://b/x//y/", "s3://b/x/y"),
        ("s3a://b-1.c/x#y", "s3://b-1.c/x#y"),
        ("s3n://b", "s3://b/"),
        ("gs://b/x", "gs://b/x"),
        ("abfss://c@a.dfs.core.windows.net/x", "abfss://c@a.dfs.core.windows.net/x"),
    ],
)
def test_paths_are_kept_to_the_letter(uri: str, expected: str) -> None:
    assert Store((("fs.defaultFS", "hdfs://n:9"),)).resolve(uri) == expected


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "dbfs:/x",
        "s3:/b/x",
        "s3:b/x",
        "s3:///x",
        "s3://b:1/x",
        "abfs://c/x",
        "ftp://h/x",
        "file://host/x",
        "~/x",
        "~anna/x",
        "hdfs://h:abc/x",
        "hdfs:///x",
    ],
)
def test_uris_that_name_no_place_are_refused(uri: str) -> None:
    with pytest.raises(UsageError):
        Store().resolve(uri)


@pytest.mark.parametrize("uri", ["out\udce4", "s3://bucket/\udce4"])
def test_a_name_that_is_not_utf_8_is_one_line(uri: str) -> None:
    """The bytes of a command line that the locale cannot decode."""
    with pytest.raises(UsageError, match=r"\\udce4 cannot be read as UTF-8: set LC_ALL=C.UTF-8, or rename it") as error:
        Store().resolve(uri)
    assert str(error.value).isascii()


@pytest.mark.parametrize("default", ["viewfs://cluster/", "s3a://bucket/", "file:///"])
def test_a_path_without_host_needs_hdfs_as_default(default: str) -> None:
    """A path without a host is refused where the default file system is not hdfs."""
    with pytest.raises(UsageError, match="write hdfs://host:port/path"):
        Store((("fs.defaultFS", default),)).resolve("hdfs:///a")


@pytest.mark.parametrize(
    ("text", "umask"),
    [("022", 0o022), ("0027", 0o027), ("u=rwx,g=rx,o=", 0o027), ("a=rx", 0o222), ("o=", 0o027), ("u=rwx,g=,o=", 0o077)],
)
def test_a_umask_is_octal_or_symbolic(text: str, umask: int) -> None:
    assert parse_umask(text) == umask


@pytest.mark.parametrize("text", ["", "8", "18", "u+w", "x=r", "rwx"])
def test_what_is_no_umask_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"fs\.permissions\.umask-mode"):
        parse_umask(text)


class LostReader:
    """hdfs-native's file, when every DataNode that has a block is gone."""

    def read(self, size: int = -1) -> bytes:
        node = 'DatanodeInfoProto { id: DatanodeIdProto { ip_addr: "127.0.0.1" }, capacity: Some(270553174016) }'
        raise RuntimeError(f'DataTransferError("All DataNodes failed: [{", ".join([node] * 9)}]")')


def test_a_failed_read_is_one_line_of_the_file_system() -> None:
    """A read that fails is an error of the file system in one short line."""
    files = HdfsFiles.__new__(HdfsFiles)
    files.root = "hdfs://host"
    files.client = cast(Any, SimpleNamespace(read=lambda path: LostReader()))
    reader = files.open("hdfs://host/file")
    with pytest.raises(OSError, match=r"hdfs://host/file: DataTransferError.*All DataNodes failed") as caught:
        reader.read()
    assert len(str(caught.value)) < 200
    assert is_transient(caught.value)


def test_a_refusal_of_the_namenode_is_one_line_without_its_trace() -> None:
    files = HdfsFiles.__new__(HdfsFiles)
    files.root = "hdfs://host"
    trace = (
        "Failed to CREATE_FILE /set/a\\n\tat org.apache.hadoop.hdfs.server.namenode.FSNamesystem.startFile\n\tat more"
    )
    with pytest.raises(FileExistsError) as caught, files._errors("hdfs://host/set/a"):
        raise FileExistsError(trace)
    assert str(caught.value) == "hdfs://host/set/a: Failed to CREATE_FILE /set/a"


def test_what_is_read_of_hdfs_can_be_sought_as_parquet_does() -> None:
    files = HdfsFiles.__new__(HdfsFiles)
    files.root = "hdfs://host"
    table = pa.table({"a": list(range(100))})
    data = io.BytesIO()
    pq.write_table(table, data)
    reader = storage.HdfsReader(files, "hdfs://host/file", data)
    assert pq.ParquetFile(reader).read().equals(table)
    reader.seek(-4, io.SEEK_END)
    assert reader.read() == b"PAR1"
    assert reader.tell() == len(data.getvalue())


# What every kind of store must offer


def test_a_file_is_written_once_and_read_in_any_range(place: str) -> None:
    """A file is written once and read whole in part and from any place."""
    path, data = f"{place}/folder/file", bytes(range(256)) * 1000
    STORE.makedirs(f"{place}/folder")
    STORE.write_new(path, data)
    with pytest.raises(FileExistsError), STORE.create(path) as file:
        file.write(b"other")
    assert STORE.read(path) == data
    found = STORE.info(path)
    assert (found.path, found.name, found.bytes, found.is_dir) == (path, "file", len(data), False)
    assert found.modified_ms > 1_600_000_000_000, "milliseconds since 1970"
    ranges = [(0, 10), (255, 3), (len(data) - 5, 5), (len(data) - 5, 50), (7, 0)]
    assert [STORE.read_range(path, at, length) for at, length in ranges] == [data[at : at + n] for at, n in ranges]
    with STORE.open(path) as file:
        file.seek(-4, io.SEEK_END)
        assert (file.read(), file.tell()) == (data[-4:], len(data))
        file.seek(200_000)
        assert file.read(100) == data[200_000:200_100]
        file.seek(5)
        assert file.read() == data[5:]


def test_a_read_that_meets_a_replacement_is_of_one_version(place: str) -> None:
    """A manifest is replaced by a longer one between a reader's opening of it and its read."""
    path, old, new = f"{place}/manifest.json", b"old", b"new, and longer than the old one"
    put(path, old)
    with STORE.open(path) as file:
        STORE.replace(path, new)
        assert file.read() in (old, new)
    assert STORE.read(path) == new


def test_every_kind_of_buffer_is_written_as_its_bytes(place: str) -> None:
    """Arrow writes buffers whose elements are signed, so that half of all bytes are negative numbers."""
    data = bytes(range(256))
    table = np.arange(12, dtype=np.int16).reshape(3, 4) - 6
    buffers: list[Any] = [data, bytearray(data), pa.py_buffer(data), memoryview(pa.py_buffer(data)), table, b""]
    # Longer than what a writer collects.
    large = [memoryview(pa.py_buffer(data * 1024))]
    STORE.makedirs(place)
    with STORE.create(f"{place}/file") as file:
        for buffer in buffers + large:
            file.write(buffer)
    assert STORE.read(f"{place}/file") == 4 * data + table.tobytes() + 1024 * data


def test_a_file_of_no_bytes_is_one(place: str) -> None:
    STORE.makedirs(place)
    STORE.write_new(f"{place}/empty", b"")
    assert STORE.info(f"{place}/empty").bytes == 0
    assert STORE.read(f"{place}/empty") == b""


def test_what_is_not_there_is_told_as_such(place: str) -> None:
    STORE.makedirs(place)
    put(f"{place}/file", b"here")
    for action in (STORE.info, STORE.read, STORE.open, lambda path: STORE.rename(path, f"{place}/x", overwrite=True)):
        with pytest.raises(FileNotFoundError):
            action(f"{place}/none")
    assert not STORE.exists(f"{place}/none")
    assert not STORE.exists(f"{place}/file/below")
    assert STORE.list(f"{place}/none") == []
    STORE.delete(f"{place}/none")
    STORE.remove_empty(f"{place}/none")


def test_a_folder_is_listed_and_deleted_with_its_content(place: str) -> None:
    """A folder lists its files and folders and is deleted with them."""
    for name in ("a", "sub/b", "sub/deep/c", "subway"):
        put(f"{place}/{name}", name.encode())
    assert [(entry.name, entry.is_dir, entry.bytes) for entry in STORE.list(place)] == [
        ("a", False, 1),
        ("sub", True, 0),
        ("subway", False, 6),
    ]
    assert STORE.info(f"{place}/sub").is_dir
    assert files_below(place) == {"a", "sub/b", "sub/deep/c", "subway"}
    STORE.remove_empty(f"{place}/sub")
    assert STORE.exists(f"{place}/sub/b")
    STORE.delete(f"{place}/sub")
    assert files_below(place) == {"a", "subway"}
    assert not STORE.exists(f"{place}/sub")


@pytest.mark.parametrize("name", ["day=01", "a b", "a#b", "a%20b", "\u00fc", "a+b", "[x]", "a?b", "a*b", "~"])
def test_names_are_kept_to_the_letter(name: str, place: str) -> None:
    put(f"{place}/{name}/{name}", name.encode())
    assert files_below(place) == {f"{name}/{name}"}
    STORE.rename(f"{place}/{name}/{name}", f"{place}/{name}/2", overwrite=True)
    assert STORE.read(f"{place}/{name}/2").decode() == name


def test_a_rename_overwrites_only_when_told(place: str) -> None:
    put(f"{place}/new", b"new")
    put(f"{place}/old", b"old")
    with pytest.raises(FileExistsError):
        STORE.rename(f"{place}/new", f"{place}/old")
    assert (STORE.read(f"{place}/new"), STORE.read(f"{place}/old")) == (b"new", b"old")
    STORE.rename(f"{place}/new", f"{place}/old", overwrite=True)
    assert files_below(place) == {"old"}
    STORE.rename(f"{place}/old", f"{place}/free")
    assert STORE.read(f"{place}/free") == b"new"
    assert files_below(place) == {"free"}


def test_no_folder_is_made_where_that_which_is_to_hold_it_is_gone(place: str) -> None:
    with pytest.raises(FileNotFoundError):
        STORE.makedir(f"{place}/attempt/task")
    put(f"{place}/attempt/beat", b"here")
    STORE.makedir(f"{place}/attempt/task")
    STORE.makedir(f"{place}/attempt/task")
    STORE.delete(f"{place}/attempt")
    with pytest.raises(FileNotFoundError):
        STORE.makedir(f"{place}/attempt/task")


def test_parquet_is_written_and_read_in_place(place: str) -> None:
    table = pa.table({"a": list(range(300_000)), "b": ["x" * (i % 50) for i in range(300_000)]})
    STORE.makedirs(place)
    with STORE.create(f"{place}/t.parquet") as file:
        pq.write_table(table, file, row_group_size=50_000)
    with STORE.open(f"{place}/t.parquet") as file:
        parquet = pq.ParquetFile(file)
        assert parquet.read_row_group(3).equals(table.slice(150_000, 50_000))
        assert parquet.read().equals(table)


def test_hdfs_is_used_as_the_user_that_the_job_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By both variables: the client looks at one with a ticket, at the other with tokens and without Kerberos."""
    for variable in ("HADOOP_PROXY_USER", "HADOOP_USER_NAME", "SPARK_USER"):
        monkeypatch.setenv(variable, "the submitting user")
    monkeypatch.setattr("hdfs_native.Client", lambda *_: None)
    HdfsFiles("h:1", ((PROXY_USER, "alice"),))
    assert (os.environ["HADOOP_PROXY_USER"], os.environ["HADOOP_USER_NAME"]) == ("alice", "alice")


def test_the_command_line_of_a_jvm_names_the_user() -> None:
    command = "org.apache.spark.deploy.SparkSubmit --master yarn --proxy-user alice job.py --output o"
    assert submitted_for(command) == "alice"
    assert submitted_for(command.replace("--proxy-user alice", "")) is None
    assert submitted_for("org.example.Shell --proxy-user alice") is None


def test_the_proxied_user_travels_with_the_store() -> None:
    assert storage.is_hdfs_setting(PROXY_USER)
    assert Store(((PROXY_USER, "alice"),)).hdfs_conf == ((PROXY_USER, "alice"),)


def test_a_missing_ticket_is_one_line_with_the_next_step() -> None:
    files = HdfsFiles.__new__(HdfsFiles)
    text = (
        'GSSAPIError(GssMajorCodes { raw: "0x00070000", calling_error: "none", routine_error: "GSS_S_NO_CRED" }, 2529639053,'
        ' "No credentials were supplied: No Kerberos credentials available (default cache: FILE:/tmp/cc)")'
    )
    with pytest.raises(NoTicketError) as caught, files._errors("hdfs://h:1/x"):
        raise OSError(text)
    line = f"hdfs://h:1/x: {LOGIN_ADVICE} (No Kerberos credentials available (default cache: FILE:/tmp/cc))"
    assert str(caught.value) == line
    assert not is_transient(caught.value)
    assert str(output_error("hdfs://h:1/x", caught.value)) == f"--output {line}"
    with pytest.raises(UsageError, match="run kinit"), unreadable_is_data_error("hdfs://h:1/x"):
        raise caught.value


@pytest.mark.parametrize(
    "words",
    [
        'RPCError("org.apache.hadoop.security.AccessControlException", "%s")',
        "RPC error: org.apache.hadoop.security.AccessControlException %s",
        "fatal RPC error: org.apache.hadoop.security.AccessControlException: %s",
    ],
)
def test_a_refusal_of_hdfs_is_told_without_its_java_class(words: str) -> None:
    files = HdfsFiles.__new__(HdfsFiles)  # without a client, which would ask for a NameNode
    files.root = "hdfs://h:1"
    text = words % (DENIED + "\\n\\tat org.apache.hadoop.hdfs.server.namenode.FSPermissionChecker.check")
    with pytest.raises(PermissionError) as caught, files._errors("hdfs://h:1/x"):
        raise RuntimeError(text)
    assert str(caught.value) == f"hdfs://h:1/x: {DENIED}"


def test_a_full_disk_is_named_by_what_was_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DurableWriter(io.FileIO("/dev/full", "wb"))
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        file.write(b"x" * 100_000)
    file.write(b"x")
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        file.close()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/state'"):
        write_durably(tmp_path / "state", b"data")
    assert not list(tmp_path.iterdir())
    writer = SpooledWriter(lambda file, size: None)
    writer._spool = type("Spool", (), {"write": full, "close": lambda self: None})()
    with pytest.raises(OSError, match=r"No space left on device: '/"):
        writer.write(b"data")


def test_only_a_full_disk_is_named_after_the_fact() -> None:
    with pytest.raises(OSError, match=r"^\[Errno 104\] reset$"), path_in_errors("/x"):
        raise OSError(errno.ECONNRESET, "reset")
    with pytest.raises(OSError, match=r"'/y'$"), path_in_errors("/x"):
        raise OSError(errno.ENOSPC, "full", "/y")


def test_many_remote_folders_are_listed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing ends only when all calls that may be under way have begun."""
    all_began = threading.Barrier(REMOTE_CALLS, timeout=30)

    def list_folder(self: Store, uri: str) -> list[FileInfo]:
        all_began.wait()
        return [FileInfo(f"{uri}/a", 1, 0, False)]

    monkeypatch.setattr(Store, "list", list_folder)
    folders = [f"hdfs://namenode:9000/worker={worker:03d}" for worker in range(REMOTE_CALLS)]
    listings = STORE.list_all(reversed(folders))
    assert [*listings] == folders[::-1]
    assert all(entry.path == f"{folder}/a" for folder, (entry,) in listings.items())


@pytest.mark.parametrize(("more", "listings"), [(0, 0), (3000, 4 * REMOTE_CALLS)])
def test_many_folders_of_objects_are_one_listing(more: int, listings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """List each folder by itself only where many other objects stand beside them. more: their number."""
    monkeypatch.setattr(objects, "client_of", lambda root, conf: (MemoryStore(), "memory"))
    bucket = f"s3://many-{more}"
    files = STORE.files(bucket)
    assert isinstance(files, objects.ObjectFiles)
    folders = [f"{bucket}/set/worker={worker:03d}" for worker in range(4 * REMOTE_CALLS)]
    below = ["a.parquet", "b", "b/c/d.parquet", "b/f.parquet"]  # "b" stands for the "b/" of a web console
    for folder in folders[1:]:
        for name in below:
            files.put(f"{folder}/{name}", b"" if name == "b" else b"1")
    for other in range(more):
        files.put(f"{bucket}/set/other/{other:05d}", b"")
    files.put(f"{bucket}/set/manifest.json", b"{}")

    expected = {folder: STORE.list(folder) for folder in folders}
    with patch.object(obstore, "list_with_delimiter", wraps=obstore.list_with_delimiter) as listing:
        entries = STORE.list_all(folders)
    for folder in folders:
        assert entries[folder] == [entry for entry in expected[folder] if entry.is_dir or entry.bytes or more]
    assert listing.call_count == listings
    assert {(entry.name, entry.is_dir) for entry in entries[folders[1]]} >= {("a.parquet", False), ("b", True)}
    assert entries[folders[0]] == []


def test_local_folders_are_listed_without_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.core.storage.store.ThreadPoolExecutor", None)
    (tmp_path / "a").mkdir()
    missing = str(tmp_path / "b")
    assert {folder: len(entries) for folder, entries in STORE.list_all([str(tmp_path), missing]).items()} == {
        str(tmp_path): 1,
        missing: 0,
    }
