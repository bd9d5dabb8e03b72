"""Archives of numpy arrays: the layouts of images, the names of arrays, and what is refused in one line."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.core.storage.store import Store
from pipeline.input.dataset import discover, serial
from pipeline.input.formats.npz import Npz
from pipeline.input.read_options import ReadOptions
from tests.unit.test_formats import archive

ROWS = 40
RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (ROWS, 6, 5), np.uint8)
COLOUR = RNG.integers(0, 256, (ROWS, 6, 5, 3), np.uint8)
LABELS = np.arange(ROWS) % 4


def read(path: Path) -> tuple[tuple[int, int, int], np.ndarray, np.ndarray]:
    """Return the shape, labels and images of all rows."""
    dataset = discover(Store(), str(path), run=serial)
    blocks = list(dataset.read(0, dataset.rows))
    labels = np.concatenate([block.labels for block in blocks])
    return dataset.layout.shape, labels, np.concatenate([block.images for block in blocks])


@pytest.mark.parametrize(
    ("images", "shape", "planar"),
    [
        (GREY, (1, 6, 5), GREY),
        (GREY[..., None], (1, 6, 5), GREY),
        (GREY[:, None], (1, 6, 5), GREY),
        (COLOUR, (3, 6, 5), COLOUR.transpose(0, 3, 1, 2)),
        (COLOUR.transpose(0, 3, 1, 2), (3, 6, 5), COLOUR.transpose(0, 3, 1, 2)),
        (np.asfortranarray(COLOUR), (3, 6, 5), COLOUR.transpose(0, 3, 1, 2)),
    ],
)
def test_channels_may_be_first_last_or_absent(
    images: np.ndarray, shape: tuple[int, ...], planar: np.ndarray, tmp_path: Path
) -> None:
    for number, names in enumerate((("images", "labels"), ("x", "y"), ("data", "label"))):
        path = tmp_path / f"{number}.npz"
        path.write_bytes(archive(**dict(zip(names, (images, LABELS), strict=True))))
        found = read(path)
        assert found[0] == shape
        assert found[1].tolist() == LABELS.tolist()
        assert np.array_equal(found[2], planar.reshape(ROWS, -1))


def test_an_archive_without_labels_is_unlabelled(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(archive(images=GREY))
    with pytest.raises(DataError, match="--unlabelled"):
        read(tmp_path)
    assert discover(Store(), str(tmp_path), read_options=ReadOptions(unlabelled=True), run=serial).rows == ROWS


def test_a_column_of_labels_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(archive(images=GREY, labels=LABELS[:, None].astype(np.uint8)))
    assert read(tmp_path)[1].tolist() == LABELS.tolist()


def with_member(content: bytes, name: str = "images.npy") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        target.writestr(name, content)
    return file.getvalue()


def header_of(shape: str, dtype: str = "'|u1'") -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}}}"
    return b"\x93NUMPY\x01\x00" + (len(text) + 1).to_bytes(2, "little") + text.encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (archive(pictures=GREY, labels=LABELS), "has no array named images or x or data, but labels, pictures"),
        (archive(images=GREY / 255, labels=LABELS), "array images is float64; images are uint8, 0 to 255"),
        (archive(images=GREY.reshape(ROWS, -1), labels=LABELS), r"array images has shape \(40, 30\); images are"),
        (archive(images=GREY, labels=LABELS[:-1]), r"array labels is int64 \(39,\); labels are 40 whole numbers"),
        (
            archive(images=GREY, labels=LABELS + 2**31),
            r"array labels holds \d{10}: number the classes from 0 to at most 65,535",
        ),
        (with_member(header_of("(1 << 40, 4, 4)") + bytes(16)), "is damaged"),
        (with_member(header_of("(1099511627776, 4, 4)") + bytes(16)), "array images is damaged: 16 bytes are no uint8"),
        (with_member(header_of("(1,)", "'|O'") + bytes(8)), "array images is damaged: it holds pickled objects"),
        (with_member(b"\x93NUMPY\x09\x00"), "is damaged"),
        (with_member(b""), "is damaged"),
    ],
)
def test_another_content_is_one_line_that_names_the_file(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as refused:
        read(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("axes", [(30, 3), (3, 30), (6, 15), (5, 6, 3), (3, 5, 6), (6, 3, 5), (90, 1)])
def test_axes_without_an_order_are_refused(axes: tuple[int, ...], tmp_path: Path) -> None:
    """Refuse arrays with as many numbers as the declared shape, but other axes."""
    path = tmp_path / "a.npz"
    path.write_bytes(archive(images=COLOUR.reshape(ROWS, *axes), labels=LABELS))
    sides = ", ".join(map(str, axes))
    message = (
        rf"array images has images of \({sides}\), not --image-shape 3x6x5; save them as \[rows, 3, 6, 5\], \[rows, 6"
    )
    with pytest.raises(DataError, match=message):
        discover(Store(), str(path), read_options=ReadOptions(shape=(3, 6, 5)), run=serial)


@pytest.mark.parametrize("axes", ["channels first", "channels last", "flat"])
def test_a_declared_shape_fits_each_documented_order(axes: str, tmp_path: Path) -> None:
    first = COLOUR.transpose(0, 3, 1, 2)
    images = {"channels first": first, "channels last": COLOUR, "flat": first.reshape(ROWS, -1)}[axes]
    path = tmp_path / "a.npz"
    path.write_bytes(archive(images=images, labels=LABELS))
    dataset = discover(Store(), str(path), read_options=ReadOptions(shape=(3, 6, 5)), run=serial)
    found = np.concatenate([block.images for block in dataset.read(0, ROWS)])
    assert np.array_equal(found, first.reshape(ROWS, -1))


def test_a_declared_shape_decides_flat_images(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(archive(images=GREY.reshape(ROWS, -1), labels=LABELS))
    store = Store()
    data, layout = Npz().survey(store, store.info(str(path)), ReadOptions(shape=(1, 6, 5)))
    (block,) = Npz().read(store, data, 3, 7, layout, True)
    assert block.images is not None
    assert np.array_equal(block.images, GREY[3:7].reshape(4, -1))
