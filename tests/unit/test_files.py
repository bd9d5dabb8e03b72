"""What an input names: a folder with its partitions, a file, a pattern; and the rows that are read of it."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.layout import Layout
from pipeline.core.shardset.schema import record_schema
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.datasets.derive import train_and_test
from pipeline.input.dataset import Dataset, discover, serial
from pipeline.input.files import input_files
from pipeline.input.read_options import ReadOptions
from pipeline.runs.request import Request, check_output
from tests.conftest import make_rows

SHAPE = (3, 8, 8)
LABELS, IMAGES = make_rows(60, seed=7, pixels=192)


def write(path: Path, rows: slice, *, label: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    field = record_schema(Layout(SHAPE), neighbourhood=False, copy=False).field("image")  # which says the shape
    columns = [pa.array(map(bytes, IMAGES[rows]), pa.binary()), pa.array(LABELS[rows], pa.int32())]
    table = pa.table(columns, pa.schema([field, pa.field("label", pa.int32())]))
    pq.write_table(table if label else table.drop_columns(["label"]), path)


def found(root: Path, pattern: str, *, evaluation: bool = False) -> list[str]:
    files = input_files(Store(), f"{root}/{pattern}".rstrip("/"), evaluation)
    return [file.path.removeprefix(f"{root}/") for file in files]


def rows_of(dataset: Dataset) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    blocks = list(dataset.read(0, dataset.rows))
    return np.concatenate([b.labels for b in blocks]), np.concatenate([b.images for b in blocks])


def test_files_are_held_out_by_the_names_of_training_files(tmp_path: Path) -> None:
    training = ["a-test.npy", "set-train-images", "set-training.csv", "x_train.npy", "y_train.npy"]
    held_out = ["set-test-images", "set-val.csv", "x_test.npy", "y_test.npy"]
    for name in training + held_out:
        (tmp_path / name).write_bytes(b"x")
    assert found(tmp_path, "") == training
    assert found(tmp_path, "", evaluation=True) == ["set-test-images", "x_test.npy", "y_test.npy"]


@pytest.fixture
def days(tmp_path: Path) -> Path:
    for day in ("01", "02", "13"):
        for name in ("a.parquet", "b.parquet", "test-a.parquet", "_SUCCESS", ".hidden.parquet"):
            (tmp_path / f"day-{day}").mkdir(exist_ok=True)
            (tmp_path / f"day-{day}" / name).write_bytes(b"")
    (tmp_path / "notes.txt").write_text("beside them")
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("day-0*", ["day-01/a.parquet", "day-01/b.parquet", "day-02/a.parquet", "day-02/b.parquet"]),
        ("day-?3/", ["day-13/a.parquet", "day-13/b.parquet"]),
        ("day-*/[bc].parquet", ["day-01/b.parquet", "day-02/b.parquet", "day-13/b.parquet"]),
        ("*/a.*", ["day-01/a.parquet", "day-02/a.parquet", "day-13/a.parquet"]),
        ("day-01/*", ["day-01/a.parquet", "day-01/b.parquet"]),
        ("day-[!0]3/b*", ["day-13/b.parquet"]),
    ],
)
def test_a_pattern_names_what_it_names_in_a_shell(days: Path, pattern: str, expected: list[str]) -> None:
    assert found(days, pattern) == expected


def test_a_name_that_is_no_utf8_is_refused_at_once(tmp_path: Path) -> None:
    """A manifest could not hold it."""
    folder = tmp_path / "in"
    folder.mkdir()
    (Path(os.fsdecode(os.fsencode(folder) + b"/x\xff.bin"))).write_bytes(b"x")
    for place in (str(folder), str(next(folder.iterdir()))):
        with pytest.raises(DataError, match=r"in/x\\udcff\.bin has a name that is not UTF-8: rename it"):
            input_files(Store(), place, evaluation=False)
    images = tmp_path / "photos" / "cat"
    images.mkdir(parents=True)
    (Path(os.fsdecode(os.fsencode(images) + b"/y\xff.png"))).write_bytes(b"x")
    with pytest.raises(DataError, match=r"cat/y\\udcff\.png has a name that is not UTF-8: rename it"):
        discover(Store(), str(tmp_path / "photos"), run=serial)


def test_a_pattern_gives_training_or_test_files(days: Path) -> None:
    assert found(days, "day-0*", evaluation=True) == ["day-01/test-a.parquet", "day-02/test-a.parquet"]


@pytest.mark.parametrize("pattern", ["day-9*", "*/c.parquet", "nowhere/*", "notes.txt/*"])
def test_a_pattern_that_matches_nothing_is_one_line(days: Path, pattern: str) -> None:
    with pytest.raises(DataError, match="matches no file or folder; check --input"):
        found(days, pattern)


@pytest.mark.parametrize("word", ["valid", "validation", "val", "dev"])
def test_validation_files_are_neither_trained_nor_tested(tmp_path: Path, word: str) -> None:
    """Of a folder as data hubs leave it, the test split alone is for evaluation."""
    for name in ("train-0.parquet", f"{word}-0.parquet", "test-0.parquet"):
        (tmp_path / name).write_bytes(b"")
    assert found(tmp_path, "") == ["train-0.parquet"]
    assert found(tmp_path, "", evaluation=True) == ["test-0.parquet"]
    (tmp_path / "test-0.parquet").unlink()
    assert found(tmp_path, "", evaluation=True) == [f"{word}-0.parquet"]


@pytest.mark.parametrize("log", ["_delta_log", ".hoodie", "_spark_metadata"])
@pytest.mark.parametrize("named", ["table", "table/*.parquet", "*"])
def test_a_table_with_a_log_of_its_files_is_refused(tmp_path: Path, log: str, named: str) -> None:
    """Reading its files as plain Parquet would take rows that the table has removed."""
    write(tmp_path / "table" / "part-0.parquet", slice(0, 4))
    (tmp_path / "table" / log).mkdir()
    advice = "by --input delta:/.*/table --id-column" if log == "_delta_log" else "write the rows as Parquet"
    with pytest.raises(DataError, match=rf"table is .*: its {log} says which files count.*{advice}"):
        input_files(Store(), f"{tmp_path}/{named}", False)


@pytest.mark.parametrize(
    ("shape", "layout", "line"),
    [
        ("[32, 32, 3]", "HWC", "declares the layout 'HWC', and only CHW is read"),
        ("[-3, 32, -32]", "CHW", "channels, height and width are at least 1"),
        ("[0, 8, 8]", "CHW", "channels, height and width are at least 1"),
    ],
)
def test_a_layout_that_is_not_read_is_refused(tmp_path: Path, shape: str, layout: str, line: str) -> None:
    metadata = {"shape": shape, "dtype": "uint8", "layout": layout}
    schema = pa.schema([pa.field("image", pa.binary(), metadata=metadata), pa.field("label", pa.int32())])
    pq.write_table(pa.table([[bytes(3072)], [1]], schema), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=line):
        discover(Store(), str(tmp_path), run=serial)


def test_a_folder_whose_name_is_a_pattern_is_itself(tmp_path: Path) -> None:
    for name in ("[ab]", "a"):
        write(tmp_path / name / "x.parquet", slice(0, 3))
    assert found(tmp_path, "[ab]") == ["[ab]/x.parquet"]


def test_a_pattern_is_one_below_a_folder_with_brackets(tmp_path: Path) -> None:
    """Match no neighbour of such a folder, which may be the current one of a relative pattern."""
    for name in ("proj[1]", "proj1"):
        write(tmp_path / name / "d" / f"{name[-1]}.parquet", slice(0, 3))
    assert found(tmp_path, "proj[1]/d/*.parquet") == ["proj[1]/d/].parquet"]
    check_output(Store(), Request(f"{tmp_path}/proj[1]", f"{tmp_path}/proj1/out", 2))


def test_folders_above_an_input_say_nothing_of_its_classes(tmp_path: Path) -> None:
    above = tmp_path / "label=7" / "photos"
    write(above / "a.parquet", slice(0, 5), label=False)
    with pytest.raises(DataError, match="has no labels"):
        discover(Store(), str(above), run=serial, read_options=ReadOptions(shape=SHAPE))
    for name in ("cat", "dog"):
        (above / "images" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(above / "images" / name / "x.png")
    assert discover(Store(), str(above / "images"), run=serial).layout.class_names == ("cat", "dog")
    for pattern in (str(tmp_path / "label=*"), str(tmp_path)):
        (tmp_path / "label=7" / "b.parquet").unlink(missing_ok=True)
        write(tmp_path / "label=7" / "b.parquet", slice(0, 5), label=False)
        shutil.rmtree(above, ignore_errors=True)
        labels, _ = rows_of(discover(Store(), pattern, run=serial, read_options=ReadOptions(shape=SHAPE)))
        assert labels.tolist() == [7] * 5


def test_partition_folders_are_read_and_others_refused(tmp_path: Path) -> None:
    """Partition folders are read with the folder and others are refused."""
    write(tmp_path / "day=02" / "hour=1" / "a.parquet", slice(0, 20))
    write(tmp_path / "day=01" / "b.parquet", slice(20, 50))
    write(tmp_path / "c.parquet", slice(50, 60))
    (tmp_path / "_temporary").mkdir()
    dataset = discover(Store(), str(tmp_path), run=serial, read_options=ReadOptions(shape=SHAPE))
    order = np.r_[50:60, 20:50, 0:20]
    labels, images = rows_of(dataset)
    np.testing.assert_array_equal(labels, LABELS[order])
    np.testing.assert_array_equal(images, IMAGES[order])
    (tmp_path / "more").mkdir()
    with pytest.raises(DataError, match="more is a folder inside the input"):
        found(tmp_path, "")


@pytest.mark.parametrize("folder", ["label=cat", "label=__HIVE_DEFAULT_PARTITION__", "label=-1", "day=3"])
def test_a_folder_that_names_no_class_gives_no_label(tmp_path: Path, folder: str) -> None:
    write(tmp_path / folder / "a.parquet", slice(0, 5), label=False)
    with pytest.raises(DataError, match=r"has no labels: .* or in folders label=N"):
        discover(Store(), str(tmp_path), run=serial, read_options=ReadOptions(shape=SHAPE))
    assert (
        discover(Store(), str(tmp_path), run=serial, read_options=ReadOptions(shape=SHAPE, unlabelled=True)).rows == 5
    )


def test_an_output_that_the_input_pattern_matches_is_refused(days: Path) -> None:
    """An output among what a pattern matches is refused and one beside it is not."""
    check_output(Store(), Request(f"{days}/day-0*", f"{days}/out", 2))
    for output in (f"{days}/day-01/out", f"{days}/day-02", str(days)):
        with pytest.raises(UsageError, match=r"overlap|matches the input"):
            check_output(Store(), Request(f"{days}/day-0*", output, 2))


def test_an_output_with_the_report_of_a_training_run_is_refused(days: Path) -> None:
    output = days.parent / "run"
    output.mkdir()
    request = Request(f"{days}/day-0*", str(output), 2)
    (output / "notes.txt").write_text("somebody's")
    check_output(Store(), request)
    (output / "report.html").write_text("of a run")
    with pytest.raises(UsageError, match=r"holds a report\.html that is not of a shard set; choose another folder"):
        check_output(Store(), request)
    (output / "_manifests").mkdir()
    check_output(Store(), request)  # a set whose manifest.json is gone


@pytest.mark.parametrize("output", ["out", "out/deeper"])
def test_an_output_that_the_next_run_would_match_is_refused(days: Path, output: str) -> None:
    """An output that the pattern would match at the next run is refused at the first."""
    with pytest.raises(UsageError, match=r"out.* matches the input .*/\*; choose another folder"):
        check_output(Store(), Request(f"{days}/*", f"{days}/{output}", 2))


def test_patterns_ignore_folders_with_an_underscore(days: Path) -> None:
    """Folders that begin with an underscore are hidden from patterns."""
    for name in ("_staging", "_eval"):
        (days / name).mkdir()
        (days / name / "z.parquet").write_bytes(b"")
    (days / "notes.txt").unlink()
    assert not any(path.startswith("_") for path in found(days, "*"))
    assert found(days, "_st*") == ["_staging/z.parquet"]


def test_a_partition_may_name_the_side(tmp_path: Path) -> None:
    write(tmp_path / "split=train" / "a.parquet", slice(0, 20))
    write(tmp_path / "split=test" / "a.parquet", slice(20, 50))
    assert found(tmp_path, "") == ["split=train/a.parquet"]
    assert found(tmp_path, "", evaluation=True) == ["split=test/a.parquet"]
    assert found(tmp_path, "split=test") == ["split=test/a.parquet"]
    train, test = train_and_test(f"{tmp_path}/*")
    assert (train.rows, test and test.rows) == (20, 30)


def test_a_name_that_is_too_long_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist: File name too long; check --input"):
        found(tmp_path, "*" * 300)


def test_deep_partitions_are_listed_by_a_few_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for month, day in itertools.product(range(5), range(6)):
        write(tmp_path / f"year=1/month={month}/day={day}/a.parquet", slice(0, 1))
    most = [0]
    list_folder = Store.list

    def counted(self: Store, uri: str) -> list[FileInfo]:
        most[0] = max(most[0], threading.active_count())
        time.sleep(0.005)
        return list_folder(self, uri)

    before = threading.active_count()
    monkeypatch.setattr(Store, "list", counted)
    assert len(found(tmp_path, "")) == 30
    assert most[0] - before <= 16
