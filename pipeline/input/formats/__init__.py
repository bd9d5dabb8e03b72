"""The input formats: one file each, and one dict of them by name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from pipeline.core.errors import DataError
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.formats.array_files import Idx, Npy
from pipeline.input.formats.base import Columns, DataFile, Format
from pipeline.input.formats.cifar_archive import CifarArchive
from pipeline.input.formats.cifar_binary import Cifar10Binary, Cifar100Binary
from pipeline.input.formats.cifar_pickle import CifarPickle
from pipeline.input.formats.image_folder import ImageFolder
from pipeline.input.formats.mat import Mat
from pipeline.input.formats.npz import Npz
from pipeline.input.formats.tables.arrow import ArrowImages
from pipeline.input.formats.tables.parquet import ParquetImages
from pipeline.input.formats.tar import Tar
from pipeline.input.formats.tfrecord import TFRecord

# The order in which they are tried: a file of CIFAR records is known by its length alone, so these are last.
FORMATS: dict[str, Format] = {
    kind.name: kind
    for kind in (
        ImageFolder(),
        ParquetImages(),
        ArrowImages(),
        CifarArchive(),
        Tar(),
        TFRecord(),
        Npz(),
        Npy(),
        Mat(),
        CifarPickle(),
        Idx(),
        Cifar10Binary(),
        Cifar100Binary(),
    )
}
HEAD_BYTES = 1 << 18  # bytes of a file that are read to recognise its format
OPENED_AT_ONCE = 16

__all__ = ["FORMATS", "Columns", "DataFile", "Format", "recognise"]


def recognise(store: Store, files: list[FileInfo], shape: tuple[int, int, int] | None) -> str:
    """Return the name of the format of all files, from their first bytes, sizes and names.

    Args:
        store: the file system.
        files: the data files.
        shape: the declared shape of raw images, or None.

    Raises:
        DataError: the files differ, or no format fits.
    """
    with ThreadPoolExecutor(OPENED_AT_ONCE) as pool:  # a remote file system takes milliseconds per file
        format_names = pool.map(lambda file: _vote(store, file, shape), files)
        votes = {file.path: name for file, name in zip(files, format_names, strict=True)}
    names = {name for name in votes.values() if name}
    unknown = [path for path, name in votes.items() if not name]
    # A format that locates damage accepts files that no format recognises: its survey reports where they are truncated.
    if len(names) == 1 and (not unknown or FORMATS[next(iter(names))].locates_damage):
        return names.pop()
    if len(names) > 1:
        examples = {name: path for path, name in votes.items() if name}
        examples_text = "; ".join(f"{path} is {name}" for name, path in sorted(examples.items()))
        raise DataError(f"mixed layouts in one input: {examples_text}; keep one layout per folder")
    if not names:
        head = store.read_range(unknown[0], 0, HEAD_BYTES)
        for name, kind in FORMATS.items():
            if kind.resembles(head, shape):
                return name
    raise DataError(
        f"{unknown[0]} ({store.info(unknown[0]).bytes} bytes) has no format that `sharding formats` lists; declare it with"
        " --format and --image-shape, or remove it"
    )


def _vote(store: Store, file: FileInfo, shape: tuple[int, int, int] | None) -> str | None:
    """Return the name of the first format that recognises a file, or None. Raises DataError if it cannot be read."""
    try:
        head = b"" if file.is_dir else store.read_range(file.path, 0, HEAD_BYTES)
    except PermissionError:
        raise DataError(f"{file.path} cannot be read: permission denied") from None
    except FileNotFoundError:
        raise DataError(
            f"{file.path} is listed but does not exist: a dangling link, or a file that was just removed"
        ) from None
    for name, kind in FORMATS.items():
        if kind.recognises(file, head, shape):
            return name
    return None
