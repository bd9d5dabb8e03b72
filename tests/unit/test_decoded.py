"""Rows that are dear to decode are decoded once, whoever asks and however often, or as ever where they cannot be kept."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipeline.core.errors import DataError
from pipeline.core.storage.store import Store
from pipeline.input.dataset import Dataset, discover, serial
from pipeline.input.decoded import LOCAL_DIRS
from pipeline.input.formats import FORMATS
from pipeline.input.formats.tables import table_format
from tests.conftest import make_rows, write_pickles

ROWS = 700


def write_png(folder: Path, labels: np.ndarray[Any, Any], images: np.ndarray[Any, Any]) -> Path:
    folder.mkdir()
    encoded = []
    for image in images:
        Image.fromarray(image.reshape(3, 32, 32).transpose(1, 2, 0)).save(data := io.BytesIO(), "PNG")
        encoded.append(data.getvalue())
    table = pa.table({"image": pa.array(encoded, pa.binary()), "label": pa.array(labels, pa.int32())})
    pq.write_table(table, folder / "a.parquet", row_group_size=150)
    return folder


class Counted(NamedTuple):
    dataset: Dataset
    decoded: list[tuple[int, int]]  # ranges of records, as a format was asked to decode them


def write_one_group(folder: Path, labels: np.ndarray[Any, Any], images: np.ndarray[Any, Any]) -> Path:
    folder.mkdir()
    table = pa.table({"image": pa.array(map(bytes, images), pa.binary()), "label": pa.array(labels, pa.int32())})
    pq.write_table(table, folder / "a.parquet", row_group_size=len(labels))
    return folder


KINDS = {"pickles": write_pickles, "PNG": write_png, "one row group": write_one_group}


@pytest.fixture(params=list(KINDS))
def counted(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """A data set in two files, or of 256 rows that are decoded together, or of one large row group; and what was decoded."""
    labels, images = make_rows(ROWS, seed=2)
    monkeypatch.setattr(table_format, "DECODED_BYTES", 256 * 3072)
    monkeypatch.setattr(table_format, "LARGE_GROUP_BYTES", ROWS * 3072 - 1)
    folder = KINDS[request.param](tmp_path / "in", labels, images)
    dataset = discover(Store(), str(folder), run=serial)
    decoded: list[tuple[int, int]] = []
    kind = type(FORMATS[dataset.format])
    read = kind.read

    def count(self: Any, store: Any, file: Any, start: int, stop: int, *others: Any) -> Iterator[Any]:
        decoded.append((start, stop))
        return read(self, store, file, start, stop, *others)

    monkeypatch.setattr(kind, "read", count)
    return Counted(dataset, decoded)


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What Spark gives its executors' Python."""
    folders = [tmp_path / "local-1", tmp_path / "local-2"]
    monkeypatch.setenv(LOCAL_DIRS, ",".join(map(str, folders)))
    return tmp_path


def columns(dataset: Dataset, start: int, stop: int) -> tuple[np.ndarray[Any, Any], ...]:
    blocks = list(dataset.read(start, stop))
    assert [int(block.ids[0]) for block in blocks] == sorted({int(block.ids[0]) for block in blocks})
    return tuple(np.concatenate([getattr(b, name) for b in blocks]) for name in ("ids", "labels", "images"))


def kept(local: Path) -> list[Path]:
    return [path for path in local.glob("local-*/decoded/*") if path.suffix != ".lock"]


def assert_equal(one: tuple[Any, ...], two: tuple[Any, ...]) -> None:
    for mine, theirs in zip(one, two, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_every_range_is_what_it_was_and_no_row_is_decoded_twice(
    counted: Counted, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, decoded = counted
    asked = [(0, ROWS), (0, 1), (ROWS - 1, ROWS), (100, 450), (255, 257), (349, 351)]
    with monkeypatch.context() as patch:
        patch.delenv(LOCAL_DIRS)
        expected = [columns(dataset, *span) for span in asked]
    decoded.clear()
    for span, rows in zip(asked, expected, strict=True):
        assert_equal(columns(dataset, *span), rows)
    assert sum(stop - start for start, stop in decoded) == ROWS
    assert len(kept(local)) == len(decoded)


def test_tasks_that_ask_at_once_decode_once(counted: Counted, local: Path) -> None:
    with ThreadPoolExecutor(8) as tasks:
        for found in list(tasks.map(lambda task: columns(counted.dataset, task, ROWS), range(16))):
            np.testing.assert_array_equal(found[0][-5:], np.arange(ROWS - 5, ROWS))
    assert sum(stop - start for start, stop in counted.decoded) == ROWS


@pytest.mark.slow
def test_a_fifth_of_the_disk_stays_free_however_many_parts_there_are(
    tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels, images = make_rows(ROWS, seed=2)
    dataset = discover(Store(), str(write_png(tmp_path / "in", labels, images)), run=serial)
    file = replace(dataset.files[0], decode_rows=20)
    dataset = replace(dataset, files=(file,))
    total, part = 100 * 20 * 3072, 20 * 3072
    full = [80]  # of a hundred parts, before

    def usage(_: object) -> object:
        used = (full[0] + len(kept(local))) * part
        return SimpleNamespace(used=used, free=total - used)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert len(columns(dataset, 0, ROWS)[0]) == ROWS
    assert kept(local) == []
    full[0] = 70
    assert len(columns(dataset, 0, ROWS)[0]) == ROWS
    assert 8 <= len(kept(local)) <= 10


@pytest.mark.parametrize("trouble", ["full", "broken", "secret"])
def test_without_room_each_pass_decodes(
    counted: Counted, local: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Rows in the clear are kept on no disk where Spark is told to encrypt what it keeps there."""
    if trouble == "secret":
        monkeypatch.setattr(Store, "encrypts_spill", True)
    elif trouble == "full":
        usage = shutil.disk_usage(local)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    else:
        monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space left on device")))
    first = columns(counted.dataset, 0, ROWS)
    assert_equal(columns(counted.dataset, 0, ROWS), first)
    assert sum(stop - start for start, stop in counted.decoded) >= 2 * ROWS
    assert kept(local) == []


def test_a_file_that_changed_is_decoded_again(counted: Counted, local: Path, tmp_path: Path) -> None:
    columns(counted.dataset, 0, ROWS)
    for file in counted.dataset.files:
        path = Path(file.path.removeprefix("file:"))
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**9))
    columns(discover(Store(), counted.dataset.uri, run=serial), 0, ROWS)
    assert sum(stop - start for start, stop in counted.decoded) == 2 * ROWS


def test_broken_rows_are_told_and_not_kept(tmp_path: Path, local: Path) -> None:
    labels, images = make_rows(40, seed=2)
    folder = write_png(tmp_path / "in", labels, images)
    table = pq.read_table(folder / "a.parquet").to_pydict()
    table["image"][29] = table["image"][29][:200]
    pq.write_table(pa.table(table), folder / "a.parquet")
    dataset = discover(Store(), str(folder), run=serial)
    for _ in range(2):
        with pytest.raises(DataError, match="row 29: the image cannot be decoded"):
            columns(dataset, 0, 40)
    assert kept(local) == []
