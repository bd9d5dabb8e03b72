"""Broken records of any format are left out up to a limit, with their place and reason."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from scipy.io import savemat

from pipeline.core.errors import DataError, UsageError
from pipeline.core.storage.store import Store
from pipeline.input.arrivals import BadRecord, survey
from pipeline.input.bad_records import leave_out_bad, parse_limit
from pipeline.input.dataset import Dataset, discover, serial
from pipeline.input.read_options import ReadOptions
from pipeline.runs.request import Request, identity
from pipeline.strategies.hash import Hash
from pipeline.strategies.stratified import Stratified
from pipeline.stream.request import StreamRequest
from tests.support.tfrecords import example, tfrecord

IMAGES = np.random.default_rng(3).integers(0, 256, (12, 5, 4, 3), dtype=np.uint8)
BROKEN = (2, 7)  # images that cannot be decoded


def image_file(row: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(IMAGES[row]).save(buffer, "PNG")
    return buffer.getvalue()[:50] if row in BROKEN else buffer.getvalue()


def make_folder(path: Path) -> None:
    for row in range(12):
        (path / "0").mkdir(exist_ok=True)
        (path / "0" / f"{row:02d}.png").write_bytes(image_file(row))


def make_parquet(path: Path) -> None:
    for part in range(2):
        rows = range(6 * part, 6 * part + 6)
        table = pa.table({"image": [image_file(row) for row in rows], "label": [0] * 6})
        pq.write_table(table, path / f"{part}.parquet")


def make_tfrecord(path: Path) -> None:
    (path / "a").write_bytes(tfrecord([example(image=image_file(row), label=0) for row in range(12)]))


def leave_out(dataset: Dataset, limit: str, pieces: int = 3) -> tuple[Dataset, list[BadRecord]]:
    return leave_out_bad(dataset, parse_limit(limit), pieces, serial)


@pytest.mark.parametrize("pieces", [1, 5])
@pytest.mark.parametrize("make", [make_folder, make_parquet, make_tfrecord])
def test_broken_images_are_left_out(make: object, pieces: int, tmp_path: Path) -> None:
    assert callable(make)
    make(tmp_path)
    dataset = discover(Store(), str(tmp_path), run=serial)
    rest, bad_records = leave_out(dataset, "2", pieces)
    assert [entry.records for entry in bad_records] == [1, 1]
    assert all("cannot be decoded" in entry.reason for entry in bad_records)
    blocks = list(rest.read(0, rest.rows))
    assert [number for block in blocks for number in block.ids] == list(range(10))
    pixels = np.concatenate([block.images for block in blocks]).reshape(-1, 3, 5, 4)
    expected = IMAGES[[row for row in range(12) if row not in BROKEN]].transpose(0, 3, 1, 2)
    assert np.array_equal(pixels, expected)
    for limit in ("1", "16.6%"):
        with pytest.raises(
            DataError, match=r"2 of 12 records are broken, and --max-bad-records allows 1; the first: .*"
        ):
            leave_out(dataset, limit)
    assert len(leave_out(dataset, "16.7%")[1]) == 2


@pytest.mark.parametrize("make", [make_folder, make_parquet, make_tfrecord])
def test_a_file_of_broken_images_is_left_out(make: Any, tmp_path: Path) -> None:
    """The shape of its images is that of other files; alone, it has none."""
    make(tmp_path)
    options = ReadOptions(counts_broken=True)
    if make is make_folder:
        (tmp_path / "1").mkdir()
        broken = tmp_path / "1" / "0.png"
        broken.write_bytes(image_file(2))
    elif make is make_parquet:
        broken = tmp_path / "2.parquet"
        pq.write_table(pa.table({"image": [image_file(2)], "label": [0]}), broken)
    else:
        broken = tmp_path / "b"
        broken.write_bytes(tfrecord([example(image=image_file(2), label=0)]))
    dataset = discover(Store(), str(tmp_path), run=serial, read_options=options)
    rest, bad_records = leave_out(dataset, "3")
    assert (rest.rows, sum(entry.records for entry in bad_records)) == (10, 3)
    assert bad_records[-1].source == str(broken if make is not make_folder else broken.parent)
    pixels = np.concatenate([block.images for block in rest.read(0, 10)]).reshape(-1, 3, 5, 4)
    assert np.array_equal(pixels, IMAGES[[row for row in range(12) if row not in BROKEN]].transpose(0, 3, 1, 2))
    with pytest.raises(DataError, match="cannot be decoded"):
        discover(Store(), str(tmp_path), run=serial)
    with pytest.raises(DataError, match="cannot be decoded"):
        discover(Store(), str(broken if make is not make_folder else tmp_path / "1"), run=serial, read_options=options)


def test_labels_out_of_range_are_left_out(tmp_path: Path) -> None:
    records = np.zeros((4, 3073), np.uint8)
    records[:, 0] = [1, 77, 3, 78]
    (tmp_path / "a.bin").write_bytes(records.tobytes())
    dataset = discover(Store(), str(tmp_path), run=serial)
    rest, bad_records = leave_out(dataset, "50%")
    assert [(entry.record, entry.records) for entry in bad_records] == [(1, 1), (3, 1)]
    assert [block.labels.tolist() for block in rest.read(0, 2)] == [[1], [3]]
    with pytest.raises(DataError, match=r"all 4 records are broken; the first: "):
        leave_out(discover(Store(), str(tmp_path), run=serial, read_options=ReadOptions(num_classes=1)), "100%")


@pytest.mark.parametrize("name", ["", "x" * 201])
def test_a_class_name_without_or_with_many_characters_is_refused(name: str, tmp_path: Path) -> None:
    table = pa.table({"image": [image_file(row) for row in (0, 1)], "label": ["b", name]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match=rf"a class is named 'x*', of {len(name)} characters: names have 1 to 200; rename"
    ):
        discover(Store(), str(tmp_path), run=serial)


def make_npy(path: Path, labels: list[int], images: np.ndarray) -> None:
    np.save(path / "images.npy", images)
    np.save(path / "labels.npy", labels)


def make_npz(path: Path, labels: list[int], images: np.ndarray) -> None:
    np.savez(path / "a.npz", images=images, labels=labels)


def make_mat(path: Path, labels: list[int], images: np.ndarray) -> None:
    savemat(path / "a.mat", {"X": images, "y": np.array(labels)})


def make_pickle(path: Path, labels: list[int], images: np.ndarray) -> None:
    data = np.zeros((len(images), 3072), np.uint8)
    (path / "a").write_bytes(pickle.dumps({b"data": data, b"labels": labels}, protocol=2))


@pytest.mark.parametrize("make", [make_npy, make_npz, make_mat, make_pickle])
def test_a_negative_label_costs_its_row_alone(make: Any, tmp_path: Path) -> None:
    """Leave out only the row with the label -1, in formats whose labels are one array per file."""
    make(tmp_path, [1, 0, -1, 1], IMAGES[:4])
    dataset = discover(Store(), str(tmp_path), run=serial, read_options=ReadOptions(num_classes=2))
    rest, bad_records = leave_out(dataset, "1")
    assert [(entry.record, entry.records) for entry in bad_records] == [(2, 1)]
    assert "label -1 is not in 0..1" in bad_records[0].reason
    assert [label for block in rest.read(0, rest.rows) for label in block.labels] == [1, 0, 1]


SAMPLES = ["1", "0", "1", "x", "0", "1", "0", "1"]  # labels, of which one is no number


def make_archive(path: Path, json_row: int) -> None:
    """A tar whose labels are numbers in files .cls, except for a broken .json of one row, and a name."""
    with tarfile.open(path / "a.tar", "w") as file:
        for row, label in enumerate(SAMPLES):
            beside = ("json", b'{"label": ') if row == json_row else ("cls", label.encode())
            image = io.BytesIO()
            Image.fromarray(IMAGES[row]).save(image, "PNG")
            for suffix, data in (("png", image.getvalue()), beside):
                info = tarfile.TarInfo(f"{row:02d}.{suffix}")
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))


def make_damaged_records(path: Path, json_row: int) -> None:
    """TFRecord with a wrong checksum of one example, and a name among labels that are numbers."""
    parts = []
    for row, label in enumerate(SAMPLES):
        image = io.BytesIO()
        Image.fromarray(IMAGES[row]).save(image, "PNG")
        number: int | str = int(label) if label.isdecimal() else label
        data = tfrecord([example(image=image.getvalue(), label=number)])
        parts.append(data[:-1] + bytes([data[-1] ^ 1]) if row == json_row else data)
    (path / "a").write_bytes(b"".join(parts))


@pytest.mark.parametrize("broken_row", [0, 5])
@pytest.mark.parametrize("make_samples", [make_archive, make_damaged_records])
def test_broken_labels_of_samples_are_left_out(make_samples: object, broken_row: int, tmp_path: Path) -> None:
    """A broken .json, .cls or checksum is one broken record; without a limit it still ends the survey."""
    assert callable(make_samples)
    make_samples(tmp_path, broken_row)
    with pytest.raises(DataError, match=r"is no JSON|wrong checksum|labels are all whole numbers"):
        discover(Store(), str(tmp_path), run=serial)
    dataset = discover(Store(), str(tmp_path), run=serial, read_options=ReadOptions(counts_broken=True))
    assert dataset.rows == 8
    rest, bad_records = leave_out(dataset, "2")
    assert [entry.record for entry in bad_records] == sorted([broken_row, 3])
    good = [row for row in range(8) if row not in (broken_row, 3)]
    blocks = list(rest.read(0, rest.rows))
    assert [label for block in blocks for label in block.labels] == [int(SAMPLES[row]) for row in good]
    pixels = np.concatenate([block.images for block in blocks]).reshape(-1, 3, 5, 4)
    assert np.array_equal(pixels, IMAGES[good].transpose(0, 3, 1, 2))
    with pytest.raises(DataError, match=r"2 of 8 records are broken, and --max-bad-records allows 1; the first: .*"):
        leave_out(dataset, "1")


def test_numbers_among_names_are_left_out(tmp_path: Path) -> None:
    image = io.BytesIO()
    Image.fromarray(IMAGES[0]).save(image, "PNG")
    labels: list[int | str] = ["dog", 1, "cat", "dog"]
    (tmp_path / "a").write_bytes(tfrecord([example(image=image.getvalue(), label=label) for label in labels]))
    dataset = discover(Store(), str(tmp_path), run=serial, read_options=ReadOptions(counts_broken=True))
    assert dataset.layout.class_names == ("cat", "dog")
    rest, bad_records = leave_out(dataset, "1")
    assert [(entry.record, entry.reason.partition(": ")[2]) for entry in bad_records] == [
        (1, "the label 1 is no known class")
    ]
    assert [label for block in rest.read(0, 3) for label in block.labels] == [1, 0, 1]


def test_a_label_beyond_32_bits_is_named_with_its_record(tmp_path: Path) -> None:
    image = io.BytesIO()
    Image.fromarray(IMAGES[0]).save(image, "PNG")
    (tmp_path / "a").write_bytes(tfrecord([example(image=image.getvalue(), label=label) for label in (1, 1 << 31)]))
    with pytest.raises(DataError, match=r"/a, .* holds 2147483648: number the classes from 0 to at most 65,535$"):
        list(discover(Store(), str(tmp_path), run=serial).read(0, 2))


def spark_image(row: int) -> dict[str, object]:
    data = b"short" if row == 0 else IMAGES[row][:, :, ::-1].tobytes()
    return {"origin": "", "height": 5, "width": 4, "nChannels": 3, "mode": 16, "data": data}


@pytest.mark.parametrize("kind", ["spark", "nested"])
def test_a_broken_first_row_of_a_table_is_left_out(kind: str, tmp_path: Path) -> None:
    nested = [None if row == 0 else IMAGES[row].tolist() for row in range(6)]
    images = [spark_image(row) for row in range(6)] if kind == "spark" else nested
    pq.write_table(pa.table({"image": images, "label": [0] * 6}), tmp_path / "a.parquet")
    dataset = discover(Store(), str(tmp_path), run=serial)
    assert dataset.layout.shape == (3, 5, 4)
    rest, bad_records = leave_out(dataset, "1")
    assert [entry.record for entry in bad_records] == [0]
    pixels = np.concatenate([block.images for block in rest.read(0, 5)]).reshape(-1, 3, 5, 4)
    assert np.array_equal(pixels, IMAGES[1:6].transpose(0, 3, 1, 2))


def test_whole_data_sets_are_not_changed(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(3073 * 2))
    dataset = discover(Store(), str(tmp_path), run=serial)
    assert leave_out(dataset, "0") == (dataset, [])


@pytest.mark.parametrize(("text", "rows", "most"), [("0.7%", 1000, 7), ("29%", 100, 29), ("16.6%", 12, 1), ("3", 2, 3)])
def test_shares_are_exact(text: str, rows: int, most: int) -> None:
    assert parse_limit(text).most(rows) == most


@pytest.mark.parametrize("text", ["", "-1", "1.5", "101%", "x%", "5 %"])
def test_other_limits_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--max-bad-records .*: give a number of records, such as 10, or a share"):
        Request("a", "b", 2, max_bad_records=text)


@pytest.mark.parametrize("name", ["image-folder", "npy", "idx"])
def test_a_stream_takes_files_that_hold_their_labels(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"--format {name}: its labels are not in the same file"):
        StreamRequest("b", 2, Hash(), read_options=ReadOptions(format=name))
    path = tmp_path / "x.npy"
    np.save(path, IMAGES)
    entries = [Store().info(str(path))]
    rows, bad_records = survey(Store(), "s", entries, run=serial, first=0, read_options=ReadOptions(), expected=None)
    assert rows is None
    assert "is npy, whose labels are not in the same file" in bad_records[0].reason


def test_a_stream_takes_no_file_that_numbers_its_classes_otherwise(tmp_path: Path) -> None:
    for name, classes in (("a", ["cat", "dog"]), ("b", ["dog", "cat"]), ("c", ["cat", "dog"])):
        features = json.dumps({"info": {"features": {"label": {"names": classes, "_type": "ClassLabel"}}}})
        table = pa.table({"image": [image_file(0)], "label": [0]}).replace_schema_metadata({"huggingface": features})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    entries = Store().list(str(tmp_path))
    rows, bad_records = survey(Store(), "s", entries, run=serial, first=0, read_options=ReadOptions(), expected=None)
    assert rows is not None
    assert rows.rows == 2
    assert [Path(entry.source).name for entry in bad_records] == ["b.parquet"]


def test_a_limit_makes_another_set() -> None:
    plain = Request("a", "b", 2)
    assert identity(plain, Stratified()) != identity(Request("a", "b", 2, max_bad_records="1"), Stratified())
