"""Layouts, ids and every way an input can be broken."""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.manifest import missing_file, open_committed
from pipeline.core.storage.store import Store
from pipeline.input import committed
from pipeline.input.committed import ShardReader, committed_dataset
from pipeline.input.dataset import discover, ranges, serial
from pipeline.input.formats.cifar_pickle import load
from pipeline.input.read_options import ReadOptions
from pipeline.input.scan import scan
from tests.campaigns.fuzz_kinds import CHUNKS, make_set
from tests.conftest import make_rows, write_binary, write_pickles
from tests.support.tiers import only

STORE = Store()


def discovered(path: Path, *, evaluation: bool = False, **options: Any) -> Any:
    return discover(STORE, str(path), run=serial, read_options=ReadOptions(**options), evaluation=evaluation)


def whole(dataset: Any) -> Any:
    blocks = list(dataset.read(0, dataset.rows))
    ids = np.concatenate([block.ids for block in blocks])
    assert ids.tolist() == list(range(dataset.rows))
    return np.concatenate([b.labels for b in blocks]), np.concatenate([b.images for b in blocks])


def checked(dataset: Any) -> Any:
    return scan(dataset, ranges(0, dataset.rows, 2), 3, serial)


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(folder: Path, columns: dict[str, Any], groups: int = 700) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / "part-0.parquet", row_group_size=groups)
    return folder


@pytest.fixture(scope="module")
def made_rows() -> Any:
    return make_rows(2500)


@pytest.fixture
def rows(made_rows: Any) -> Any:
    """Labels and images that a test may change."""
    labels, images = made_rows
    return labels.copy(), images.copy()


def layouts(tmp_path: Path, labels: Any, images: Any) -> Any:
    """The same rows in every layout that holds CIFAR-10."""
    hwc = images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    encoded = [{"bytes": png(image), "path": "x.png"} for image in hwc]
    return {
        "cifar10-binary": write_binary(tmp_path / "bin", labels, images, files=3),
        "cifar-pickle": write_pickles(tmp_path / "py", labels, images, files=3),
        "parquet": write_parquet(tmp_path / "raw", {"image": [i.tobytes() for i in images], "label": labels}),
        "parquet-png": write_parquet(tmp_path / "png", {"img": encoded, "label": labels.astype(np.int64)}),
    }


@pytest.mark.slow
def test_every_layout_holds_the_same_rows_under_the_same_ids(tmp_path: Path, rows: Any) -> None:
    fingerprints = set()
    for name, folder in layouts(tmp_path, *rows).items():
        dataset = discovered(folder)
        assert dataset.format == name.removesuffix("-png")
        labels, images = whole(dataset)
        assert np.array_equal(labels, rows[0])
        assert np.array_equal(images, rows[1])
        fingerprints.add(checked(dataset).fingerprint)
    assert len(fingerprints) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("start", "stop"), only([(833, 835)], [(0, 1), (833, 835), (100, 2400), (2499, 2500)]))
def test_any_range_of_ids_reads_like_the_whole(tmp_path: Path, rows: Any, start: Any, stop: Any) -> None:
    for folder in layouts(tmp_path, *rows).values():
        part = list(discovered(folder).read(start, stop))
        assert np.concatenate([b.ids for b in part]).tolist() == list(range(start, stop))
        assert np.array_equal(np.concatenate([b.images for b in part]), rows[1][start:stop])


def test_the_fingerprint_depends_on_pixels_and_not_on_the_cut(tmp_path: Path, rows: Any) -> None:
    """The fingerprint does not depend on the cut and notices a changed pixel."""
    labels, images = rows
    dataset = discovered(write_binary(tmp_path / "a", labels, images))
    fingerprints = {scan(dataset, [(0, 2500)], pieces, serial).fingerprint for pieces in (1, 7, 64)}
    images[1234, 77] ^= 1
    changed = checked(discovered(write_binary(tmp_path / "b", labels, images))).fingerprint
    assert len(fingerprints) == 1
    assert changed not in fingerprints
    swapped = labels.copy()
    swapped[[0, 1]] = labels[[1, 0]] if labels[0] != labels[1] else (labels[0] + 1) % 10
    images[1234, 77] ^= 1
    assert checked(discovered(write_binary(tmp_path / "c", swapped, images))).fingerprint not in {
        *fingerprints,
        changed,
    }


def test_cifar100_binary_has_coarse_labels_beside_the_fine_ones(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = np.stack([rng.integers(0, 20, 600), rng.integers(0, 100, 600)], axis=1).astype(np.uint8)
    images = rng.integers(0, 256, (600, 3072)).astype(np.uint8)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "train.bin").write_bytes(np.concatenate([labels, images], axis=1).tobytes())
    (tmp_path / "c" / "fine_label_names.txt").write_text("x")
    dataset = discovered(tmp_path / "c")
    block = next(dataset.read(0, 600))
    assert dataset.format == "cifar100-binary"
    assert np.array_equal(block.labels, labels[:, 1])
    assert np.array_equal(block.columns.coarse_labels, labels[:, 0])


def test_cifar100_pickles_have_coarse_labels_too(tmp_path: Path) -> None:
    images = np.zeros((50, 3072), np.uint8)
    batch = {b"data": images, b"fine_labels": [7] * 50, b"coarse_labels": [3] * 50}
    (tmp_path / "train").write_bytes(pickle.dumps(batch, protocol=2))
    (tmp_path / "meta").write_bytes(b"names")
    dataset = discovered(tmp_path)
    block = next(dataset.read(10, 20))
    assert dataset.layout.num_classes == 100
    assert (set(block.labels), set(block.columns.coarse_labels)) == ({7}, {3})


def test_other_image_sizes_are_declared_or_found(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (40, 1 * 8 * 9)).astype(np.uint8)
    folder = write_binary(tmp_path / "bin", np.arange(40).astype(np.uint8), small)
    dataset = discovered(folder, shape=(1, 8, 9), format="cifar10-binary")
    assert np.array_equal(whole(dataset)[1], small)
    assert checked(dataset).num_classes == 40
    grey = [{"bytes": png(image.reshape(8, 9)), "path": ""} for image in small]
    dataset = discovered(write_parquet(tmp_path / "png", {"image": grey, "label": np.zeros(40, int)}))
    assert dataset.layout.shape == (1, 8, 9)
    assert np.array_equal(whole(dataset)[1], small)


def test_official_folders_give_their_training_or_their_test_side(tmp_path: Path, rows: Any) -> None:
    folder = write_binary(tmp_path / "c", *rows)
    (folder / "test_batch.bin").write_bytes((folder / "data_batch_1.bin").read_bytes()[: 3073 * 100])
    for name in ("batches.meta.txt", "readme.html", "_SUCCESS", ".hidden"):
        (folder / name).write_text("not data")
    assert discovered(folder).rows == 2500
    assert discovered(folder, evaluation=True).rows == 100
    assert discovered(folder / "test_batch.bin").rows == 100


def test_only_names_of_test_files_make_test_files(tmp_path: Path) -> None:
    columns = {"image": [b"0" * 3072] * 4, "label": [1] * 4}
    for name in ("images", "values", "tested"):
        write_parquet(tmp_path / "c", columns)
        (tmp_path / "c" / "part-0.parquet").rename(tmp_path / "c" / f"{name}-1.parquet")
    assert discovered(tmp_path / "c").rows == 12
    write_parquet(tmp_path / "c", columns)
    (tmp_path / "c" / "part-0.parquet").rename(tmp_path / "c" / "test-00000-of-00001.parquet")
    assert discovered(tmp_path / "c").rows == 12
    assert discovered(tmp_path / "c", evaluation=True).rows == 4


def test_the_empty_part_files_that_spark_writes_are_passed_over(tmp_path: Path, rows: Any) -> None:
    folder = write_parquet(tmp_path / "c", {"image": [i.tobytes() for i in rows[1]], "label": rows[0]})
    empty = pa.table({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int32())})
    pq.write_table(empty, folder / "part-1.parquet")
    assert discovered(folder).rows == 2500
    (folder / "part-0.parquet").unlink()
    with pytest.raises(DataError, match="0 rows"):
        discovered(folder)


def test_raw_pixels_that_begin_like_a_jpeg_are_pixels(tmp_path: Path) -> None:
    raw = b"\xff\xd8\xff" + bytes(3069)
    dataset = discovered(write_parquet(tmp_path / "c", {"image": [raw] * 3, "label": [1] * 3}))
    assert whole(dataset)[1][0].tobytes() == raw


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_a_truncated_file_is_refused_with_its_last_record(tmp_path: Path, label_bytes: Any) -> None:
    """A truncated file that stands alone is told where it breaks off."""
    size = 3072 + label_bytes
    labels = np.tile(np.array([[15, 77]] if label_bytes == 2 else [[7]], np.uint8), (40, 1))
    images = np.random.default_rng(0).integers(0, 256, (40, 3072)).astype(np.uint8)
    data = np.concatenate([labels, images], axis=1).tobytes()
    (tmp_path / "train.bin").write_bytes(data[:-7])
    with pytest.raises(DataError, match=f"record 39 at offset {39 * size} has {size - 7} of {size} bytes"):
        discovered(tmp_path)


def broken_inputs(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    """name: (input, what the line must say)."""
    labels, images = make_rows(300)

    def binary(name: str, *, label: Any = None, cut: Any = 0, extra: Any = b"") -> Any:
        some = labels.copy()
        if label is not None:
            some[201] = label
        folder = write_binary(tmp_path / name, some, images)
        path = folder / "data_batch_2.bin"
        data = path.read_bytes() + extra
        path.write_bytes(data[: len(data) - cut])
        return folder

    empty = tmp_path / "empty"
    empty.mkdir()
    hollow = binary("hollow")
    (hollow / "data_batch_3.bin").write_bytes(b"")
    mixed = binary("mixed")
    write_pickles(mixed, labels, images)
    stray = binary("stray")
    (stray / "notes.txt").write_text("hello")
    nested = binary("nested")
    (nested / "inner").mkdir()
    torn = write_parquet(tmp_path / "torn", {"image": [b"0" * 3072] * 9, "label": [1] * 9})
    (torn / "part-0.parquet").write_bytes((torn / "part-0.parquet").read_bytes()[:-50])
    uneven = write_parquet(tmp_path / "uneven", {"image": [b"0" * 3072] * 8 + [b"0" * 99], "label": [1] * 9})
    null = write_parquet(tmp_path / "null", {"image": [b"0" * 3072] * 9, "label": [1, None] + [1] * 7})
    nolabel = write_parquet(tmp_path / "nolabel", {"image": [b"0" * 3072] * 9, "answer": [1] * 9})
    floats = write_parquet(tmp_path / "floats", {"image": [b"0" * 3072] * 9, "label": [0.5] * 9})
    negative = write_parquet(tmp_path / "negative", {"image": [b"0" * 3072] * 9, "label": [1] * 8 + [-4]})
    badpng = write_parquet(
        tmp_path / "badpng", {"image": [png(np.zeros((8, 8, 3), np.uint8)), b"\x89PNG broken"], "label": [1, 1]}
    )
    short = write_pickles(tmp_path / "short", labels, images)
    batch = {b"data": images[:10], b"labels": [1] * 9}
    (short / "data_batch_9").write_bytes(pickle.dumps(batch, protocol=2))
    rotten = write_parquet(tmp_path / "rotten", {"image": [b"0" * 3072] * 900, "label": [1] * 900})
    data = bytearray((rotten / "part-0.parquet").read_bytes())
    data[4:400] = bytes(396)
    (rotten / "part-0.parquet").write_bytes(data)
    struct = write_parquet(tmp_path / "struct", {"image": [{"path": "x"}] * 3, "label": [1] * 3})
    first = write_parquet(tmp_path / "first", {"image": [b"\x89PNG broken"] * 3, "label": [1] * 3})
    huge = write_pickles(tmp_path / "huge", labels, images)
    batch = {b"data": images[:2], b"labels": [1, 2**32 + 3]}
    (huge / "data_batch_9").write_bytes(pickle.dumps(batch, protocol=2))
    link = tmp_path / "link"
    link.mkdir()
    (link / "data_batch_1.bin").symlink_to("gone")
    return {
        "a damaged page": (rotten, "part-0.parquet is damaged"),
        "a struct without bytes": (struct, "part-0.parquet: column image is a struct of path; an image is binary"),
        "a broken first PNG": (first, "part-0.parquet, row 0: the image cannot be decoded"),
        "a label beyond 32 bits": (huge, "labels holds 4294967299: number the classes from 0"),
        "a path through a file": (torn / "part-0.parquet" / "x", "does not exist"),
        "a dangling link": (link, "data_batch_1.bin"),
        "a missing path": (tmp_path / "nowhere", "nowhere does not exist"),
        "an empty folder": (empty, "holds no data files"),
        "an empty file": (hollow, "data_batch_3.bin"),
        "a truncated file": (
            binary("truncated", cut=5),
            "data_batch_2.bin: truncated or wrong record size: record 149 at offset 457877 has 3068 of 3073",
        ),
        "a wrong record size": (binary("wrong", extra=b"x" * 7), "record 150 at offset 460950 has 7 of 3073"),
        "a label out of range": (
            binary("label", label=11),
            "data_batch_2.bin, offset 156723 (record 51): label 11 is not in 0..9",
        ),
        "mixed layouts": (mixed, "mixed layouts"),
        "a stray file": (stray, "notes.txt"),
        "a folder inside": (nested, "inner is a folder"),
        "a torn Parquet file": (torn, "part-0.parquet is not a whole Parquet file"),
        "images of two sizes": (uneven, "row 8: the image has 99 bytes, not 3072"),
        "a null label": (null, "row 1: label is null"),
        "no label column": (
            nolabel,
            "has no labels: a table has them in a column label, labels, fine_label",
        ),
        "labels that are fractions": (floats, "label is double, not whole numbers"),
        "a negative label": (negative, "row 8: label -4"),
        "a broken PNG": (badpng, "row 1: the image cannot be decoded"),
        "too few labels in a pickle": (short, "labels is not a list of 10 whole numbers"),
    }


CASES = [
    "a damaged page", "a struct without bytes", "a broken first PNG", "a label beyond 32 bits", "a path through a file",
    "a dangling link",
    "a missing path", "an empty folder", "an empty file", "a truncated file", "a wrong record size",
    "a label out of range", "mixed layouts", "a stray file", "a folder inside", "a torn Parquet file",
    "images of two sizes", "a null label", "no label column", "labels that are fractions", "a negative label",
    "a broken PNG", "too few labels in a pickle",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_broken_input_is_one_line_that_names_the_place(tmp_path: Path, case: Any) -> None:
    path, expected = broken_inputs(tmp_path)[case]
    with pytest.raises(DataError) as caught:
        checked(discovered(path))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_input_is_a_data_error(tmp_path: Path, rows: Any) -> None:
    folder = write_binary(tmp_path / "c", *rows)
    (folder / "data_batch_1.bin").chmod(0)
    with pytest.raises(DataError, match="permission denied"):
        discovered(folder)


def test_a_forced_layout_must_be_a_known_one(tmp_path: Path, rows: Any) -> None:
    with pytest.raises(UsageError, match="choose one of"):
        discovered(write_binary(tmp_path / "c", *rows), format="cifar11")


class Evil:
    """What an attacker pickles: loading it calls os.system."""

    def __init__(self, command: Any) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_hostile_pickle_does_not_run(tmp_path: Path, protocol: int) -> None:
    proof = tmp_path / "ran"
    data = pickle.dumps({b"data": Evil(f"touch {proof}"), b"labels": [1]}, protocol=protocol)
    with pytest.raises(DataError, match=r"system; it was not loaded"):
        load(data, "x")
    assert not proof.exists()


@pytest.mark.parametrize(
    "payload",
    [
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85U\x01b\x87R.",
        b"\x80\x02cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R.",
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x09\x00\x00\x00zlib_codec\x86R.",
        b"\x80\x02cbuiltins\neval\nX\x03\x00\x00\x001+1\x85R.",
        b"\x80\x02cnumpy\nload\nX\x01\x00\x00\x00x\x85R.",
        b"\x80\x02]q\x00.",
        b"\x80\x02}.",
        b"\x80",
        # uninitialised memory as images, and four gigabytes of it
        b"\x80\x02}X\x04\x00\x00\x00datacnumpy\nndarray\nK\x02M\x00\x0c\x86cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85R\x86Rs.",
        b"\x80\x02cnumpy\nndarray\n\x8a\x05\x00\x00\x00\x00\x01\x85\x85R.",
        # a memo of gigabytes, by the number of one entry
        b"\x80\x02]r\xff\xff\xff\x0f.",
        b"]p268435455\n.",
        # an instance made without a call, and an object's state
        b"\x80\x02cnumpy\nndarray\nK\x05\x85\x85\x81.",
        b"\x80\x02}cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85R(K\x03X\x01\x00\x00\x00|NNNK\x7fK\x01K?tb.",
    ],
)
def test_pickles_that_reach_for_more_than_cifar_holds_are_refused(payload: Any) -> None:
    with pytest.raises(DataError):
        load(payload, "x")


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"\x80\x02]r\xff\xff\xff\x0f.", "entry 268435455 of the memo of 9 bytes"),
        (b"]p268435455\n.", "entry 268435455 of the memo of 13 bytes"),
        (b"\x80\x02cnumpy\nndarray\nK\x05\x85\x85\x81.", "it holds the opcode NEWOBJ"),
    ],
)
def test_a_pickle_is_refused_before_any_of_it_is_executed(payload: bytes, words: str) -> None:
    """Its end is not that of a CIFAR pickle either, but by then the memo would hold gigabytes."""
    with pytest.raises(DataError, match=f"x is not a CIFAR pickle: {words}; it was not loaded"):
        load(payload, "x")


def test_pickles_of_every_protocol_and_of_python_two_are_read() -> None:
    images = np.arange(2 * 3072, dtype=np.uint64).astype(np.uint8).reshape(2, 3072)
    for protocol in range(6):
        batch = load(pickle.dumps({b"data": images, b"labels": [1, 2], "filenames": ["a"]}, protocol=protocol), "x")
        assert np.array_equal(batch[b"data"], images)


def test_real_cifar10_has_its_known_means(cifar10: Path) -> None:
    result = scan(discovered(cifar10), [(0, 50_000)], 2, serial)
    assert result.rows == 50_000
    assert result.label_counts.tolist() == [[5000] * 10]
    assert result.channel_means(1024) == pytest.approx([125.307, 122.950, 113.865], abs=1e-3)


def test_a_file_that_is_still_being_copied_is_refused(tmp_path: Path) -> None:
    """hdfs dfs -put writes under such a name: what is there is not all there will be."""
    labels, images = make_rows(20, seed=1)
    write_binary(tmp_path / "d", labels, images)
    (tmp_path / "d" / "data_batch_3.bin._COPYING_").write_bytes(b"x")
    with pytest.raises(
        DataError, match=r"data_batch_3.bin._COPYING_ is being copied there; wait until the copy is complete"
    ):
        discover(STORE, str(tmp_path / "d"), run=serial)


def test_the_rows_of_a_set_need_none_of_its_models(tmp_path: Path) -> None:
    """Each append of a stream deletes a model of the version before."""
    make_set(tmp_path)
    shards = open_committed(STORE, str(tmp_path))
    shards = replace(shards, manifest=replace(shards.manifest, model=["_model/v1-0123456789ab/buckets/arrays.npz"]))
    assert missing_file(shards)
    assert committed_dataset(shards).rows == shards.manifest.rows


def test_a_window_of_a_set_holds_a_bounded_size_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_set(tmp_path)
    dataset = committed_dataset(open_committed(STORE, str(tmp_path)))
    windows = []

    def record_window(self: ShardReader, begin: int, end: int, images: bool) -> pa.Table:
        windows.append((images, end - begin))
        return owners(self, begin, end, images)

    owners = ShardReader.owners
    monkeypatch.setattr(ShardReader, "owners", record_window)
    monkeypatch.setattr(committed, "WINDOW_BYTES", 7 * dataset.record_bytes)
    for images in (True, False):
        ids = [block.ids for block in dataset.read(0, dataset.rows, images=images)]
        assert np.array_equal(np.concatenate(ids), np.arange(dataset.rows))
    assert max(rows for images, rows in windows if images) == 7
    assert max(rows for images, rows in windows if not images) == max(high - low for low, high in CHUNKS)
