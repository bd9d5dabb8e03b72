"""Arrays as .npz files, read defensively, because files can be foreign or damaged.

Pickles are refused, and reading never takes more memory than the size of the file."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]
HEADERS: dict[tuple[int, int], Any] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def to_bytes(**arrays: npt.NDArray[np.generic]) -> bytes:
    """Return arrays as an .npz file. numpy writes no timestamp, so equal arrays give equal bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Arrays:
    """Return the arrays of a file that ``to_bytes`` wrote, by name. Raises ValueError for any other file."""
    try:
        with ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            if any(member.compress_type != ZIP_STORED for member in members):
                raise ValueError("it is compressed")
            if sum(member.file_size for member in members) > len(data):
                raise ValueError("it holds more bytes than it has")
            return {member.filename.removesuffix(".npy"): _array(archive.read(member)) for member in members}
    except ValueError:
        raise
    except Exception as error:  # zipfile and numpy raise many kinds for a broken file
        raise ValueError(f"it is no .npz file: {str(error) or type(error).__name__}") from None


def _array(data: bytes) -> npt.NDArray[Any]:
    """Return the array of an .npy file. Raises ValueError for pickled objects, and for another size than its header
    tells."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
    if version not in HEADERS:
        raise ValueError(f"an array of version {version}")
    shape, in_fortran_order, dtype = HEADERS[version](file)
    if dtype.hasobject:
        raise ValueError("it holds pickled objects")
    body = data[file.tell() :]
    if any(side < 0 for side in shape) or math.prod(shape) * dtype.itemsize != len(body):
        raise ValueError(f"{len(body)} bytes are no {dtype} array of shape {shape}")
    return np.frombuffer(body, dtype).reshape(shape, order="F" if in_fortran_order else "C").copy()


def check_arrays(arrays: Mapping[str, npt.NDArray[Any]], **forms: str) -> None:
    """Raise ValueError if arrays have other names, types or shapes.

    forms: for each name a type and the sides of the shape, such as ``f8 d k``. A number is a fixed length, equal
    letters are equal lengths, and U is text of any length."""
    if arrays.keys() != forms.keys():
        raise ValueError(f"it holds the arrays {', '.join(sorted(arrays))}, not {', '.join(sorted(forms))}")
    lengths: dict[str, int] = {}
    for name, form in forms.items():
        kind, *sides = form.split()
        array = arrays[name]
        dtype = array.dtype.kind if array.dtype.kind == "U" else f"{array.dtype.kind}{array.dtype.itemsize}"
        fitting = dtype == kind and array.ndim == len(sides)
        for side, length in zip(sides, array.shape, strict=False):
            fitting &= lengths.setdefault(side, int(side) if side.isdigit() else length) == length
        if not fitting:
            raise ValueError(f"{name} is {dtype} of shape {array.shape}, not {form}")
