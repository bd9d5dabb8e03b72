"""CIFAR's python format: a pickled dict of a uint8 matrix and label lists, read by a restricted unpickler.

A pickle can name any function to be called on loading. Here only the few names that CIFAR files need are resolved, each
to a guarded replacement; everything else is refused before it runs."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import CIFAR_SHAPE, Layout
from pipeline.core.shardset.schema import no_labels, words_of
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.formats.base import Columns, DataFile, block_spans, check_label_range
from pipeline.input.formats.cifar_columns import COARSE, CifarColumns
from pipeline.input.read_options import ReadOptions

_reconstruct: Any = np.empty(0).__reduce__()[0]  # numpy's own function, whose module depends on the version


# The replacement of numpy.ndarray: the class itself can be called with any shape, and returns uninitialised memory.
_NDARRAY = object()


def _empty_array(kind: object, shape: tuple[int, ...], typecode: bytes) -> Any:
    """Return numpy's array shell, which is always empty in valid pickles; a huge shape is a memory bomb."""
    if kind is not _NDARRAY or tuple(shape) != (0,):
        raise pickle.UnpicklingError("an array shell that is not empty")
    return _reconstruct(np.ndarray, (0,), b"b")


def _plain_dtype(code: Any, *flags: Any) -> np.dtype[Any]:
    """Return a dtype of numbers. Raises UnpicklingError for objects and structured types."""
    dtype = np.dtype(code if isinstance(code, str) else code.decode("ascii"))
    if dtype.kind not in "iub":
        raise pickle.UnpicklingError(f"an array of {dtype}")
    return dtype


def _from_buffer(data: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> Any:
    """Return numpy's array of pickle protocol 5, which is exactly as large as its bytes."""
    return np.frombuffer(bytes(data), dtype).reshape(shape, order="F" if order == "F" else "C")


def _latin1(text: str, encoding: str) -> bytes:
    """Return the bytes that a pickle holds as Latin-1 text; the replacement for ``_codecs.encode``.

    Raises UnpicklingError for another encoding."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"an encoding {encoding!r}")
    return text.encode("latin1")


ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy._core.multiarray", "_reconstruct"): _empty_array,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _plain_dtype,
    ("_codecs", "encode"): _latin1,
}


MOST_NAMES = 1 << 20  # bytes of a file of class names
MEMO = {"PUT", "BINPUT", "LONG_BINPUT"}
# Opcodes that make instances without the calls above, or that refer to objects outside of the pickle.
REFUSED = {"INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4"}


def _refuse_opcodes(data: bytes) -> None:
    """Raise UnpicklingError for opcodes that CIFAR files do not need, before any opcode is executed.

    A memo entry with a huge number would make the unpickler allocate a table of that size."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in REFUSED:
            raise pickle.UnpicklingError(f"it holds the opcode {opcode.name}")
        if opcode.name in MEMO and isinstance(argument, int) and argument >= len(data):
            raise pickle.UnpicklingError(f"entry {argument} of the memo of {len(data)} bytes")


class CifarUnpickler(pickle.Unpickler):
    """An unpickler of dicts, lists, strings, numbers and integer arrays, which refuses every other name."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        try:
            return ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None


def _unpickle(data: bytes, path: str) -> dict[bytes, Any]:
    """Return the dict of a pickle with bytes keys. Raises DataError for any other pickle, including hostile ones."""
    try:
        _refuse_opcodes(data)
        batch = CifarUnpickler(data).load()
    except Exception as error:  # a broken pickle raises almost anything
        words = words_of(error) or type(error).__name__
        raise DataError(f"{path} is not a CIFAR pickle: {words}; it was not loaded") from None
    if not isinstance(batch, dict):
        raise DataError(f"{path} is not a CIFAR pickle: it holds a {type(batch).__name__}, not a dict")
    return {key.encode() if isinstance(key, str) else key: value for key, value in batch.items()}


def names_of(data: bytes, name: str, path: str, coarse: bool = False) -> tuple[str, ...]:
    """Return the names of the classes from a file of an official archive, () if it has none. Raises DataError.

    Args:
        data: the file.
        name: its name; .txt has a name per line, others are pickles.
        path: its path or archive, for error lines.
        coarse: return the names of the coarse classes, if it is a pickle.
    """
    if name.endswith(".txt"):
        names: Any = data.split()
    else:
        values = _unpickle(data, f"{path}, file {name}")
        fine = values.get(b"fine_label_names", values.get(b"label_names"))
        names = values.get(b"coarse_label_names") if coarse else fine
    if not isinstance(names, list) or not all(isinstance(each, str | bytes) for each in names):
        return ()
    return tuple(each if isinstance(each, str) else each.decode("latin1") for each in names)


def read_names(store: Store, folder: str, files: tuple[str, ...], *, coarse: bool = False) -> tuple[str, ...]:
    """Return the names of the classes from the first of some files in a folder that exists; () if none can be read.

    coarse: return the names of the coarse classes, of files that have both."""
    for name in files:
        path = f"{folder}/{name}"
        # The names are optional, so a damaged file of them is ignored.
        with suppress(OSError, DataError):
            if store.info(path).bytes <= MOST_NAMES:
                return names_of(store.read(path), name, path, coarse)
    return ()


def columns_of(data: bytes, place: str) -> Columns:
    """Return the rows of a batch. Raises DataError. place: the file, for error lines."""
    batch = load(data, place)
    rows = len(batch[b"data"])
    key = b"fine_labels" if b"fine_labels" in batch else b"labels"
    if key not in batch:
        raise DataError(f"{place} has no labels")
    coarse = _labels(batch, b"coarse_labels", place, rows) if b"coarse_labels" in batch else None
    return Columns(_labels(batch, key, place, rows), batch[b"data"], coarse)


def load(data: bytes, path: str) -> dict[bytes, Any]:
    """Return the batch as a dict with bytes keys.

    Raises DataError for anything but a CIFAR pickle, including hostile ones."""
    batch = _unpickle(data, path)
    images = batch.get(b"data")
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 2:
        raise DataError(f"{path} has no b'data' matrix of uint8 [rows, pixels]; it is not a CIFAR batch")
    return batch


def _labels(batch: dict[bytes, Any], key: bytes, path: str, rows: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the labels under a key of the batch, int32 [rows]. Raises DataError if they are invalid."""
    values = batch[key]
    try:
        labels = np.asarray(values)
        if labels.dtype.kind not in "iu" or labels.shape != (rows,):
            raise ValueError
    except ValueError:
        raise DataError(f"{path}: {key.decode()} is not a list of {rows} whole numbers, one per row of data") from None
    check_label_range(labels, f"{path}: {key.decode()}")
    return labels.astype(np.int32)


class CifarPickle(CifarColumns):
    """The format of one pickle per file, which is read whole by tasks, never by the driver."""

    name: ClassVar[str] = "cifar-pickle"
    summary: ClassVar[str] = "a CIFAR pickle"
    labels_in: ClassVar[str] = "a pickle has them in labels or fine_labels"
    opens: ClassVar[bool] = True

    def recognises(self, file: FileInfo, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        return (len(head) > 1 and head[0] == 0x80 and head[1] <= 5) or head[:4] in (b"(dp0", b"(dp1")

    def names_beside(self, store: Store, folder: str, options: ReadOptions) -> tuple[str, ...]:
        return read_names(store, folder, ("batches.meta", "meta"), coarse=options.label_column == COARSE)

    def survey_rows(self, store: Store, file: FileInfo, options: ReadOptions) -> tuple[DataFile, Layout]:
        """Return the rows and layout of one file, which is loaded whole. Raises DataError."""
        batch = load(store.read(file.path), file.path)
        rows, pixels = batch[b"data"].shape
        shape = options.shape or CIFAR_SHAPE
        if pixels != int(np.prod(shape)):
            size = "x".join(map(str, shape))
            raise DataError(f"{file.path}: rows of {pixels} pixels are not {size} images; declare --image-shape")
        if b"fine_labels" in batch:
            layout = Layout(shape, 100, 20 if b"coarse_labels" in batch else None)
        elif b"labels" in batch:
            layout = Layout(shape, 10)
        else:
            layout = Layout(shape, labelled=False)
        # A pickle can only be loaded whole; decode_rows keeps its rows, so that later passes need not load it.
        return DataFile(file.path, file.bytes, file.modified_ms, rows, decode_rows=rows, change=file.change), layout

    def read_rows(
        self, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
    ) -> Iterator[Columns]:
        """Yield records start <= r < stop of a file, which is loaded whole. Raises DataError."""
        batch = load(store.read(file.path), file.path)
        data = batch[b"data"]
        if len(data) != file.rows:
            raise DataError(f"{file.path} had {file.rows} rows and now has {len(data)}: it changed while it was read")
        key = b"fine_labels" if b"fine_labels" in batch else b"labels"
        labels = _labels(batch, key, file.path, len(data)) if layout.labelled else no_labels(len(data))
        coarse = _labels(batch, b"coarse_labels", file.path, len(data)) if layout.coarse else None
        for span in block_spans(start, stop, layout.record_bytes):
            yield Columns(labels[span], data[span] if images else None, coarse[span] if coarse is not None else None)
