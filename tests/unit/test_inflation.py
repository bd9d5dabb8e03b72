"""Compressed inputs whose content is far larger than the files ("zip bombs") are refused before it is in memory."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from pipeline.core.errors import DataError
from pipeline.core.storage.store import Store
from pipeline.input.dataset import discover, serial
from pipeline.input.formats import inflation
from pipeline.input.read_options import ReadOptions
from tests.unit.test_array_files import IMAGES, idx, npy

LIMIT = 16 << 20  # bytes; a quarter of the product's, which takes four times as long to write and to trace
BLANK = np.zeros(((LIMIT >> 10) + 1, 32, 32), np.uint8)
UNLABELLED = ReadOptions(unlabelled=True)


@pytest.fixture(autouse=True)
def _low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflation, "ANY_BYTES", LIMIT)


def read(path: Path, options: ReadOptions) -> int:
    """Return the number of rows of a file, all of which are read."""
    dataset = discover(Store(), str(path), run=serial, read_options=options)
    return sum(len(block.images) for block in dataset.read(0, dataset.rows))


def check_refused(path: Path, words: str, options: ReadOptions = UNLABELLED) -> None:
    """Check that a file is refused with one line, and that reading it takes little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=words) as error:
            read(path, options)
        assert tracemalloc.get_traced_memory()[1] < LIMIT + (4 << 20)
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.npy.gz", "a-images-idx3-ubyte.gz", "a.npz", "a.mat"])
def test_blank_images_beyond_any_ratio_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.endswith(".npz"):
        np.savez_compressed(path, images=BLANK)
    elif name.endswith(".mat"):
        savemat(path, {"X": BLANK}, do_compression=True)
    else:
        path.write_bytes(gzip.compress(npy(BLANK) if "npy" in name else idx(BLANK)))
    options = ReadOptions(unlabelled=True, shape=(1, 32, 32))
    check_refused(
        path, rf"would inflate to more than {LIMIT:,} bytes, and to over 100 times its size; store it", options
    )


def test_less_than_the_limit_is_read_at_any_ratio(tmp_path: Path) -> None:
    (tmp_path / "a.npy.gz").write_bytes(gzip.compress(npy(BLANK[:5000])))
    assert read(tmp_path / "a.npy.gz", UNLABELLED) == 5000


def test_an_array_that_inflates_beyond_its_size_is_refused(tmp_path: Path) -> None:
    """The directory of the archive and the header of the array agree on nine images."""
    small = npy(BLANK[:9])
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", small + BLANK.tobytes())
    data = (tmp_path / "a.npz").read_bytes()
    size = len(small) + BLANK.nbytes
    (tmp_path / "a.npz").write_bytes(data.replace(struct.pack("<I", size), struct.pack("<I", len(small))))
    check_refused(tmp_path / "a.npz", r"a.npz, array images is damaged: Bad CRC-32")


def test_arrays_by_other_compressors_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("images.npy", npy(IMAGES))
    check_refused(tmp_path / "a.npz", r"array images is damaged: it is compressed by another method than numpy's")


@pytest.mark.parametrize("field", ["name", "pixels"])
def test_a_matlab_variable_that_inflates_is_refused(field: str, tmp_path: Path) -> None:
    """Its header tells of four pixels, so that only the compressed bytes tell of more."""
    blank = BLANK.tobytes()
    name, pixels = (blank, b"abcd") if field == "name" else (b"X", blank)
    parts = ((6, struct.pack("<II", 9, 0)), (5, struct.pack("<ii", 2, 2)), (1, name), (2, pixels))
    body = b"".join(struct.pack("<II", kind, len(part)) + part + bytes(-len(part) % 8) for kind, part in parts)
    packed = zlib.compress(struct.pack("<II", 14, len(body)) + body)
    header = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<H", 0x0100) + b"IM"
    (tmp_path / "a.mat").write_bytes(header + struct.pack("<II", 15, len(packed)) + packed)
    check_refused(tmp_path / "a.mat", r"a.mat is damaged: .* would inflate to more than")


@pytest.mark.parametrize("place", ["a file", "a header", "the end"])
def test_a_tar_archive_that_inflates_is_refused(place: str, tmp_path: Path) -> None:
    blank = BLANK.tobytes()
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        info = tarfile.TarInfo("0.cls")
        if place == "a file":
            info.size = len(blank)
        if place == "a header":
            info.pax_headers = {"comment": blank.decode()}
        archive.addfile(info, io.BytesIO(blank))
    data = target.getvalue() + blank * (place == "the end")
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(data))
    check_refused(tmp_path / "a.tar.gz", r"a.tar.gz is a damaged archive: .* would inflate to more than")
