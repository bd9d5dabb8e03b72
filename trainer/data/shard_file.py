"""The rows of one shard file, block by block, verified against the manifest."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.arrays import Ints
from pipeline.core.atomic import path_in_errors
from pipeline.core.errors import DataError
from pipeline.core.hashing import row_hashes
from pipeline.core.shardset.parts import ShardFile
from pipeline.core.shardset.schema import (
    TARGET_COLUMN,
    broken_is_data_error,
    declared_metadata,
    declared_shape,
    no_labels,
    numbers_of,
    raw_images,
)
from pipeline.core.storage.retries import unreadable_is_data_error, with_retries
from pipeline.core.storage.uri import is_remote
from trainer.data.rows import Rows, join_rows
from trainer.data.shards import Shards
from trainer.sampling.base import GroupBy
from trainer.watchdog import kick

# Columns that a file may have beside the image.
TABLE = ("id", "label", "coarse_label", TARGET_COLUMN, "copy", "neighbourhood")
BLOCK_BYTES = 1 << 20  # of images that are decoded at a time into mapped files
PIECE_BYTES = 4 << 20  # of a file that is downloaded or whose digest is computed piece by piece


def column_types(shards: Shards, *, targets: bool, with_hashes: bool) -> dict[str, npt.DTypeLike]:
    """Return the type of each column of ``Rows`` beside the images, by name; absent ones are left out."""
    types: dict[str, npt.DTypeLike] = {"labels": np.float32 if targets else np.int64, "ids": np.int64}
    if with_hashes:
        types["hashes"] = np.uint64
    if with_hashes and shards.has_neighbourhoods:
        types["neighbourhoods"] = np.int32
    return types


def row_blocks(shards: Shards, file: ShardFile, *, targets: bool, with_hashes: bool) -> Iterator[Rows]:
    """Yield the rows of a file in blocks: its row groups or, for mapped rows, at most BLOCK_BYTES of images.

    See ``_load`` for the arguments and errors."""
    types = column_types(shards, targets=targets, with_hashes=with_hashes)
    for columns, data in row_groups(shards, file, TABLE if with_hashes else ("id", "label", TARGET_COLUMN)):
        kick()  # the watchdog: a large shard takes long to load
        block = {"labels": columns[TARGET_COLUMN if targets else "label"], "ids": columns["id"] + shards.first_id(file)}
        if "hashes" in types:
            block["hashes"] = np.where(columns.get("copy", 0) == 0, row_hashes_of(columns, data), 0)
        if "neighbourhoods" in types:
            if "neighbourhood" not in columns:
                raise DataError(f"{shards.uri}/{file.path} has no column neighbourhood, as the set's other files")
            block["neighbourhoods"] = columns["neighbourhood"]
        images = data.view(shards.layout.dtype).reshape(-1, *shards.shape)
        yield Rows(images, **{name: block[name].astype(dtype, copy=False) for name, dtype in types.items()})


def read_groups(shards: Shards, by: GroupBy) -> Ints:
    """Return the group of each row of all shards, in the order of their workers, int64 [rows]: its class or neighbourhood.

    Reads the files, but decodes no image. Raises DataError and OSError."""
    name = "label" if by == "class" else "neighbourhood"
    return np.concatenate([column for _, column in _columns(shards, name)])


def read_ids(shards: Shards) -> Ints:
    """Return the id of each row of all shards, in the order of their workers, int64 [rows].

    Reads the files, but decodes no image. Raises DataError and OSError."""
    return np.concatenate([column + shards.first_id(file) for file, column in _columns(shards, "id")])


def _columns(shards: Shards, name: str) -> Iterator[tuple[ShardFile, Ints]]:
    """Yield every file of all shards, in the order of their workers, with its column of a name as int64."""
    for worker in range(shards.num_workers):
        for file in shards.worker_files(worker):
            kick()  # the watchdog: a large set takes long to read
            uri = shards.address(file)
            with _verified(shards, file) as source, broken_is_data_error(uri):
                table = pq.ParquetFile(source).read(columns=[name])
            if not table.num_columns:
                raise DataError(f"{uri} has no column {name}: it is damaged; rerun the job of its set")
            _check_types(table, uri)
            yield file, numbers_of(table.column(name)).astype(np.int64)


def pick_rows(shards: Shards, file: ShardFile, choose: Callable[[Rows, int], Ints], *, targets: bool) -> Rows:
    """Return a copy of some rows of a file, without hashes. Keeps one block of others in memory.

    Args:
        shards: the set.
        file: the file.
        choose: returns the places of the chosen rows in a block, from the block and the number of its first row.
        targets: read real targets instead of labels.
    """
    parts = []
    first = 0
    for block in row_blocks(shards, file, targets=targets, with_hashes=False):
        parts.append(block.select(choose(block, first)))
        first += len(block)
    return join_rows(parts)


def row_hashes_of(columns: dict[str, Any], images: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return row_hashes(columns["id"], columns["label"], columns.get("coarse_label"), columns.get(TARGET_COLUMN), images)


def row_groups(
    shards: Shards, file: ShardFile, names: Sequence[str]
) -> Iterator[tuple[dict[str, Any], npt.NDArray[np.uint8]]]:
    """Yield (existing columns of ``names``, images as uint8 [rows, bytes]) of each row group of a file.

    If the set's rows are mapped, the file is never in memory as a whole, and row groups are divided into blocks. The
    number of rows is checked against the manifest. Raises DataError for a damaged file."""
    uri = shards.address(file)
    with _verified(shards, file) as source, broken_is_data_error(uri):
        # Pre-buffered, whole columns of a row group would be in memory at once.
        parquet = pq.ParquetFile(source, pre_buffer=not shards.mapped)
        schema = parquet.schema_arrow
        layout = shards.layout
        shape = declared_shape(schema, "image") or shards.shape
        dtype = declared_metadata(schema, "image").get("dtype", layout.dtype)
        # The digest matches, so another shape or count means that files of two sets were mixed.
        if (shape, dtype, parquet.metadata.num_rows) != (shards.shape, layout.dtype, file.rows):
            contents = f"{parquet.metadata.num_rows} images of {_size_in_words(shape)}"
            raise DataError(
                f"{uri} holds {contents}, not {file.rows} of {_size_in_words(shards.shape)}: sets were mixed;"
                " rerun the job that made it"
            )
        first = 0
        most = max(1, BLOCK_BYTES // layout.record_bytes) if shards.mapped else None
        for table in _tables(parquet, [name for name in (*names, "image") if name in schema.names], most):
            _check_columns(table, shards, uri)
            columns = {name: numbers_of(table.column(name)) for name in table.column_names if name != "image"}
            if not shards.has_labels:
                columns["label"] = no_labels(len(table))
            _check_labels(columns["label"], shards.num_classes, uri, first)
            yield columns, raw_images(table.column("image"), layout.record_bytes, uri, first)
            first += len(columns["label"])


def _tables(parquet: pq.ParquetFile, names: Sequence[str], most: int | None) -> Iterator[pa.Table]:
    """Yield columns of each row group or, unless ``most`` is None, of at most ``most`` rows at a time."""
    if most is None:
        for group in range(parquet.num_row_groups):
            yield parquet.read_row_group(group, columns=names)
        return
    for batch in parquet.iter_batches(most, columns=names, use_threads=False):
        pa.default_memory_pool().release_unused()  # of the pages before, which Arrow would keep for reuse
        yield pa.Table.from_batches([batch])


def _check_columns(table: pa.Table, shards: Shards, uri: str) -> None:
    """Raise DataError if a file lacks a column of its set, or has one that ``_check_types`` refuses."""
    needed = ["id", *["label"] * shards.has_labels, *[TARGET_COLUMN] * shards.has_targets, "image"]
    missing = next((name for name in needed if name not in table.column_names), None)
    if missing:
        raise DataError(f"{uri} has no column {missing}: it is damaged; rerun the job of its set")
    _check_types(table, uri)


def _check_types(table: pa.Table, uri: str) -> None:
    """Raise DataError if a column has nulls or a type that is not numeric. uri: the file."""
    for name in table.column_names:
        column = table.column(name)
        fits = pa.types.is_floating if name == TARGET_COLUMN else pa.types.is_integer
        if column.null_count or not (name == "image" or fits(column.type)):
            kind = "nulls" if column.null_count else column.type
            raise DataError(f"{uri}: column {name} holds {kind}: it is damaged; rerun the job of its set")


@contextmanager
def _verified(shards: Shards, file: ShardFile) -> Iterator[Any]:
    """Yield a readable source of a file's content: its bytes or, if the set's rows are mapped, a mapped local file.

    Raises DataError if the file is missing or its digest differs from the manifest's."""
    uri = shards.address(file)
    with ExitStack() as stack:
        with _missing_is_data_error(uri):
            if not shards.mapped:
                data = with_retries(shards.store.read_range)(uri, 0, file.bytes)
                source = pa.BufferReader(data)
            elif is_remote(uri):
                source = stack.enter_context(_download(shards, file))
            else:
                source = stack.enter_context(pa.memory_map(uri))
        sha256 = hashlib.sha256()
        while piece := source.read_buffer(PIECE_BYTES):
            kick()
            sha256.update(piece)
        # Before anything is parsed, because a damaged Parquet file can do harm.
        digest = sha256.hexdigest()
        if digest != file.sha256:
            raise DataError(
                f"{uri} has sha256 {digest[:12]}, not {file.sha256[:12]}: it is damaged; rerun the job of its set"
            )
        source.seek(0)
        yield source


def _download(shards: Shards, file: ShardFile) -> Any:
    """Return a mapped local copy of a remote file, which has no name, so that a killed process leaves nothing."""
    assert shards.mapped
    shards.mapped.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=shards.mapped) as copy, path_in_errors(shards.mapped):
        for offset in range(0, file.bytes, PIECE_BYTES):
            kick()
            length = min(PIECE_BYTES, file.bytes - offset)
            copy.write(with_retries(shards.store.read_range)(shards.address(file), offset, length))
        # A truncated file of the store has another digest, and must not end before its mapping does.
        copy.truncate(file.bytes)
        return pa.BufferReader(pa.py_buffer(mmap.mmap(copy.fileno(), file.bytes, access=mmap.ACCESS_READ)))


@contextmanager
def _missing_is_data_error(uri: str) -> Iterator[None]:
    """Raise DataError if a file is missing or permanently unreadable."""
    try:
        with unreadable_is_data_error(uri):
            yield
    except FileNotFoundError:
        # The manifest lists the file, so it existed when the run opened the set.
        raise DataError(
            f"{uri} no longer exists: the set was replaced or damaged since the start; start again"
        ) from None


def _check_labels(labels: npt.NDArray[Any], num_classes: int, uri: str, first: int) -> None:
    """Raise DataError for a label outside 0..num_classes-1. first: number of the first of these rows in the file."""
    wrong = np.flatnonzero(~((labels >= 0) & (labels < num_classes)))
    if len(wrong):
        label = labels[wrong[0]]
        change = "a larger --num-classes" if label >= 0 else "labels of 0 or more"
        raise DataError(
            f"{uri}, row {first + wrong[0]}: label {label} is not in 0..{num_classes - 1}; shard again with {change}"
        )


def _size_in_words(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
