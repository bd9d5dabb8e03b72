"""Slices of checkpoints as safetensors files, of which any range can be read from any store.

The format: 8 bytes with the length of the header, the header in JSON, and the arrays one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import DataError
from pipeline.core.json_values import fits, parse_object
from trainer.home.place import Place, read_range, remembered

Float32s = npt.NDArray[np.float32]
FIRST_BYTES = 4096  # of a file, which the first request reads
MOST_BYTES = 100_000_000  # of a header, by the format
LENGTH_BYTES = 8
ARRAYS = ("values", "momentum")


class SliceHeader(NamedTuple):
    """The header of a slice.

    Attributes:
        about: the metadata, text by name.
        arrays: (first byte in the file, number of float32 elements) of "values" and "momentum".
    """

    about: Mapping[str, str]
    arrays: Mapping[str, tuple[int, int]]


def json_header(place: Place) -> tuple[dict[str, Any], int]:
    """Return the JSON header of a safetensors file, and the position of its first array (bytes).

    Costs one read, two for a long header. Raises FileNotFoundError and ValueError."""
    data = read_range(place, 0, FIRST_BYTES)
    begin = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    if FIRST_BYTES < begin <= MOST_BYTES:
        data = read_range(place, 0, begin)
    if not LENGTH_BYTES < begin <= len(data):
        raise ValueError(f"a header of {begin} bytes")
    return parse_object(data[LENGTH_BYTES:begin]), begin


def read_header(place: Place, size: int) -> SliceHeader:
    """Read the header of a slice of ``size`` bytes. Raises ValueError or KeyError if it is malformed or truncated."""
    header, begin = json_header(place)
    # A damaged header can be valid JSON of any type, which would raise other errors in the lines below.
    if not fits(header, dict[str, dict[str, Any]]):
        raise ValueError("a header of other values than arrays")
    if not all(fits(header[name]["shape"] + header[name]["data_offsets"], list[int]) for name in ARRAYS):
        raise ValueError("arrays whose places are no whole numbers")
    if not fits(header["__metadata__"], dict[str, str]):
        raise ValueError("metadata that is no text")
    arrays = {}
    at = 0
    # The arrays must fill the file without gaps. Its size then proves that nothing was cut off, and no element is read.
    for name in sorted(ARRAYS, key=lambda name: list(header[name]["data_offsets"])):
        (elements,), kind, (first, last) = (header[name][key] for key in ("shape", "dtype", "data_offsets"))
        if kind != "F32" or elements < 0 or first != at or last - first != 4 * elements:
            raise ValueError(f"{name} of {elements} {kind} in bytes {first} to {last}")
        arrays[name] = (begin + first, elements)
        at = last
    if begin + at != size:
        raise ValueError(f"{size} bytes, not {begin + at}")
    return SliceHeader(header["__metadata__"], arrays)


header_of = remembered(read_header)


@dataclass(frozen=True)
class StoredSlice:
    """A server's file of a checkpoint, whose header fits its size. Elements are read only on request.

    Attributes:
        place: the file.
        begin, end: the range of the flat vector [total] that it holds.
        total: length P + Q of the flat vector.
        num_parameters: parameters in the range, which have momentum; the rest are BatchNorm's statistics.
        header: the positions of the arrays.
        slots: elements of momentum per parameter.
    """

    place: Place
    begin: int
    end: int
    total: int
    num_parameters: int
    header: SliceHeader
    slots: int = 1

    def values(self, begin: int, end: int) -> Float32s:
        """Return the values of this slice in [begin, end) of the flat vector. Raises DataError and OSError."""
        return self._cut("values", begin, min(end, self.end))

    def momentum(self, begin: int, end: int) -> Float32s:
        """Return the momentum in the same range, ``slots`` elements per parameter. Statistics, which follow, have none."""
        return self._cut("momentum", begin, min(end, self.begin + self.num_parameters), self.slots)

    def _cut(self, name: str, begin: int, end: int, slots: int = 1) -> Float32s:
        """Read the part of an array in [begin, end) of the flat vector, float32; empty if the slice has nothing there.

        ``end`` must not be beyond the array. Raises DataError if the file is gone or shorter than its header says."""
        first = max(begin, self.begin) - self.begin
        last = end - self.begin
        if first >= last:
            return np.empty(0, np.float32)
        at = self.header.arrays[name][0]
        try:
            data = read_range(self.place, at + 4 * slots * first, 4 * slots * (last - first))
        except FileNotFoundError:
            raise DataError(f"{self.place} is missing: the checkpoint was discarded") from None
        if len(data) != 4 * slots * (last - first):
            raise broken(self.place, "was cut off while it was read")
        return np.frombuffer(data, "<f4").astype(np.float32, copy=False)


def broken(place: Place, fact: str) -> DataError:
    """Return the error for a damaged file of a checkpoint. fact: what is wrong with it."""
    return DataError(f"{place} {fact}; delete {place.parent} to resume from an older checkpoint")


def slots_in(header: SliceHeader) -> int:
    """Return the elements of momentum per parameter in a slice. Raises ValueError."""
    slots = int(header.about.get("slots", "1"))
    if slots < 1 or header.arrays["momentum"][1] % slots:
        raise ValueError(f"{header.arrays['momentum'][1]} elements of momentum, {slots} per parameter")
    return slots


def numbers_in(header: SliceHeader) -> dict[str, Any]:
    """Return the numbers in the metadata of a slice. Raises ValueError or KeyError."""
    return {name: int(header.about[name]) for name in ("version", "generation", "begin", "end", "total")}
