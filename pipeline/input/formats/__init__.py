"""The layouts an input may have: one file each, and one dict that names them."""

from __future__ import annotations

from pipeline.errors import DataError
from pipeline.input.formats.base import Columns, DataFile, Format
from pipeline.input.formats.cifar_binary import Cifar10Binary, Cifar100Binary, FixedRecords
from pipeline.input.formats.cifar_pickle import CifarPickle
from pipeline.input.formats.parquet import ParquetImages
from pipeline.storage.files import FileInfo
from pipeline.storage.store import Store

FORMATS: dict[str, Format] = {
    "cifar10-binary": Cifar10Binary(),
    "cifar100-binary": Cifar100Binary(),
    "cifar-pickle": CifarPickle(),
    "parquet": ParquetImages(),
}

__all__ = ["FORMATS", "Columns", "DataFile", "Format", "recognise"]


def recognise(store: Store, files: list[FileInfo], shape: tuple[int, int, int] | None) -> str:
    """The one layout that all files have, from their first bytes, sizes and names. Raises DataError where they differ
    or none fits."""
    votes = {file.path: _vote(store, file, shape) for file in files}
    kinds = {kind for kind in votes.values() if kind}
    unknown = [path for path, kind in votes.items() if not kind]
    if len(kinds) == 1 and not unknown:
        return kinds.pop()
    if len(kinds) == 1 and kinds <= {"cifar10-binary", "cifar100-binary"}:
        return kinds.pop()  # the survey then says where the odd file breaks off
    if len(kinds) > 1:
        examples = {kind: path for path, kind in votes.items() if kind}
        listed = "; ".join(f"{path} is {kind}" for kind, path in sorted(examples.items()))
        raise DataError(f"mixed layouts in one input: {listed}; keep one layout a folder")
    if not kinds:
        head = store.read_range(unknown[0], 0, 1 << 18)
        for name, kind in FORMATS.items():
            if isinstance(kind, FixedRecords) and kind.resembles(head, shape):
                return name  # the survey says where it breaks off
    size = store.info(unknown[0]).bytes
    raise DataError(
        f"{unknown[0]} ({size} bytes) is not a known layout: neither Parquet nor a CIFAR pickle, nor whole CIFAR"
        f" records of 3073 or 3074 bytes; declare it with --format and --image-shape, or remove it"
    )


def _vote(store: Store, file: FileInfo, shape: tuple[int, int, int] | None) -> str | None:
    try:
        head = store.read_range(file.path, 0, 1 << 18)
    except PermissionError:
        raise DataError(f"{file.path} cannot be read: permission denied") from None
    except FileNotFoundError:
        raise DataError(f"{file.path} is listed but not there: a dangling link, or removed just now") from None
    for name, kind in FORMATS.items():
        if kind.recognises(file, head, shape):
            return name
    return None
