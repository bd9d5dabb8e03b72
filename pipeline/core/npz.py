"""Arrays as .npz files, read defensively, because files can be foreign or damaged.

Pickles are refused, and reading never takes more memory than the size of the file."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import IO, Any, Literal, NamedTuple
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]
STRAY = "allow_pickle"  # numpy before 2.2 stored this argument of savez as an array
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
                raise ValueError("its arrays claim more bytes than the file has")
            arrays = {member.filename.removesuffix(".npy"): read_array(archive.read(member)) for member in members}
            arrays.pop(STRAY, None)
            return arrays
    except ValueError:
        raise
    except Exception as error:  # zipfile and numpy raise many kinds for a broken file
        raise ValueError(f"it is no .npz file: {str(error) or type(error).__name__}") from None


class ArrayHeader(NamedTuple):
    """The header of an array."""

    shape: tuple[int, ...]
    in_fortran_order: bool
    dtype: np.dtype[Any]


def read_header(file: IO[bytes], length: int | None) -> ArrayHeader:
    """Read the header of an .npy file, up to its first number. length: of the whole file, in bytes; None if unknown.

    Raises ValueError for pickled objects, and for another length than the header tells."""
    version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
    if version not in HEADERS:
        raise ValueError(f"an array of version {version}")
    header = ArrayHeader(*HEADERS[version](file))
    if header.dtype.hasobject:
        raise ValueError("it holds pickled objects")
    size = math.prod(header.shape) * header.dtype.itemsize
    body = size if length is None else length - file.tell()
    # Before anything is allocated: a header can ask for any size.
    if any(side < 0 for side in header.shape) or size != body:
        raise ValueError(f"{body} bytes are no {header.dtype} array of shape {header.shape}")
    return header


def read_array(data: bytes) -> npt.NDArray[Any]:
    """Return the array of an .npy file. Raises ValueError as ``read_header``."""
    file = io.BytesIO(data)
    header = read_header(file, len(data))
    order: Literal["F", "C"] = "F" if header.in_fortran_order else "C"
    return np.frombuffer(data[file.tell() :], header.dtype).reshape(header.shape, order=order).copy()


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
