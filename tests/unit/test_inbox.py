"""What a stream does not read of its source folder is reported: left-out entries, and files that change later."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql import DataFrame

from pipeline.core.errors import DataError, UsageError
from pipeline.stream import inbox as inbox_module
from pipeline.stream.files import arrivals
from pipeline.stream.generation import IncomingBatch
from pipeline.stream.inbox import FOLDER, Inbox
from pipeline.stream.lateness import CLOCK_TOLERANCE_S
from tests.support.places import STORE, files_below
from tests.unit.test_quarantine import aside

HOUR_MS = 3_600_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def open_inbox(tmp_path: Path) -> Inbox:
    return Inbox(STORE, str(tmp_path / "in"), str(tmp_path / "set"))


def frame_of(*paths: Path) -> DataFrame:
    """What Spark's source gives of some files."""
    infos = [STORE.info(str(path)) for path in paths]
    rows = [
        SimpleNamespace(path=f"file://{each.path}", length=each.bytes, modified_ms=each.modified_ms) for each in infos
    ]
    return cast(DataFrame, SimpleNamespace(collect=lambda: rows))


def arrive(
    inbox: Inbox, batch: int, *paths: Path, late_after_s: float | None = None, newest_ms: int = 0
) -> IncomingBatch:
    made: IncomingBatch = arrivals(inbox, f"{inbox.output}/_checkpoint", late_after_s)(
        batch, frame_of(*paths), "", newest_ms
    )
    return made


def write(path: Path, data: bytes, time_s: float = 1000) -> Path:
    path.write_bytes(data)
    os.utime(path, (time_s, time_s))
    return path


def test_planned_files_of_another_source_are_refused(tmp_path: Path, source: Path) -> None:
    """An earlier start with another source may have left its first batch in the checkpoint."""
    (tmp_path / "other").mkdir()
    files = [write(source / "a.bin", b"12345678"), write(tmp_path / "other" / "b.bin", b"12345678")]
    before = files_below(tmp_path)
    with pytest.raises(UsageError, match=r"has planned files of another source, such as .*/other/b\.bin; give that"):
        arrive(open_inbox(tmp_path), 0, *files)
    assert files_below(tmp_path) == before


def test_a_change_after_a_file_was_taken_is_told_once(tmp_path: Path, source: Path) -> None:
    files = [write(source / f"{name}.bin", b"12345678") for name in "abcd"]
    inbox = open_inbox(tmp_path)
    assert arrive(inbox, 0, *files).warnings == []
    files[0].write_bytes(b"12345678more")
    write(source / "draft", b"87654321").replace(files[1])  # of the same size and time
    files[2].unlink()
    later = write(source / "e.bin", b"12345678")
    for again in (inbox, open_inbox(tmp_path)):  # and as the batch is done again after a kill
        warnings = arrive(again, 1, later).warnings
        assert len(warnings) == 1
        assert (
            f"{files[0]} was replaced or appended to after a batch took it (8 bytes of 1970-01-01 00:16:40Z; now 12 "
            in (warnings[0])
        )
        assert warnings[0].endswith("; 1 more files changed likewise")
        lines = aside(tmp_path / "set")
        assert [(line["source"], line["records"]) for line in lines] == [(str(files[0]), 0), (str(files[1]), 0)]
        assert "may have been replaced (another change mark) after a batch took it" in lines[1]["reason"]
    for again in (inbox, open_inbox(tmp_path)):
        assert arrive(again, 2).warnings == []
    write(files[2], b"back")
    (warning,) = arrive(open_inbox(tmp_path), 3).warnings
    assert f"{files[2]} was replaced or appended to" in warning


def test_a_start_tells_of_changes_though_no_batch_comes(tmp_path: Path, source: Path) -> None:
    file = write(source / "a.bin", b"12345678")
    arrive(open_inbox(tmp_path), 0, file)
    assert open_inbox(tmp_path).check_at_start(first=False) == []
    file.write_bytes(b"123456789")
    (warning,) = open_inbox(tmp_path).check_at_start(first=False)
    assert "it is not read again; add new rows under a new name" in warning


@pytest.mark.parametrize("text", ["{", "[]\n", '{"path": "/a"}\n'])
def test_damaged_notes_are_one_line(text: str, tmp_path: Path, source: Path) -> None:
    arrive(open_inbox(tmp_path), 0, write(source / "a.bin", b"12345678"))
    (tmp_path / "set" / FOLDER / "batch-00000000.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"_taken/batch-00000000\.jsonl is damaged; restore it"):
        open_inbox(tmp_path).check_at_start(first=False)


def test_notes_of_many_batches_are_few_files(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "COMPACT_BATCHES", 4)
    inbox = open_inbox(tmp_path)
    files = [write(source / f"{number}.bin", b"1") for number in range(10)]
    for batch, file in enumerate(files):
        arrive(inbox, batch, file)
    assert files_below(tmp_path / "set" / FOLDER) == {f"batch-{batch:08d}.jsonl" for batch in (7, 8, 9)}
    for file in files:
        file.write_bytes(b"22")
    (warning,) = arrive(open_inbox(tmp_path), 10).warnings
    assert warning.endswith("; 9 more files changed likewise")


def test_what_is_left_out_is_told_once_and_drafts_are_not(tmp_path: Path, source: Path) -> None:
    inbox = open_inbox(tmp_path)
    file = write(source / "a.bin", b"1")
    for name in ("_SUCCESS", ".a.bin.crc", "_hidden.bin"):
        (source / name).touch()
    (source / "label=3").mkdir()
    (source / "_spark_metadata").mkdir()
    (warning,) = inbox.check_at_start(first=True)
    assert warning.startswith(f"not read: {source}/_hidden.bin; a stream takes the files of its source folder")
    draft = source / ".b.bin"
    draft.touch()
    assert arrive(inbox, 0, file).warnings == []
    draft.rename(source / "b.bin")
    (source / "later").mkdir()
    (source / "_COPY").touch()
    assert arrive(inbox, 1, source / "b.bin").warnings == []
    (warning,) = arrive(inbox, 2).warnings
    assert warning.startswith(f"not read: {source}/_COPY, {source}/later/; ")
    assert arrive(inbox, 3).warnings == []


def test_folders_that_a_new_stream_would_leave_out_are_refused(tmp_path: Path, source: Path) -> None:
    (source / "cats").mkdir()
    with pytest.raises(DataError, match=f"{source}/cats is a folder inside the source"):
        open_inbox(tmp_path).check_at_start(first=True)
    (warning,) = open_inbox(tmp_path).check_at_start(first=False)
    assert f"{source}/cats/" in warning


def test_the_files_of_a_table_are_refused(tmp_path: Path, source: Path) -> None:
    (source / "_delta_log").mkdir()
    with pytest.raises(DataError, match="is a Delta table"):
        open_inbox(tmp_path).check_at_start(first=False)
    with pytest.raises(DataError, match="is a Delta table"):
        arrive(open_inbox(tmp_path), 0)


def test_a_file_from_the_future_makes_no_other_file_late(tmp_path: Path, source: Path) -> None:
    inbox = open_inbox(tmp_path)
    now = time.time()
    future = write(source / "future.bin", b"1", now + 10 * CLOCK_TOLERANCE_S)
    first = arrive(inbox, 0, write(source / "a.bin", b"1", now - 100), future, late_after_s=60)
    assert [Path(file.path).name for file in first.files] == ["a.bin", "future.bin"]
    assert first.newest_ms == STORE.info(str(source / "a.bin")).modified_ms
    (warning,) = first.warnings
    assert f"1 files, such as {future}, have times more than 60 s ahead of this machine's clock" in warning
    files = [write(source / "b.bin", b"1", now - 90), write(source / "c.bin", b"1", now - 200)]
    second = arrive(inbox, 1, *files, late_after_s=60, newest_ms=first.newest_ms)
    assert [Path(file.path).name for file in second.files] == ["b.bin"]
    (line,) = aside(tmp_path / "set")
    assert "more than 60 s older than the newest" in line["reason"]


def test_notes_hold_size_time_and_mark_of_change(tmp_path: Path, source: Path) -> None:
    """Of a file as it was listed, which a later reader compares."""
    file = write(source / "a b.bin", b"123")
    arrive(open_inbox(tmp_path), 0, file)
    info = STORE.info(str(file))
    (line,) = (tmp_path / "set" / FOLDER / "batch-00000000.jsonl").read_text().splitlines()
    expected: dict[str, Any] = {"path": str(file), "bytes": 3, "modified_ms": 1_000_000, "change": info.change}
    assert json.loads(line) == expected
