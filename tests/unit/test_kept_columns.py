"""Columns of the input that travel into the shards, against pyarrow's own reading of the same files."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.shardset.schema import attribute_hash, unreadable_in_spark, value_hashes
from pipeline.core.storage.store import Store
from pipeline.input.dataset import Block, Dataset, discover, serial
from pipeline.input.decoded import LOCAL_DIRS
from pipeline.input.formats import Columns
from pipeline.input.read_options import ReadOptions
from pipeline.output.placement import bundle_keys
from pipeline.runs.request import Request
from pipeline.runs.steps.write import verify_chunks
from tests.conftest import make_rows, write_binary
from tests.support.sharding_runs import kept_table, parquet_with_columns


def discovered(path: Path, *names: str) -> Dataset:
    return discover(Store(), str(path), run=serial, read_options=ReadOptions(shape=(3, 2, 2), columns=names))


def test_kept_columns_are_read_as_pyarrow_reads_them(tmp_path: Path) -> None:
    """Every type that can be kept, with nulls, over the borders of files, row groups and blocks."""
    names = ("site", "age", "weight", "is_male", "born", "seen")
    folder = parquet_with_columns(tmp_path / "p", rows=2500)
    dataset = discovered(folder, *names)
    blocks = list(dataset.read(900, 2300, images=False))
    for name in names:
        values = pa.chunked_array([block.columns.attributes[name] for block in blocks]).to_pylist()
        assert values == kept_table(folder).column(name).to_pylist()[900:2300]
    assert [column.type for column in dataset.layout.attributes] == [
        "string", "int64", "double", "bool", "date32[day]", "timestamp[us]",
    ]  # fmt: skip


def test_decoded_rows_keep_their_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Image files are decoded once into a local file, from which later passes read them with their columns."""
    monkeypatch.setenv(LOCAL_DIRS, str(tmp_path / "local"))
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(buffer, "PNG")
    sites = ["a", None, "b", "a"]
    (tmp_path / "p").mkdir()
    image = pa.array([buffer.getvalue()] * 4, pa.binary())
    pq.write_table(pa.table({"image": image, "label": [0, 1, 0, 1], "site": sites}), tmp_path / "p" / "a.parquet")
    dataset = discovered(tmp_path / "p", "site")
    for _ in range(2):
        values = pa.chunked_array([block.columns.attributes["site"] for block in dataset.read(1, 4)])
        assert values.to_pylist() == sites[1:]
    assert list((tmp_path / "local" / "decoded").iterdir())


def test_the_column_of_labels_can_be_kept(tmp_path: Path) -> None:
    table = pa.table({"image": [bytes(12)] * 3, "class": ["b", "a", "b"]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        (block,) = discovered(tmp_path / name, "class").read(0, 3)
        assert block.labels.tolist() == [1, 0, 1]
        assert block.columns.attributes["class"].to_pylist() == ["b", "a", "b"]


def test_rows_of_a_block_keep_their_columns() -> None:
    columns = Columns(np.arange(4, dtype=np.int32), None, attributes={"site": pa.array(["a", "b", None, "d"])})
    assert columns.take(np.array([2, 0])).attributes["site"].to_pylist() == [None, "a"]
    assert columns.take(np.array([2, 0])).labels.tolist() == [2, 0]


def test_equal_values_alone_have_equal_hashes() -> None:
    values = [None, "", "a", "b", "a", "1", None]
    hashes = value_hashes(pa.array(values))
    for at, value in enumerate(values):
        assert [value == other for other in values] == (hashes == hashes[at]).tolist()
    # A number and its text are the same value: one file may have it as text.
    assert value_hashes(pa.array([7, 8])).tolist() == value_hashes(pa.array(["7", "8"])).tolist()


def test_hashes_of_kept_columns_tell_a_moved_value() -> None:
    ids = np.arange(3)
    columns = {"a": pa.array(["x", "y", "z"]), "b": pa.array([1, 2, 3])}
    total = attribute_hash(ids, columns)
    assert total == attribute_hash(
        ids[::-1], {name: values.take(pa.array([2, 1, 0])) for name, values in columns.items()}
    )
    assert total != attribute_hash(ids, columns | {"a": pa.array(["y", "x", "z"])})
    assert attribute_hash(ids, {}) == 0


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("nowhere",), "has no column nowhere; its columns are image, label, site"),
        (("v",), r"column v is fixed_size_list<.*>\[3\]; whole and real numbers, true or false, text"),
        (("label",), "shards have a column of this name already; leave it out"),
        (("site", "site"), "--keep-columns site,site: name every column once"),
    ],
)
def test_columns_that_cannot_be_kept_are_one_line(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    folder = parquet_with_columns(tmp_path / "p", rows=20)
    with pytest.raises(UsageError, match=message):
        discovered(folder, *names)


def test_columns_that_spark_does_not_read_are_named() -> None:
    """Spark takes ``worker`` from the names of folders, and ignores case."""
    assert unreadable_in_spark(["site", "worker", "ID", "Site", "age"]) == ["worker", "ID", "Site"]
    assert not unreadable_in_spark(["site", "ids"])


def test_zeros_of_either_sign_are_one_bundle() -> None:
    block = Block(np.arange(3), Columns(np.zeros(3, np.int32), None, attributes={"x": pa.array([0.0, -0.0, 1.0])}))
    keys = bundle_keys(block, "x")
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shape": (48,)}, r"--image-shape must be 3 whole numbers, got \(48,\)"),
        ({"shape": "3x4"}, "--image-shape must be 3 whole numbers, got '3x4'"),
        ({"shape": (3, 4.0, 4)}, "--image-shape must be 3 whole numbers"),
        ({"shape": (3, 0, 4)}, "--image-shape 3x0x4: numbers are at least 1"),
        ({"shape": (3, 1 << 20, 1 << 20)}, "at most 268,435,456 bytes per image"),
        ({"resize": 2}, "--resize must be 2 whole numbers, got 2"),
        ({"num_classes": "3"}, "--num-classes must be a whole number, got '3'"),
        ({"num_classes": True}, "--num-classes must be a whole number, got True"),
    ],
)
def test_options_of_other_types_are_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ReadOptions(**values)


def test_numbers_of_numpy_are_numbers() -> None:
    options = ReadOptions(shape=np.array([3, 4, 5]), num_classes=np.int64(7))  # type: ignore[arg-type]
    assert options == ReadOptions(shape=(3, 4, 5), num_classes=7)
    assert json.dumps([options.shape, options.num_classes]) == "[[3, 4, 5], 7]"


@pytest.mark.parametrize("interval", [{"ds": 3}, {"day": "x"}, {"ds": "2026-01-01", "run_id": "z"}])
def test_an_interval_of_another_form_is_one_line(interval: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"interval must be \{'ds': TEXT\} or \{'run_id': TEXT\}, got"):
        Request("in", "out", 2, interval=interval)


def test_formats_without_columns_say_so(tmp_path: Path) -> None:
    folder = write_binary(tmp_path / "c", *make_rows(20, pixels=12))
    options = ReadOptions("cifar10-binary", (3, 2, 2), columns=("site",))
    with pytest.raises(
        UsageError, match=r"has no column site: only the formats parquet and arrow have .*, not cifar10-binary; write"
    ):
        discover(Store(), str(folder), run=serial, read_options=options)


def test_a_value_that_does_not_fit_names_its_column(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    image = pa.array([bytes(12)], pa.binary())
    times = pa.array([1500], pa.timestamp("ns"))
    table = pa.table({"image": image, "label": [0], "n": pa.array([1 << 63], pa.uint64()), "at": times})
    pq.write_table(table, tmp_path / "p" / "a.parquet")
    for name, line in (
        ("n", "n does not fit int64: .* 9223372036854775808"),
        ("at", r"at .* timestamp\[us\]: .* 1500"),
    ):
        with pytest.raises(DataError, match=f"column {line}.*; convert it in the file, or leave it out$"):
            list(discovered(tmp_path / "p", name).read(0, 1))


def test_text_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    """Parquet readers return such text, which another program has written, unchecked."""
    text = pa.array([b"a", b"\xff", b"b"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"image": [bytes(12)] * 3, "label": [0] * 3, "site": text}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column site does not fit string: Invalid UTF8 sequence at string index 1"):
        list(discovered(tmp_path, "site").read(0, 3))


def test_kept_columns_that_change_before_the_write_stop_a_run() -> None:
    class Chunk:
        rows, fingerprint, attribute_sum, files = 3, 5, 8, ()

    class Counted:
        rows, fingerprint, attribute_sum = 3, 5, 7

    scan: Any = Counted()
    chunk: Any = Chunk()
    with pytest.raises(JobError, match=r"^the kept columns changed while the input was sharded"):
        verify_chunks([chunk], scan, 0)
