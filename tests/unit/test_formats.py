"""What every layout of the registry promises: a survey and reads equal what was written, and damage has a place."""

from __future__ import annotations

import io
import pickle
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import ExifTags, Image
from scipy.io import savemat

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.layout import Layout
from pipeline.core.storage.files import FileInfo, RemoteReader
from pipeline.core.storage.store import Store
from pipeline.input.dataset import discover, serial
from pipeline.input.formats import FORMATS, base, recognise
from pipeline.input.formats.base import BLOCK_BYTES, DataFile, block_rows
from pipeline.input.formats.cifar_binary import FixedRecords
from pipeline.input.formats.tables.arrow import ArrowFile, BoundedFile
from pipeline.input.read_options import ReadOptions
from pipeline.input.records import fixed_size_offsets
from tests.conftest import make_rows
from tests.support.tfrecords import example, tfrecord

STORE = Store()
BLOCK_ROWS = 256  # an eighth of the product's, so that files of several blocks are quickly made
ROWS = 2 * BLOCK_ROWS + 57  # three blocks, the last one small
GROUP_ROWS = 200  # of a row group or a record batch
LABELS, IMAGES = make_rows(ROWS, seed=3)


def records(*columns: np.ndarray) -> bytes:
    return bytes(np.concatenate([column.reshape(len(column), -1) for column in columns], axis=1).tobytes())


def coarse_of(labels: np.ndarray) -> np.ndarray:
    return (labels % 7).astype(np.uint8)


def table(labels: np.ndarray, images: np.ndarray) -> pa.Table:
    values = pa.array([image.tobytes() for image in images], pa.binary())
    return pa.table({"image": values, "label": labels, "coarse_label": coarse_of(labels)})


def write_parquet(path: Path, labels: np.ndarray, images: np.ndarray) -> None:
    pq.write_table(table(labels, images), path, row_group_size=GROUP_ROWS)


def write_arrow(path: Path, labels: np.ndarray, images: np.ndarray) -> None:
    rows = table(labels, images)
    with pa.ipc.new_file(path, rows.schema) as file:
        file.write_table(rows, max_chunksize=GROUP_ROWS)


def pickled(labels: np.ndarray, images: np.ndarray) -> bytes:
    batch = {b"data": images, b"fine_labels": labels.tolist(), b"coarse_labels": coarse_of(labels).tolist()}
    return pickle.dumps(batch, protocol=2)


def write_archive(
    path: Path, labels: np.ndarray, images: np.ndarray, names: dict[str, list[str]] | None = None
) -> None:
    names = names or {"fine_label_names": [f"class {number}" for number in range(100)]}
    members = (("cifar-100-python/train", pickled(labels, images)), ("cifar-100-python/meta", pickle.dumps(names)))
    with tarfile.open(path, "w:gz") as file:
        for name, data in (*members, ("cifar-100-python/test", pickled(labels[:3], images[:3]))):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))


def write_idx(path: Path, labels: np.ndarray, images: np.ndarray) -> None:
    shape = (len(images), 3, 32, 32)
    path.write_bytes(b"\0\0\x08\x04" + np.array(shape, ">u4").tobytes() + images.tobytes())
    header = b"\0\0\x08\x01" + np.array([len(labels)], ">u4").tobytes()
    path.with_name("train-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def write_npy(path: Path, labels: np.ndarray, images: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    np.save(path.with_name("labels.npy"), labels.astype(np.int64))


def write_mat(path: Path, labels: np.ndarray, images: np.ndarray) -> None:
    pixels = images.reshape(-1, 3, 32, 32).transpose(2, 3, 1, 0)
    with path.open("wb") as file:
        # As in SVHN's files, the class 0 is called 10.
        named = np.where(labels == 0, 10, labels)
        savemat(file, {"X": pixels, "y": named[:, None].astype(np.uint8)}, do_compression=True)


def archive(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def write_tar(path: Path, labels: np.ndarray, images: np.ndarray) -> None:
    with tarfile.open(path, "w") as file:
        for row, (label, image) in enumerate(zip(labels, images, strict=True)):
            content = png(image.reshape(3, 32, 32))
            for name, data in ((f"{row:06d}.cls", str(label).encode()), (f"{row:06d}.png", content)):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))


def write_records(path: Path, labels: np.ndarray, images: np.ndarray) -> None:
    rows = zip(labels, images, strict=True)
    path.write_bytes(tfrecord([example(image=image.tobytes(), label=int(label)) for label, image in rows]))


# How to write labels, images and, where the layout holds them, coarse labels as one file of each layout.
WRITERS: dict[str, Callable[[Path, np.ndarray, np.ndarray], object]] = {
    "cifar10-binary": lambda path, labels, images: path.write_bytes(records(labels, images)),
    "cifar100-binary": lambda path, labels, images: path.write_bytes(records(coarse_of(labels), labels, images)),
    "cifar-pickle": lambda path, labels, images: path.write_bytes(pickled(labels, images)),
    "cifar-archive": write_archive,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "tar": write_tar,
    "tfrecord": write_records,
    "npz": lambda path, labels, images: path.write_bytes(archive(images=images.reshape(-1, 3, 32, 32), labels=labels)),
    "npy": write_npy,
    "idx": write_idx,
    "mat": write_mat,
}
FILE_NAMES = {"npy": "images.npy", "idx": "train-images-idx3-ubyte"}  # where labels are in a file beside the images
every_format = pytest.mark.parametrize("name", list(WRITERS))


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "BLOCK_ROWS", BLOCK_ROWS)
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all(tmp_path_factory.mktemp("formats"), LABELS, IMAGES)


def write_all(folder: Path, labels: np.ndarray, images: np.ndarray) -> dict[str, Path]:
    paths = {name: folder / name / FILE_NAMES.get(name, "a") for name in WRITERS}
    for name, path in paths.items():
        path.parent.mkdir()
        WRITERS[name](path, labels, images)
    return paths


def write_every(folder: Path, labels: np.ndarray, images: np.ndarray) -> dict[str, Path]:
    """Write the same rows as an input of every format of the registry."""
    inputs = write_all(folder, labels, images) | {"image-folder": folder / "image-folder"}
    for row, (label, image) in enumerate(zip(labels, images, strict=True)):
        file = inputs["image-folder"] / str(label) / f"{row:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(image.reshape(3, 32, 32)))
    assert inputs.keys() == FORMATS.keys()
    return inputs


@pytest.fixture(scope="module")
def surveys(files: dict[str, Path]) -> dict[str, tuple[DataFile, Layout]]:
    return {name: surveyed(path, name) for name, path in files.items()}


def surveyed(path: Path, name: str) -> tuple[DataFile, Layout]:
    return FORMATS[name].survey(STORE, STORE.info(str(path)), ReadOptions())


class FewMethods(RemoteReader):
    """A reader with the methods of a remote store's alone."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def read(self, size: int = -1) -> bytes:
        return self.file.read(size)

    def close(self) -> None:
        self.file.close()
        super().close()


@pytest.mark.parametrize("remote", [False, True])
def test_every_format_gives_the_same_ids_and_bits(
    remote: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if remote:
        monkeypatch.setattr(Store, "open", lambda store, path: FewMethods(path))
    labels, images = np.repeat(np.arange(3, dtype=np.uint8), 4), IMAGES[:12]
    for name, path in write_every(tmp_path, labels, images).items():
        dataset = discover(STORE, str(path), run=serial)
        assert (dataset.format, dataset.rows) == (name, 12)
        rows = [block for low in (0, 5) for block in dataset.read(low, low + 7 if low else 5)]
        assert [number for block in rows for number in block.ids] == list(range(12)), name
        assert np.array_equal(np.concatenate([block.labels for block in rows]), labels), name
        assert np.array_equal(np.concatenate([block.images for block in rows]), images), name


@pytest.mark.parametrize("name", ["cifar100-binary", "cifar-pickle", "cifar-archive"])
def test_cifar100_has_columns_of_coarse_and_fine_labels(files: dict[str, Path], name: str) -> None:
    """The labels, and the same rows as of a Parquet file with these columns."""
    path = str(files[name])
    by_coarse = ReadOptions(label_column="coarse_label", columns=("fine_label",))
    dataset = discover(STORE, path, run=serial, read_options=by_coarse)
    assert (dataset.layout.num_classes, dataset.layout.coarse) == (20, 20)
    blocks = list(dataset.read(100, ROWS))
    assert np.array_equal(np.concatenate([block.labels for block in blocks]), coarse_of(LABELS)[100:])
    assert np.array_equal(np.concatenate([block.columns.coarse_labels for block in blocks]), coarse_of(LABELS)[100:])
    fine = np.concatenate([block.columns.attributes["fine_label"].to_numpy() for block in blocks])
    assert np.array_equal(fine, LABELS[100:])
    assert np.array_equal(np.concatenate([block.images for block in blocks]), IMAGES[100:])
    unlabelled = discover(STORE, path, run=serial, read_options=ReadOptions(unlabelled=True, columns=("fine_label",)))
    (block, *_) = unlabelled.read(0, 50)
    assert (set(block.labels), block.columns.coarse_labels) == ({0}, None)
    assert block.columns.attributes["fine_label"].to_pylist() == LABELS[:50].tolist()
    by_fine = discover(STORE, path, run=serial, read_options=ReadOptions(label_column="fine_label"))
    assert by_fine.layout == discover(STORE, path, run=serial).layout


@pytest.mark.parametrize("name", ["cifar100-binary", "cifar-pickle", "cifar-archive"])
def test_cifar100_has_names_of_coarse_classes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "train"
    names = {"fine_label_names": [f"f{number}" for number in range(100)]}
    names |= {"coarse_label_names": [f"c{number}" for number in range(20)]}
    if name == "cifar-archive":
        write_archive(path, LABELS[:9], IMAGES[:9], names)
    else:
        WRITERS[name](path, LABELS[:9], IMAGES[:9])
    (tmp_path / "meta").write_bytes(pickle.dumps(names))
    for key, values in names.items():
        (tmp_path / f"{key}.txt").write_text("\n".join(values))
    source = str(path if name == "cifar-archive" else tmp_path)
    for column, first in ((None, "f0"), ("coarse_label", "c0")):
        dataset = discover(STORE, source, run=serial, read_options=ReadOptions(name, label_column=column))
        assert dataset.layout.class_names[0] == first
        assert len(dataset.layout.class_names) == dataset.layout.num_classes


@pytest.mark.parametrize("name", ["cifar100-binary", "cifar-pickle", "cifar-archive"])
def test_cifar100_has_no_other_columns(files: dict[str, Path], name: str) -> None:
    for options in (ReadOptions(label_column="label"), ReadOptions(columns=("site",))):
        with pytest.raises(UsageError, match=r"has no column \w+; its columns are fine_label, coarse_label"):
            discover(STORE, str(files[name]), run=serial, read_options=options)
    with pytest.raises(UsageError, match=f"--image-column: {name} files have no columns with names; leave it out"):
        discover(STORE, str(files[name]), run=serial, read_options=ReadOptions(image_column="data"))


def test_the_rows_of_arrow_are_counted_without_images(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def read(self: BoundedFile, size: int = -1) -> bytes:
        data = read_plainly(self, size)
        sizes.append(len(data))
        return data

    read_plainly = BoundedFile.read
    monkeypatch.setattr(BoundedFile, "read", read)
    assert sum(ArrowFile(STORE, str(files["arrow"])).group_rows) == ROWS
    assert 0 < sum(sizes) < IMAGES.nbytes / 10


@pytest.mark.parametrize("pixels", [768, 1024])
def test_an_archive_of_other_images_is_one_line(pixels: int, tmp_path: Path) -> None:
    write_archive(tmp_path / "train", LABELS[:12], IMAGES[:12, :pixels])
    with pytest.raises(DataError, match=f"rows of {pixels} pixels are not 3x32x32 images; extract it"):
        discover(STORE, str(tmp_path / "train"), run=serial)
    with pytest.raises(DataError, match="holds 3x32x32 images, not --image-shape 3x16x16; leave it out, or extract it"):
        discover(STORE, str(tmp_path / "train"), run=serial, read_options=ReadOptions(shape=(3, 16, 16)))


def test_every_format_has_a_writer_here() -> None:
    folders = {name for name, kind in FORMATS.items() if kind.reads_folders}  # tests/unit/test_image_folder.py
    assert WRITERS.keys() == FORMATS.keys() - folders, "a new format needs a line in WRITERS"
    assert all(kind.name == name for name, kind in FORMATS.items())


@every_format
def test_a_file_is_recognised_as_its_own_layout_alone(files: dict[str, Path], name: str) -> None:
    assert recognise(STORE, [STORE.info(str(files[name]))], None) == name
    others = [STORE.info(str(path)) for other, path in files.items() if other != name]
    for other in others:
        head = STORE.read_range(other.path, 0, 1 << 18)
        assert not FORMATS[name].recognises(other, head, None)
        with pytest.raises(DataError, match=f"mixed layouts in one input: .*{name}"):
            recognise(STORE, [STORE.info(str(files[name])), other], None)


@every_format
def test_survey_and_read_equal_what_was_written(
    files: dict[str, Path], surveys: dict[str, tuple[DataFile, Layout]], name: str
) -> None:
    file, layout = surveys[name]
    assert (file.path, file.rows, file.bytes) == (str(files[name]), ROWS, files[name].stat().st_size)
    assert layout.shape == (3, 32, 32)
    blocks = list(FORMATS[name].read(STORE, file, 0, ROWS, layout, True))
    assert max(len(block.labels) for block in blocks) <= BLOCK_ROWS
    assert np.array_equal(np.concatenate([block.labels for block in blocks]), LABELS)
    assert np.array_equal(np.concatenate([block.images for block in blocks]), IMAGES)
    if layout.coarse:
        assert np.array_equal(np.concatenate([block.coarse_labels for block in blocks]), coarse_of(LABELS))
    else:
        assert {block.coarse_labels is None for block in blocks} == {True}


@every_format
@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 1), (GROUP_ROWS - 1, GROUP_ROWS + 1), (BLOCK_ROWS - 1, ROWS), (ROWS - 1, ROWS), (5, 5)],
)
def test_any_range_of_records_reads_like_a_slice(
    surveys: dict[str, tuple[DataFile, Layout]], name: str, start: int, stop: int
) -> None:
    file, layout = surveys[name]
    for images in (True, False):
        blocks = list(FORMATS[name].read(STORE, file, start, stop, layout, images))
        assert [label for block in blocks for label in block.labels] == LABELS[start:stop].tolist()
        if images:
            assert [row.tobytes() for block in blocks for row in np.asarray(block.images)] == [
                row.tobytes() for row in IMAGES[start:stop]
            ]
        else:
            assert all(block.images is None for block in blocks)


@every_format
def test_a_cut_file_is_a_data_error_that_names_it(files: dict[str, Path], name: str, tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(files[name].read_bytes()[:-11])
    with pytest.raises(DataError, match=str(path)):
        surveyed(path, name)


@every_format
def test_a_file_that_is_cut_after_its_survey_is_a_data_error_too(
    files: dict[str, Path], name: str, tmp_path: Path
) -> None:
    path = tmp_path / "later"
    path.write_bytes(files[name].read_bytes())
    file, layout = surveyed(path, name)
    path.write_bytes(files[name].read_bytes()[:-4000])
    with pytest.raises(DataError, match=str(path)):
        list(FORMATS[name].read(STORE, file, 0, ROWS, layout, True))


@every_format
def test_a_record_has_a_place_for_error_lines(files: dict[str, Path], name: str) -> None:
    file, layout = surveyed(files[name], name)
    assert FORMATS[name].where(file, 41, layout).startswith(str(files[name]))
    assert "41" in FORMATS[name].where(file, 41, layout)


@every_format
def test_a_format_travels_to_tasks(name: str) -> None:
    assert pickle.loads(pickle.dumps(FORMATS[name])) == FORMATS[name]


class Wide(FixedRecords):
    """Three label bytes: a layout that the package does not know."""

    name: ClassVar[str] = "wide"
    summary: ClassVar[str] = "wide records"
    label_bytes: ClassVar[int] = 3
    limits: ClassVar[tuple[int, ...]] = (2, 7, 10)

    def recognises(self, file: FileInfo, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        return file.bytes > 0 and file.bytes % self.record_bytes(shape) == 0


def test_a_new_format_of_the_registry_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = records(np.ones(ROWS, np.uint8), coarse_of(LABELS), LABELS, IMAGES)
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(DataError, match=r"has no format that `sharding formats` lists; declare it with --format and"):
        discover(STORE, str(tmp_path), run=serial)
    monkeypatch.setitem(FORMATS, "wide", Wide())
    dataset = discover(STORE, str(tmp_path), run=serial)
    assert (dataset.format, dataset.rows) == ("wide", ROWS)
    assert [label for block in dataset.read(0, 50) for label in block.labels] == LABELS[:50].tolist()
    for part in ([data[:-5]], [data, data[:-5]]):  # alone, and beside a whole one
        for number, content in enumerate(part):
            (tmp_path / f"{number}.bin").write_bytes(content)
        (tmp_path / "a.bin").unlink(missing_ok=True)
        with pytest.raises(DataError, match=f"record {ROWS - 1} at offset {(ROWS - 1) * 3075} has 3070 of 3075 bytes"):
            discover(STORE, str(tmp_path), run=serial)


def test_blocks_of_large_images_are_bounded_by_bytes(tmp_path: Path) -> None:
    """2,048 rows of a mebibyte each would be more than Arrow's 32-bit offsets can say, and than a task should hold."""
    side = 600
    size = 3 * side * side
    rows = 2 * (BLOCK_BYTES // size) + 5
    path = tmp_path / "large.bin"
    with open(path, "wb") as file:
        for row in range(rows):
            file.write(bytes([row % 10]) + bytes([row]) * size)
    name, shape = "cifar10-binary", (3, side, side)
    data, layout = FORMATS[name].survey(STORE, STORE.info(str(path)), ReadOptions(shape=shape))
    seen = 0
    for block in FORMATS[name].read(STORE, data, 0, rows, layout, True):
        assert block.images is not None
        assert block.images.nbytes <= BLOCK_BYTES
        assert (block.images[:, 0] == np.arange(seen, seen + len(block.labels))).all()
        seen += len(block.labels)
    assert seen == rows
    assert block_rows(3072) == BLOCK_ROWS
    assert block_rows(BLOCK_BYTES * 3) == 1


# In a process of its own, as Arrow tells the peak of all that a process has ever held.
READ_SOME = """
import sys
import pyarrow
from pipeline.input.dataset import discover, serial
from pipeline.core.storage.store import Store
found = list(discover(Store(), sys.argv[1], run=serial).read(7000, 7300))
print(sum(len(block.ids) for block in found), pyarrow.default_memory_pool().max_memory())
"""


@pytest.mark.full
def test_a_row_group_as_large_as_its_file_is_never_held_whole(tmp_path: Path) -> None:
    labels, images = make_rows(20_000, seed=1, pixels=3072)
    column = pa.array([row.tobytes() for row in images], pa.binary())
    pq.write_table(pa.table({"label": labels, "image": column}), tmp_path / "one.parquet", row_group_size=len(labels))
    done = subprocess.run([sys.executable, "-c", READ_SOME, str(tmp_path)], capture_output=True, text=True, check=True)
    rows, peak = map(int, done.stdout.split())
    assert rows == 300
    assert peak < images.nbytes / 2


def test_offsets_that_would_wrap_are_refused() -> None:
    assert fixed_size_offsets(3, 5).tolist() == [0, 5, 10, 15]
    assert fixed_size_offsets(2047, 1 << 20)[-1] == 2047 << 20
    with pytest.raises(OverflowError, match="2048 images of 1048576 bytes are more than the 2 GiB"):
        fixed_size_offsets(2048, 1 << 20)


def png(pixels: np.ndarray, length: int | None = None) -> bytes:
    """uint8 [C, H, W] as PNG, padded after its end to so many bytes where that is asked for."""
    buffer = io.BytesIO()
    Image.fromarray(np.moveaxis(pixels, 0, -1)).save(buffer, "PNG")
    data = buffer.getvalue()
    return data if length is None else data + bytes(length - len(data))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_an_encoded_image_may_be_as_long_as_a_raw_one(first: int, tmp_path: Path) -> None:
    """Wherever a block begins: with it, before it or after it."""
    images = np.random.default_rng(5).integers(0, 3, (3, 3, 32, 32)).astype(np.uint8)
    values = [png(images[0]), png(images[1], 3072), png(images[2])]
    assert {len(value) == 3072 for value in values} == {True, False}
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"image": values, "label": [0, 1, 2]}), path)
    file, layout = surveyed(path, "parquet")
    (block,) = FORMATS["parquet"].read(STORE, file, first, 3, layout, True)
    assert block.images is not None
    assert np.array_equal(block.images, images[first:].reshape(3 - first, -1))


def test_raw_pixels_that_begin_like_an_encoded_image_are_raw(tmp_path: Path) -> None:
    images = np.random.default_rng(6).integers(0, 256, (3, 3072)).astype(np.uint8)
    images[1, :4] = list(b"\x89PNG")
    images[2, :3] = list(b"\xff\xd8\xff")
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"image": [row.tobytes() for row in images], "label": [0, 1, 2]}), path)
    file, layout = surveyed(path, "parquet")
    (block,) = FORMATS["parquet"].read(STORE, file, 0, 3, layout, True)
    assert block.images is not None
    assert np.array_equal(block.images, images)


def test_grey_images_of_sixteen_bits_are_refused_and_not_clipped(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.full((32, 32), 40_000, np.uint16)).save(buffer, "PNG")
    path = tmp_path / "p.parquet"
    pq.write_table(
        pa.table({"image": [png(np.zeros((3, 32, 32), np.uint8)), buffer.getvalue()], "label": [0, 1]}), path
    )
    file, layout = surveyed(path, "parquet")
    with pytest.raises(DataError, match=r"row 1: the image has more than 8 bits a channel \(mode I;16\); convert it"):
        list(FORMATS["parquet"].read(STORE, file, 0, 2, layout, True))


# Image files of formats that keep every bit, and how Pillow writes them.
LOSSLESS: dict[str, dict[str, object]] = {"PNG": {}, "WEBP": {"lossless": True}, "BMP": {}, "TIFF": {}, "PPM": {}}


def image_file(pixels: np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    """uint8 [H, W], [H, W, 3] or [H, W, 4] as an image file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def read_images(path: Path, values: list[object], kind: pa.DataType | None = None) -> np.ndarray:
    """What a file of these images is read as, uint8 [rows, bytes]."""
    table = pa.table({"image": pa.array(values, kind), "label": pa.array([0] * len(values), pa.int32())})
    pq.write_table(table, path / "p.parquet")
    file, layout = surveyed(path / "p.parquet", "parquet")
    blocks = list(FORMATS["parquet"].read(STORE, file, 0, file.rows, layout, True))
    return np.concatenate([np.asarray(block.images) for block in blocks])


@pytest.mark.parametrize("kind", list(LOSSLESS))
@pytest.mark.parametrize("shape", [(5, 4, 3), (5, 4)])
def test_image_files_are_read_as_their_pixels(kind: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (2, *shape), dtype=np.uint8)
    found = read_images(tmp_path, [image_file(image, kind, **LOSSLESS[kind]) for image in pixels])
    if kind == "WEBP" or len(shape) == 3:  # WebP has no grey images
        planar = pixels if len(shape) == 3 else np.repeat(pixels[..., None], 3, axis=3)
        pixels = np.moveaxis(planar, 3, 1)
    assert np.array_equal(found, pixels.reshape(2, -1))


@pytest.mark.parametrize("head", [b"P2\n3 1\n255\n", b"P2 # grey\n3 1 255\r\n", b"P2\t3\t1\t255\t", b"P2\r3 1 255 "])
def test_a_text_file_of_pixels_is_an_image_file(head: bytes, tmp_path: Path) -> None:
    assert read_images(tmp_path, [head + b"7 0 255\n"]).tolist() == [[7, 0, 255]]


def test_a_gif_is_read_by_its_palette(tmp_path: Path) -> None:
    grey = np.random.default_rng(1).integers(0, 256, (6, 4), dtype=np.uint8)
    assert np.array_equal(read_images(tmp_path, [image_file(grey, "GIF")])[0].reshape(-1, 6, 4)[0], grey)


@pytest.mark.parametrize(
    "head", [b"\0\0\0\x1cftypavif", b"\0\0\0\x0cjP  \r\n", b"RIFF\0\0\0\0WEBP", b"II*\0", b"GIF89a", b"P6\n"]
)
def test_a_broken_image_file_does_not_count_as_raw_pixels(head: bytes, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"p\.parquet, row 0: the image cannot be decoded"):
        read_images(tmp_path, [head + bytes(100)] * 2)


def test_raw_pixels_of_another_size_are_told_apart_from_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 0: 99 bytes that begin as no known image file.* declare --image-shape"):
        read_images(tmp_path, [b"x" * 99] * 2)


@pytest.mark.parametrize("begin", [b"BM" + bytes(8), b"II*\0", b"\0\0\0\0ftyp"])
def test_raw_pixels_may_begin_as_any_image_file(begin: bytes, tmp_path: Path) -> None:
    images = np.random.default_rng(6).integers(0, 256, (3, 3072)).astype(np.uint8)
    images[1, : len(begin)] = list(begin)
    assert np.array_equal(read_images(tmp_path, [row.tobytes() for row in images]), images)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (pa.list_(pa.uint8()), r"row 0: 3 numbers are no image of 3x32x32; declare --image-shape"),
        (pa.string(), "column image is string, not binary images"),
    ],
)
def test_a_column_that_is_not_binary_is_refused(kind: pa.DataType, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        read_images(tmp_path, [b"abc", b"abc"], kind)


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.binary(3072), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())]
)
def test_every_binary_type_of_arrow_is_read(kind: pa.DataType, tmp_path: Path) -> None:
    images = np.random.default_rng(6).integers(0, 256, (3, 3072)).astype(np.uint8)
    assert np.array_equal(read_images(tmp_path, [row.tobytes() for row in images], kind), images)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_an_orientation_in_exif_is_applied(kind: str, orientation: int, tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    turns: dict[int, Callable[[np.ndarray], np.ndarray]] = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1),
        6: lambda a: a[::-1].swapaxes(0, 1),
        7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
        8: lambda a: a[:, ::-1].swapaxes(0, 1),
    }
    found = read_images(tmp_path, [image_file(pixels, kind, exif=exif.tobytes(), **LOSSLESS[kind])])
    upright = turns[orientation](pixels)
    assert np.array_equal(found[0], np.moveaxis(upright, 2, 0).reshape(-1))


def test_broken_exif_leaves_the_pixels_as_they_are(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    found = read_images(tmp_path, [image_file(pixels, exif=b"Exif\0\0no TIFF header")])
    assert np.array_equal(found[0], np.moveaxis(pixels, 2, 0).reshape(-1))


@pytest.mark.parametrize("opaque", [True, False])
def test_transparent_images_are_refused_and_opaque_read(opaque: bool, tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (5, 4, 4), dtype=np.uint8)
    pixels[..., 3] = 255
    pixels[2, 2, 3] -= not opaque
    if opaque:
        found = read_images(tmp_path, [image_file(pixels)])
        assert np.array_equal(found[0], np.moveaxis(pixels[..., :3], 2, 0).reshape(-1))
        return
    with pytest.raises(DataError, match=r"row 0: the image is transparent in places; flatten it"):
        read_images(tmp_path, [image_file(pixels)])


def test_a_transparent_palette_is_refused(tmp_path: Path) -> None:
    pixels = np.arange(20, dtype=np.uint8).reshape(5, 4)
    with pytest.raises(DataError, match=r"row 0: the image is transparent in places"):
        read_images(tmp_path, [image_file(pixels, transparency=7)])


def test_a_file_of_several_frames_is_refused(tmp_path: Path) -> None:
    first, second = (Image.fromarray(np.full((5, 4), value, np.uint8)) for value in (1, 200))
    buffer = io.BytesIO()
    first.save(buffer, "GIF", save_all=True, append_images=[second])
    with pytest.raises(DataError, match=r"row 0: the image has 2 frames"):
        read_images(tmp_path, [buffer.getvalue()])


def test_an_image_of_very_many_pixels_is_not_decoded(tmp_path: Path) -> None:
    """A PNG of 93 MB, whose bytes number a thousandth of that."""
    buffer = io.BytesIO()
    Image.new("1", (9500, 9500)).save(buffer, "PNG")
    with pytest.raises(DataError, match=r"row 0: the image of 9500x9500 pixels has more than"):
        read_images(tmp_path, [buffer.getvalue()])


def deep_png(colour_type: int, channels: int) -> bytes:
    """A PNG of 16 bits per channel, which Pillow does not write: 4x4 pixels of 40,000."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    line = b"\0" + struct.pack(f">{4 * channels}H", *[40_000] * 4 * channels)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 16, colour_type, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(line * 4)) + chunk(b"IEND", b"")


def deep_tiff() -> bytes:
    """A TIFF of 2x2 pixels of 40,000 in three channels of 16 bits."""
    short, long = 3, 4
    entries = [
        (256, short, 1, 2), (257, short, 1, 2), (258, short, 3, 134), (259, short, 1, 1), (262, short, 1, 2),
        (273, long, 1, 140), (277, short, 1, 3), (278, short, 1, 2), (279, long, 1, 24), (284, short, 1, 1),
    ]  # fmt: skip
    folder = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return (
        b"II*\0"
        + struct.pack("<IH", 8, len(entries))
        + folder
        + bytes(4)
        + struct.pack("<3H", *[16] * 3)
        + (struct.pack("<12H", *[40_000] * 12))
    )


@pytest.mark.parametrize(
    "deep",
    [
        deep_png(2, 3),
        deep_png(4, 2),
        deep_png(6, 4),
        deep_tiff(),
        b"P6 2 2 65535\n" + b"\x9c\x40" * 12,
        b"P3 2 2 65535\n" + b"40000 " * 12,
    ],
    ids=["rgb png", "grey png with alpha", "rgb png with alpha", "tiff", "ppm", "plain ppm"],
)
def test_colours_of_sixteen_bits_are_refused_and_not_cut(tmp_path: Path, deep: bytes) -> None:
    """Pillow opens them as images of 8 bits, in which 256 would be 1."""
    with pytest.raises(DataError, match="row 0: the image has more than 8 bits a channel"):
        read_images(tmp_path, [deep])


def test_colours_of_fewer_bits_are_read(tmp_path: Path) -> None:
    """A PPM file with the largest value 15, and a BMP of 16 bits per pixel."""
    read_images(tmp_path, [b"P6 2 2 15\n" + b"\x0c" * 12])
    header = struct.pack("<IiiHHIIiiII", 40, 2, 2, 1, 16, 0, 8, 0, 0, 0, 0)
    read_images(tmp_path, [b"BM" + struct.pack("<IHHI", 62, 0, 0, 54) + header + bytes(8)])


def test_a_first_image_of_sixteen_bits_names_file_and_row(tmp_path: Path) -> None:
    deep = image_file(np.full((32, 32), 40_000, np.uint16))
    with pytest.raises(DataError, match=r"p\.parquet, row 0: the image has more than 8 bits a channel"):
        read_images(tmp_path, [deep, deep])
