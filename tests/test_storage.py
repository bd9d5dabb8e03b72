"""File systems behind the store: clients that may wait for ever, disks without room, and which places URIs name."""

from __future__ import annotations

import errno
import io
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import UsageError
from pipeline.storage import hdfs as storage
from pipeline.storage.hdfs import HdfsFiles, HdfsWriter
from pipeline.storage.local import DurableWriter
from pipeline.storage.retries import is_transient, within
from pipeline.storage.store import Store


def test_work_that_ends_in_time_gives_its_result_or_its_error() -> None:
    assert within(10, lambda: 42) == 42
    assert within(10, lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        within(10, lambda: 1 // 0)


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


def test_a_write_that_never_ends_becomes_an_error_that_is_worth_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "STALL_S", 0.1)
    inner, files = Stuck(), HdfsFiles.__new__(HdfsFiles)  # without a client, which would ask for a NameNode
    files.root = "hdfs://host"
    writer = HdfsWriter(files, "hdfs://host/file", inner)
    began = time.monotonic()
    for action in (lambda: writer.write(b"data"), writer.close):
        with pytest.raises(OSError, match=r"hdfs://host/file: no answer in 0\.1 s") as caught:
            action()
        assert is_transient(caught.value)
    assert time.monotonic() - began < 10
    inner.__del__()  # once more, in the middle of somebody else's garbage collection, and with no limit
    assert inner.closes == 1
    inner.wait.set()


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
    ],
)
def test_paths_are_kept_to_the_letter(uri: str, expected: str) -> None:
    assert Store((("fs.defaultFS", "hdfs://n:9"),)).resolve(uri) == expected


@pytest.mark.parametrize(
    "uri", ["", "dbfs:/x", "s3:/b/x", "s3:b/x", "s3:///x", "file://host/x", "hdfs://h:abc/x", "hdfs:///x"]
)
def test_uris_that_name_no_place_are_refused(uri: str) -> None:
    with pytest.raises(UsageError):
        Store().resolve(uri)


class LostReader:
    """hdfs-native's file, when every DataNode that has a block is gone."""

    def read(self, size: int = -1) -> bytes:
        node = 'DatanodeInfoProto { id: DatanodeIdProto { ip_addr: "127.0.0.1" }, capacity: Some(270553174016) }'
        raise RuntimeError(f'DataTransferError("All DataNodes failed: [{", ".join([node] * 9)}]")')


def test_a_read_that_fails_is_an_error_of_the_file_system_in_one_short_line() -> None:
    files = HdfsFiles.__new__(HdfsFiles)
    files.root = "hdfs://host"
    reader = storage.HdfsReader(files, "hdfs://host/file", LostReader())
    with pytest.raises(OSError, match=r"hdfs://host/file: DataTransferError.*All DataNodes failed") as caught:
        reader.read()
    assert len(str(caught.value)) < 200
    assert is_transient(caught.value)


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
