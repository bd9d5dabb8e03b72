"""Arrays of images in files beside their labels (IDX, NPY), in MATLAB files, and in the official archives of CIFAR."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy.io import savemat

from pipeline.core.errors import DataError
from pipeline.core.storage.store import Store
from pipeline.input.dataset import Dataset, discover, serial
from pipeline.input.formats.array_files import label_file_names
from pipeline.input.read_options import ReadOptions

IMAGES = np.random.default_rng(3).integers(0, 256, (9, 5, 4), dtype=np.uint8)
LABELS = (np.arange(9) % 4).astype(np.uint8)


def find(path: Path, *, evaluation: bool = False, **options: Any) -> Dataset:
    return discover(Store(), str(path), run=serial, read_options=ReadOptions(**options), evaluation=evaluation)


def rows_of(dataset: Dataset) -> tuple[list[int], np.ndarray]:
    """Labels, and images [rows, C, H, W], read in two parts."""
    blocks = [block for low, high in ((0, 4), (4, dataset.rows)) for block in dataset.read(low, high)]
    pixels = np.concatenate([block.images for block in blocks]).reshape(-1, *dataset.layout.shape)
    return np.concatenate([block.labels for block in blocks]).tolist(), pixels


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize("packed", [True, False])
def test_the_files_of_mnist_are_a_training_and_a_test_side(packed: bool, tmp_path: Path) -> None:
    for split, rows in (("train", slice(0, 6)), ("t10k", slice(6, 9))):
        for name, data in (
            (f"{split}-images-idx3-ubyte", idx(IMAGES[rows])),
            (f"{split}-labels-idx1-ubyte", idx(LABELS[rows])),
        ):
            (tmp_path / f"{name}{'.gz' * packed}").write_bytes(gzip.compress(data) if packed else data)
    dataset = find(tmp_path)
    assert (dataset.format, dataset.layout.shape, dataset.rows) == ("idx", (1, 5, 4), 6)
    labels, images = rows_of(dataset)
    assert labels == LABELS[:6].tolist()
    assert np.array_equal(images[:, 0], IMAGES[:6])
    held_out = find(tmp_path, evaluation=True)
    assert [block.labels.tolist() for block in held_out.read(0, 3)] == [LABELS[6:].tolist()]
    before = dataset.listing()
    labels_path = tmp_path / f"train-labels-idx1-ubyte{'.gz' * packed}"
    labels_path.write_bytes(labels_path.read_bytes())
    assert find(tmp_path).listing() != before  # other labels make another input


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
        ("emnist-letters-test-images-idx3-ubyte", "emnist-letters-test-labels-idx1-ubyte"),
        ("images.npy", "labels.npy"),
        ("cifar10.1_v6_data.npy", "cifar10.1_v6_labels.npy"),
        ("x_train.npy", "y_train.npy"),
        ("X.npy", "Y.npy"),
    ],
)
def test_the_name_of_labels_follows_from_the_images(images: str, labels: str) -> None:
    assert label_file_names(images)[0] == labels


@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_files_share_labels(order: Any, tmp_path: Path) -> None:
    """CIFAR-10-C has one file of labels for all its corruptions."""
    rgb = np.repeat(IMAGES[..., None], 3, axis=3)
    for name in ("brightness", "fog"):
        (tmp_path / f"{name}.npy").write_bytes(npy(np.asarray(rgb, order=order)))
    (tmp_path / "labels.npy").write_bytes(npy(LABELS.astype(np.int64)))
    dataset = find(tmp_path)
    assert (dataset.format, dataset.rows, dataset.layout.shape) == ("npy", 18, (3, 5, 4))
    labels, images = rows_of(dataset)
    assert labels == [*LABELS, *LABELS]
    assert np.array_equal(images[9:], rgb.transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("labels.npy", npy(LABELS[:5]), r"labels.npy is uint8 \(5,\); labels are 9 whole numbers"),
        ("labels.npy", npy(LABELS.astype(float)), "labels.npy is float64"),
        ("labels.npy", npy(LABELS.astype(np.int64) + 2**31), r"labels.npy holds \d{10}: number the classes"),
        ("labels.npy", npy(LABELS)[:-1], "labels.npy is damaged: "),
        ("labels.npy", npy(np.array([object()] * 9)), "labels.npy is damaged: it holds pickled objects"),
        ("images.npy", npy(IMAGES.astype(float)), "images.npy is float64; images are uint8"),
        ("images.npy", npy(np.zeros(9, np.uint8)), "images are .* flat ones need --image-shape"),
        ("images.npy", npy(IMAGES)[:9], "images.npy is damaged"),
        ("images.npy", gzip.compress(npy(IMAGES))[:-3], "images.npy is damaged"),
        ("images.npy", gzip.compress(npy(IMAGES) + b"x"), "images.npy is damaged: it does not hold the"),
    ],
)
def test_broken_arrays_have_one_line(name: str, data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "images.npy").write_bytes(npy(IMAGES))
    (tmp_path / "labels.npy").write_bytes(npy(LABELS))
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=words):
        rows_of(find(tmp_path))


def test_images_without_their_labels_say_where_they_are_expected(tmp_path: Path) -> None:
    (tmp_path / "images.npy").write_bytes(npy(IMAGES))
    with pytest.raises(DataError, match=r"has no labels: they are in a file beside the images: labels.npy"):
        find(tmp_path)
    assert rows_of(find(tmp_path, unlabelled=True))[0] == [0] * 9


def mat(path: Path, **variables: Any) -> Path:
    savemat(path, variables, do_compression=True)
    return path


@pytest.mark.parametrize("kind", ["float64", "float32", "uint8"])
def test_labels_of_matlab_files_may_be_doubles(kind: str, tmp_path: Path) -> None:
    labels, _ = rows_of(find(mat(tmp_path / "a.mat", X=IMAGES, y=LABELS.astype(kind)[:, None])))
    assert labels == LABELS.tolist()


@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf"), 1e300])
def test_labels_that_are_not_whole_numbers_are_refused(value: float, tmp_path: Path) -> None:
    path = mat(tmp_path / "a.mat", X=IMAGES, y=np.array([value, *[1.0] * 8]))
    with pytest.raises(DataError, match=r"a.mat, variable y is float64 \(9,\); labels are 9 whole numbers"):
        rows_of(find(path))


def test_the_class_of_digit_0_in_svhn_is_remarked(tmp_path: Path) -> None:
    images = np.zeros((32, 32, 3, 4), np.uint8)
    path = mat(tmp_path / "a.mat", X=images, y=np.array([10.0, 1, 2, 10]))
    dataset = find(path)
    assert rows_of(dataset)[0] == [0, 1, 2, 0]
    assert dataset.remarks() == [f"{path} has the label 10, which is read as class 0, as SVHN calls the digit 0"]
    assert find(mat(path, X=images, y=np.array([9, 1, 2, 9]))).remarks() == []
    assert find(mat(path, X=images, y=np.array([10, 0, 2, 9]))).remarks() == []


def test_matlab_files_have_rows_first_or_last(tmp_path: Path) -> None:
    for images in (IMAGES, np.moveaxis(IMAGES, 0, -1)):
        labels, pixels = rows_of(find(mat(tmp_path / "a.mat", images=images, label=LABELS)))
        assert labels == LABELS.tolist()
        assert np.array_equal(pixels[:, 0], IMAGES)
    path = mat(tmp_path / "b.mat", photo=IMAGES, kind=LABELS + 1)
    labels, _ = rows_of(find(path, image_column="photo", label_column="kind"))
    assert labels == (LABELS + 1).tolist()
    with pytest.raises(DataError, match=r"b.mat has no variable X, but kind, photo; --image-column names another one"):
        find(path)
    with pytest.raises(DataError, match=r"b.mat has no variable species, but"):
        find(path, image_column="photo", label_column="species")


@pytest.mark.parametrize(
    ("shape", "options", "rows_last"),
    [
        ((32, 32, 3, 9), {}, True),  # SVHN
        ((9, 32, 32, 3), {}, False),
        ((9, 3, 32, 32), {}, False),
        ((32, 3, 32, 32), {}, False),  # as many rows as columns of pixels
        ((32, 32, 3, 32), {}, True),
        ((9, 4, 5, 6), {"shape": (4, 5, 6)}, False),
        ((4, 5, 6, 9), {"shape": (4, 5, 6)}, True),
        ((9, 5, 4), {"shape": (1, 5, 4)}, False),
        ((5, 4, 9), {"shape": (1, 5, 4)}, True),
        ((5, 4, 5), {"shape": (1, 5, 4)}, True),
        ((4, 5, 4), {"shape": (1, 5, 4)}, False),
    ],
)
@pytest.mark.parametrize("labelled", [True, False])
def test_the_axis_of_rows_follows_from_shapes(
    shape: tuple[int, ...], options: dict[str, Any], rows_last: bool, labelled: bool, tmp_path: Path
) -> None:
    array = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    images = np.moveaxis(array, -1, 0) if rows_last else array
    variables = {"y": np.arange(1, len(images) + 1)} if labelled else {}
    dataset = find(mat(tmp_path / "a.mat", X=array, **variables), unlabelled=not labelled, **options)
    if images.shape[-1] == 3:
        images = images.transpose(0, 3, 1, 2)
    assert dataset.rows == len(images)
    pixels = np.concatenate([block.images for block in dataset.read(0, dataset.rows)])
    assert np.array_equal(pixels, images.reshape(len(images), -1))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((9, 5, 4), {"unlabelled": True}),
        ((9, 4, 5, 6), {"unlabelled": True}),
        ((3, 5, 4, 3), {"shape": (3, 5, 4)}),
        ((5, 5, 5), {"shape": (1, 5, 5)}),
        ((5, 4, 5), {}),
    ],
)
def test_an_ambiguous_axis_of_rows_is_refused(shape: tuple[int, ...], options: dict[str, Any], tmp_path: Path) -> None:
    variables = {} if "unlabelled" in options else {"y": np.arange(shape[0])}
    path = mat(tmp_path / "a.mat", X=np.zeros(shape, np.uint8), **variables)
    with pytest.raises(DataError, match=r"a.mat, variable X has shape .*: the first axis or the last can be the rows"):
        find(path, **options)


def test_broken_matlab_files_have_one_line(tmp_path: Path) -> None:
    path = mat(tmp_path / "a.mat", X=IMAGES.astype(float), y=LABELS)
    with pytest.raises(DataError, match=r"a.mat, variable X is float64; images are uint8|a.mat, variable X is double"):
        find(path)
    with pytest.raises(DataError, match=r"a.mat, variable X is bool; images are uint8"):
        find(mat(path, X=IMAGES > 100, y=LABELS))
    path.write_bytes(b"MATLAB 7.3 MAT-file" + bytes(200))
    with pytest.raises(DataError, match=r"a.mat is a MATLAB file of version 7.3, which is HDF5; save it with -v7"):
        find(path)
    path.write_bytes(b"MATLAB 5.0 MAT-file" + bytes(200))
    with pytest.raises(DataError, match=r"a.mat (is damaged|has no variable X)"):
        find(path)


def official(layout: str) -> dict[str, bytes]:
    """The files of a small archive in a layout of CIFAR's home page, in an order of its own."""
    pixels = np.random.default_rng(5).integers(0, 256, (6, 3072), dtype=np.uint8)
    names = [f"n{number}" for number in range(10)]
    files = {}
    for name, rows in (("data_batch_2", slice(2, 4)), ("test_batch", slice(4, 6)), ("data_batch_1", slice(0, 2))):
        if layout == "bin":
            data = np.concatenate([np.arange(6, dtype=np.uint8)[rows, None], pixels[rows]], axis=1).tobytes()
            files[f"cifar-10-batches-bin/{name}.bin"] = data
        else:
            batch = {b"data": pixels[rows], b"labels": list(range(6))[rows]}
            files[f"cifar-10-batches-py/{name}"] = pickle.dumps(batch, protocol=2)
    if layout == "bin":
        return files | {"cifar-10-batches-bin/batches.meta.txt": "\n".join(names).encode()}
    return files | {"cifar-10-batches-py/batches.meta": pickle.dumps({"label_names": names}, protocol=2)}


@pytest.mark.parametrize("layout", ["bin", "py"])
def test_an_official_archive_equals_its_folder(layout: str, tmp_path: Path) -> None:
    files = official(layout)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
    for evaluation in (False, True):
        packed = find(tmp_path / "a.tar.gz", evaluation=evaluation)
        folder = find(path.parent, evaluation=evaluation)
        assert packed.format == "cifar-archive"
        assert packed.layout == folder.layout
        assert packed.layout.class_names == tuple(f"n{number}" for number in range(10))
        labels, images = rows_of(packed)
        assert labels == rows_of(folder)[0] == ([4, 5] if evaluation else [0, 1, 2, 3])
        assert np.array_equal(images, rows_of(folder)[1])


def test_a_saved_data_set_of_streams_is_read(tmp_path: Path) -> None:
    """In the layout of save_to_disk: a folder per split, a stream per shard, and descriptions beside."""
    rows = pa.table({"image": [image.tobytes() for image in IMAGES], "label": LABELS.astype(np.int64)})
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "state.json").write_text("{}")
        with pa.ipc.new_stream(tmp_path / split / "data-00000-of-00001.arrow", rows.schema) as stream:
            stream.write_table(rows if split == "train" else rows[:2], max_chunksize=4)
    (tmp_path / "dataset_dict.json").write_text("{}")
    dataset = find(tmp_path, shape=(1, 5, 4))
    assert (dataset.format, dataset.rows) == ("arrow", 9)
    labels, images = rows_of(dataset)
    assert labels == LABELS.tolist()
    assert np.array_equal(images[:, 0], IMAGES)
    assert find(tmp_path, shape=(1, 5, 4), evaluation=True).rows == 2
    path = tmp_path / "train/data-00000-of-00001.arrow"
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(DataError, match=r"00001.arrow is not a whole Arrow file"):
        find(tmp_path, shape=(1, 5, 4))


def test_a_stream_that_is_being_written_is_no_shorter_file(tmp_path: Path) -> None:
    """Behind a whole batch it looks whole but for the marker of its end."""
    rows = pa.table({"image": [image.tobytes() for image in IMAGES], "label": LABELS.astype(np.int64)})
    path = tmp_path / "a.arrow"
    with path.open("wb") as file:
        stream = pa.ipc.new_stream(file, rows.schema)
        stream.write_table(rows[:4])
        file.flush()
        with pytest.raises(DataError, match=r"a.arrow has no end of stream behind its 4 rows: it is cut off or being"):
            find(path, shape=(1, 5, 4))
        stream.close()
    assert find(path, shape=(1, 5, 4)).rows == 4
