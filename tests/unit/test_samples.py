"""Files of samples: tar archives in WebDataset's layout or of folders, and TFRecord files; split, packed and damaged."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.core.errors import DataError
from pipeline.core.storage.store import Store
from pipeline.input.dataset import Dataset, discover, serial
from pipeline.input.formats import samples
from pipeline.input.read_options import ReadOptions
from pipeline.input.scan import scan
from tests.support.tfrecords import example, masked, tfrecord

IMAGES = np.random.default_rng(3).integers(0, 256, (7, 5, 4, 3), dtype=np.uint8)
Files = list[tuple[str, bytes]]


def find(path: Path, **options: Any) -> Dataset:
    return discover(Store(), str(path), run=serial, read_options=ReadOptions(**options))


def rows_of(dataset: Dataset) -> tuple[list[int], np.ndarray]:
    """Labels, and images [rows, H, W, C]."""
    blocks = list(dataset.read(0, dataset.rows))
    pixels = np.concatenate([block.images for block in blocks]).reshape(-1, *dataset.layout.shape)
    return np.concatenate([block.labels for block in blocks]).tolist(), np.moveaxis(pixels, 1, 3)


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(IMAGES[number]).save(buffer, "PNG")
    return buffer.getvalue()


def archive(files: Files, style: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=style) as file:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def numbered(count: int = 7) -> Files:
    return [
        file
        for at in range(count)
        for file in ((f"a/{at:03d}.png", png(at)), (f"a/{at:03d}.cls", str(at % 3).encode()))
    ]


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("packed", [True, False])
def test_samples_of_a_tar_are_rows(packed: bool, style: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "DECODED_BYTES", 120)  # two rows between marks
    long = "n" * 90 + "/" + "m" * 90
    files = [(f"{long}/{name}", data) for name, data in numbered()]
    data = archive([("README.md", b"x"), *files], style)
    dataset = find(write(tmp_path / "a.tar", gzip.compress(data) if packed else data))
    assert len(dataset.files[0].marks) == (0 if packed else 4)
    labels, images = rows_of(dataset)
    assert (dataset.format, labels) == ("tar", [0, 1, 2, 0, 1, 2, 0])
    assert np.array_equal(images, IMAGES)
    for low in range(7):
        (block,) = dataset.read(low, low + 1)
        assert block.labels.tolist() == [low % 3]
        assert np.array_equal(block.images.reshape(3, 5, 4), IMAGES[low].transpose(2, 0, 1))


def test_a_file_has_few_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "DECODED_BYTES", 60)  # of one row
    monkeypatch.setattr(samples, "MOST_MARKS", 3)
    dataset = find(write(tmp_path / "a.tar", archive(numbered())))
    assert (len(dataset.files[0].marks), dataset.files[0].decode_rows) == (3, 1)
    for low in range(7):
        (block,) = dataset.read(low, low + 1)
        assert block.labels.tolist() == [low % 3]


def test_labels_of_a_tar_are_files_keys_or_folders(tmp_path: Path) -> None:
    about = json.dumps({"label": 4, "kind": "bee"}).encode()
    files = [("x.kind", b"cat"), ("x.left.png", png(1)), ("x.png", png(0)), ("x.json", about)]
    path = write(tmp_path / "a.tar", archive([("dog/1.png", png(2)), ("./cat/2.png", png(3))]))
    dataset = find(path)
    assert (dataset.layout.class_names, rows_of(dataset)[0]) == (("cat", "dog"), [1, 0])
    path = write(tmp_path / "b.tar", archive(files))
    assert rows_of(find(path, image_column="png"))[0] == [4]
    named = find(path, label_column="kind", image_column="left.png")
    assert named.layout.class_names == ("cat",)
    assert np.array_equal(rows_of(named)[1][0], IMAGES[1])
    assert find(
        write(tmp_path / "c.tar", archive([("README.md", b"x"), *files[2:]])), label_column="kind"
    ).layout.class_names == ("bee",)
    with pytest.raises(DataError, match=r"c.tar, sample x has no file \.species, nor a key species in a \.json"):
        find(tmp_path / "c.tar", label_column="species")
    with pytest.raises(DataError, match=r"d.tar has no labels: a sample has one in a file .cls or .json"):
        find(write(tmp_path / "d.tar", archive([("1.png", png(0))])))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            [("a/cat.0.png", png(0)), ("a/cat.1.png", png(1))],
            r"sample a/cat has several images, \.0\.png and \.1\.png: ",
        ),
        ([("1.png", png(0)), ("1.PNG", png(1))], r"sample 1 has several images, \.png and \.png: "),
        ([("1.cls", b"3")], r"sample 1 has no image, but only the files \.cls"),
        ([("1.png", b"x"), ("1.cls", b"\xff")], r"sample 1: its \.cls is no text"),
        ([("1.png", b"x"), ("1.json", b"{")], r"sample 1: its \.json is no JSON"),
        ([("1.png", b"x"), ("1.json", b'{"label": [1]}')], r"sample 1: the label is '\[1\]', neither"),
        ([("1.png", b"x"), ("1.cls", b"3")], "sample 1: 1 bytes that begin as no known image file"),
        ([("1.png", png(0)), ("1.cls", b"3"), ("2.png", png(1)), ("2.cls", b"cat")], "sample 2: labels are all whole"),
        ([("1.png", png(0)), ("1.cls", b"-3")], "row 0: label -3 is not in"),
    ],
)
def test_broken_samples_have_one_line(files: Files, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", archive(files))
    with pytest.raises(DataError, match=rf"a.tar, {words}"):
        scan(find(path), [(0, 1)], 1, serial)


def test_a_tar_of_training_and_evaluation_rows_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", archive([("set/train/cat/1.png", png(0)), ("set/val/cat/1.png", png(1))]))
    with pytest.raises(DataError, match=r"a.tar has the folders train and val, so that evaluation rows would be"):
        find(path)
    assert find(write(path, archive([("set/train/1.png", png(0)), ("set/test/1.png", png(1))]))).rows == 2, "classes"


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_tar_with_links_to_images_or_labels_is_refused(kind: bytes, tmp_path: Path) -> None:
    for name in ("a/2.png", "a/2.cls"):
        buffer = io.BytesIO(archive([("a/1.png", png(0)), ("a/1.cls", b"1")]))
        with tarfile.open(fileobj=buffer, mode="a") as file:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, f"a/1{name[-4:]}"
            file.addfile(link)
        with pytest.raises(DataError, match=rf"a.tar, file {name}: a link, whose row would be lost"):
            find(write(tmp_path / "a.tar", buffer.getvalue()))


def test_labels_that_are_left_out_may_be_anything(tmp_path: Path) -> None:
    files = [("1.png", png(0)), ("1.json", b'{"label": [1]}'), ("2.png", png(1)), ("2.cls", b"cat")]
    write(tmp_path / "a.tar", archive(files))
    write(tmp_path / "b", tfrecord([example(image=png(0), label=0.5), example(image=png(1), label=1)]))
    for name in ("a.tar", "b"):
        labels, images = rows_of(find(tmp_path / name, unlabelled=True))
        assert labels == [0, 0]
        assert np.array_equal(images, IMAGES[:2])


@pytest.mark.parametrize("packed", [True, False])
def test_a_tar_that_is_cut_or_changed_is_refused(packed: bool, tmp_path: Path) -> None:
    data = archive(numbered())
    data = gzip.compress(data) if packed else data
    end = data.rfind(b"a/006.cls") if not packed else len(data)
    for size in (len(data) // 2, end - 3, end) if not packed else (len(data) // 2, len(data) - 3):
        with pytest.raises(DataError, match=r"a.tar(, file a/\d+.\w+: | is )"):
            find(write(tmp_path / "a.tar", data[:size]))
    dataset = find(write(tmp_path / "a.tar", data))
    write(tmp_path / "a.tar", archive(numbered(6)))
    with pytest.raises(DataError, match=r"another size than at its survey|6 rows came of 7"):
        rows_of(dataset)


@pytest.mark.parametrize("packed", [True, False])
def test_examples_are_rows(packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "DECODED_BYTES", 120)
    rows = [example(image__encoded=png(at), image__class__label=at, weight=0.5, packed=packed) for at in range(7)]
    dataset = find(write(tmp_path / "a", tfrecord(rows)))
    assert (dataset.format, len(dataset.files[0].marks)) == ("tfrecord", 4)
    labels, images = rows_of(dataset)
    assert labels == list(range(7))
    assert np.array_equal(images, IMAGES)
    (block,) = dataset.read(5, 6)
    assert block.labels.tolist() == [5]


def test_examples_have_names_and_other_features(tmp_path: Path) -> None:
    rows = [example(photo=png(at), species=name) for at, name in enumerate(["dog", "ant", "dog"])]
    dataset = find(write(tmp_path / "a", tfrecord(rows)), image_column="photo", label_column="species")
    assert (dataset.layout.class_names, rows_of(dataset)[0]) == (("ant", "dog"), [1, 0, 1])
    with pytest.raises(
        DataError, match="record at byte 0 has no feature image/encoded; its features are photo, species"
    ):
        find(tmp_path / "a")


@pytest.mark.parametrize("packed", [True, False])
def test_features_of_several_values_are_refused(packed: bool, tmp_path: Path) -> None:
    labels: tuple[list[int] | list[str], ...] = ([3, 300, -5], ["cat", "dog", "ant"])
    for label in labels:
        path = write(tmp_path / "a", tfrecord([example(image=png(0), label=label, packed=packed)]))
        with pytest.raises(DataError, match=r"record at byte 0: the feature label has 3 values, and a row has one"):
            find(path)
        assert find(path, unlabelled=True).rows == 1
    path = write(tmp_path / "a", tfrecord([example(image=[0, 200] * 1536, label=0, packed=packed)]))
    with pytest.raises(DataError, match=r"the feature image has 3,072 values, .* \(of an image its bytes\)"):
        find(path)
    path = write(tmp_path / "a", tfrecord([example(image=png(0), label=[300], boxes=[1, 2], packed=packed)]))
    assert rows_of(find(path))[0] == [300]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (tfrecord([example(image=1, label=1)]), "record at byte 0: the feature of the image is '1', not bytes; write"),
        (tfrecord([example(image=png(0), label=0.5)]), "record at byte 0: the label is 'None', neither"),
        (tfrecord([example(image=png(0), label=b"\xff")]), "record at byte 0: the label is no text"),
        (tfrecord([b"\x0a\xff\xff"]), "record at byte 0 is no tf.train.Example"),
        (tfrecord([b"\x0b" * 12]), "record at byte 0 is no tf.train.Example"),
        (tfrecord([example(image=png(0), label=1)]) + b"x", "is cut: a record begins at byte 1.. and lacks its header"),
        (tfrecord([example(image=png(0), label=1)])[:-1], "is cut: the record at byte 0 has"),
        (
            tfrecord([example(image=png(0), label=1)])[:-4] + b"1234",
            "is damaged: the record at byte 0 has a wrong checksum",
        ),
        (tfrecord([example(image=png(0), label=1)]) + bytes(12), "the length of a record has a wrong checksum"),
        (
            (1 << 40).to_bytes(8, "little") + masked((1 << 40).to_bytes(8, "little")),
            "the record at byte 0 has 1,099,511,627,776 bytes, more than 269,484,032",
        ),
    ],
)
def test_broken_records_have_one_line(data: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        find(write(tmp_path / "a", data))


def test_hidden_files_of_an_archive_are_no_images(tmp_path: Path) -> None:
    """Leave out what macOS adds: ._a.png beside a.png."""
    buffer = io.BytesIO(archive([("cat/a.png", png(0)), ("cat/._a.png", b"extended attributes")]))
    with tarfile.open(fileobj=buffer, mode="a") as file:
        link = tarfile.TarInfo("cat/.b.png")
        link.type, link.linkname = tarfile.SYMTYPE, "a.png"
        file.addfile(link)
    assert find(write(tmp_path / "a.tar", buffer.getvalue())).rows == 1


@pytest.mark.parametrize(
    "files",
    [
        [("caf\udce9/a.png", png(0))],
        [("a.png", png(0)), ("a.json", json.dumps({"label": "\ud800"}).encode())],
    ],
)
def test_a_class_that_is_no_utf8_is_refused_before_any_work(tmp_path: Path, files: Files) -> None:
    with pytest.raises(DataError, match="no UTF-8: write the archive with names in UTF-8") as caught:
        find(write(tmp_path / "a.tar", archive(files, tarfile.GNU_FORMAT)))
    str(caught.value).encode()
