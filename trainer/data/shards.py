"""Loading of committed shards: the rows of a worker or the evaluation rows, verified against the manifest.

Shapes: N rows, C channels, H and W pixels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.arrays import Ints
from pipeline.core.atomic import path_in_errors
from pipeline.core.errors import DataError, UsageError
from pipeline.core.hashing import row_hashes
from pipeline.core.shardset.contract import ShardFile
from pipeline.core.shardset.generations import as_of, generations
from pipeline.core.shardset.layout import Dtype, Layout
from pipeline.core.shardset.manifest import (
    ShardSet,
    missing_file,
    read_committed,
    refuse_single_shard,
    with_rows,
)
from pipeline.core.shardset.ratios import Ratios
from pipeline.core.shardset.schema import (
    DTYPES,
    TARGET_COLUMN,
    broken_is_data_error,
    declared_metadata,
    declared_shape,
    no_labels,
    raw_images,
)
from pipeline.core.shardset.versions import NAME
from pipeline.core.storage.retries import unreadable_is_data_error, with_retries
from pipeline.core.storage.store import Store, configured_store
from pipeline.core.storage.uri import is_remote, split_uri
from trainer.config import SEPARATOR, Data
from trainer.data.mapped_images import Images, MappedImages, Pixels, join_images
from trainer.models.base import ModelInput
from trainer.watchdog import kick

SUFFIX = ".parquet"
BARE = "bare shards"  # in place of a strategy's name: nothing is known about how the rows were placed
TABLE = (
    "id",
    "label",
    "coarse_label",
    TARGET_COLUMN,
    "copy",
    "neighbourhood",
)  # columns that a file may have beside the image
BLOCK_BYTES = 1 << 20  # of images that are decoded at a time into mapped files
PIECE_BYTES = 4 << 20  # of a file that is downloaded or whose digest is computed piece by piece
SET_BITS = 40  # the ids of set k of a mixture begin at k * 2^40
OnLoaded = Callable[[int, int], None]  # (rows loaded, total rows), called after each file


@dataclass(frozen=True)
class Rows:
    """Rows that are loaded. Copies made by sharding are ordinary rows, except that their hash is 0.

    Attributes:
        images_NCHW: uint8, or real-valued features in float32; perhaps in memory-mapped files.
        labels: int64 [N], or targets in float32.
        ids: int64 [N].
        hashes: uint64 [N], the hashes that the manifest's fingerprint sums up; empty if not computed.
        neighbourhoods: int32 [N], groups of similar rows; empty if the set has none, or they are not read.
    """

    images_NCHW: Images
    labels: npt.NDArray[np.int64 | np.float32]
    ids: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    neighbourhoods: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, places: Ints) -> Rows:
        """Return a copy of the rows at some places, without hashes."""
        return Rows(self.images_NCHW[places], self.labels[places], self.ids[places])

    def view(self, places: Ints | slice) -> Rows:
        """Return the rows at some places with all their columns. Images in memory-mapped files stay there."""
        images = self.images_NCHW
        columns = (getattr(self, name) for name in COLUMNS)
        return Rows(
            images.view(places) if isinstance(images, MappedImages) else images[places],
            *(column[places] if len(column) else column for column in columns),
        )

    def followed_by(self, others: Rows) -> Rows:
        """Return these rows, followed by others. Needs twice the memory of both while it copies."""
        return join_rows([self, others])


COLUMNS = tuple(item.name for item in fields(Rows) if item.name != "images_NCHW")


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Return the rows of some parts, one after the other. Needs twice the memory of all while it copies."""
    columns = (np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS)
    return Rows(join_images([part.images_NCHW for part in parts]), *columns)


@dataclass(frozen=True)
class Shards(ShardSet):
    """A committed set as the trainer reads it, or a mixture of several.

    Attributes:
        mapped: local folder in which this process and others of its host share decoded rows in memory-mapped files; None
            to load rows into memory.
        sets: the sets of a mixture, in whose manifest all files of a worker are listed by their whole addresses; empty for
            a set.
    """

    sets: tuple[Shards, ...] = ()
    mapped: Path | None = None

    def address(self, file: ShardFile) -> str:
        """Return the URI of a file."""
        return file.path if self.sets else f"{self.uri}/{file.path}"

    def first_id(self, file: ShardFile) -> int:
        """Return the number that is added to the ids of a file's rows, because sets of a mixture have equal ids."""
        number = next((n for n, each in enumerate(self.sets) if file.path.startswith(f"{each.uri}/")), 0)
        return number << SET_BITS

    @property
    def rows(self) -> int:
        """Number of distinct training examples. Copies count in ``worker_rows`` only."""
        return self.manifest.rows

    @property
    def num_classes(self) -> int:
        return self.manifest.labels.num_classes

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.manifest.image.chw

    @property
    def inputs(self) -> ModelInput:
        """The properties of the rows that a model depends on."""
        return ModelInput(self.shape, self.num_classes, self.has_targets, self.has_labels)

    @property
    def layout(self) -> Layout:
        return Layout(self.shape, dtype=cast(Dtype, self.manifest.image.dtype))

    @property
    def is_bare(self) -> bool:
        """Whether the shards were given by their paths, without a manifest."""
        return self.manifest.strategy == BARE

    @property
    def has_labels(self) -> bool:
        """Whether rows have a class label."""
        return "label" in self.manifest.labels.columns

    @property
    def has_neighbourhoods(self) -> bool:
        """Whether rows have the number of a group of similar rows."""
        return self.manifest.neighbourhoods is not None

    @property
    def has_targets(self) -> bool:
        """Whether rows have a real-valued target, beside or instead of a class."""
        return TARGET_COLUMN in self.manifest.labels.columns

    @property
    def mean(self) -> npt.NDArray[np.float32]:
        """The mean of each channel of the training images, for pixels in 0..255: float32 [C]."""
        return np.array(self.manifest.image.mean, np.float32)

    @property
    def fingerprint(self) -> int | None:
        """The sum of the hashes of all distinct rows, modulo 2^64; None if the manifest has none."""
        text = self.manifest.input.fingerprint
        return int(text.rpartition("-")[2], 16) if text else None

    @property
    def ratios(self) -> Ratios:
        """The ratios of the shards; empty if they are equal."""
        return tuple(self.manifest.ratios or ())

    def ratios_of(self, num_workers: int) -> Ratios:
        """Return the ratios for a number of workers; empty if it is not the set's own, because parts are equal then."""
        return self.ratios if num_workers == self.num_workers else ()

    def worker_files(self, worker: int) -> list[ShardFile]:
        return self.manifest.workers[worker].files

    def worker_rows(self, worker: int) -> int:
        """Return the number of rows of a worker, copies included."""
        return sum(file.rows for file in self.worker_files(worker))


def open_shards(uri: str, *, num_workers: int | None = None) -> Shards:
    """Open a committed set at a local path, ``hdfs://``, ``s3://`` or ``webhdfs://host:port/``, and check its manifest.

    Several paths, joined by SEPARATOR, or a Parquet file are shards without a manifest; see bare_shards.py. For a set,
    reads no row; costs one read and one listing per worker. Raises DataError if the set is missing or damaged,
    UsageError if it was made for another ``num_workers``."""
    from trainer.data.bare_shards import bare_files, open_bare  # imports this module

    uris = uri.split(SEPARATOR)
    store = store_of(uris[0])
    if len(uris) > 1 or uri.endswith(SUFFIX):
        bare = open_bare(store, uris)
        _check_workers(bare, num_workers)
        return bare
    with unreadable_is_data_error(uri):
        absolute = store.resolve(uri)
        store.exists(absolute)  # not retried, so that an unreachable host is reported at once
        committed = with_retries(read_committed)(store, uri)  # the manifest may be on a DataNode that was just lost
    if committed is None:
        refuse_single_shard(store, absolute)
        if bare_files(store, absolute):
            return open_bare(store, uris)
        raise DataError(
            f"{absolute} has no {NAME}: no shards were ever committed there; make them with spark-submit"
            f" jobs/stratified.py --input DATA --output {uri} --workers {num_workers or 'N'}, or another job of jobs/"
        )
    shards = Shards(committed.store, committed.uri, with_rows(committed).manifest)
    try:
        shards.manifest.require("rows", "labels", "image")
        _check_layout(shards)
        _check_workers(shards, num_workers)
        with unreadable_is_data_error(shards.uri):
            problem = missing_file(shards)
    except ValueError as error:
        raise DataError(
            f"{shards.uri}/{NAME} is damaged ({' '.join(str(error).split())}); rerun the job that made it"
        ) from None
    if problem:
        raise DataError(f"{problem}: the set is damaged; rerun the job that made it")
    return shards


def open_pinned(data: Data, *, num_workers: int | None = None) -> Shards:
    """Open the set or the mixture of a run, as it was at the generation that the run is pinned to, if any.

    Raises as ``open_shards`` and ``pin_generation``."""
    from trainer.data.mixture import open_mixture  # imports this module

    if data.mix:
        return open_mixture(data.shards.split(SEPARATOR), num_workers=num_workers)
    return pin_generation(open_shards(data.shards, num_workers=num_workers), data.generation)


def pin_generation(shards: Shards, generation: int | None) -> Shards:
    """Return a set as it was at a generation; unchanged for None.

    Raises UsageError for a generation that the set lacks, or that has a worker without rows."""
    if generation is None:
        return shards
    count = len(generations(shards))
    if generation >= count:
        description = f"has generations 0..{count - 1}" if count else "was made at once, without generations"
        raise UsageError(f"--generation {generation}: {shards.uri} {description}")
    pinned = as_of(shards, generation)
    # open_shards has checked the newest generation only: a worker may have got its first rows later.
    empty = next((worker for worker in range(pinned.num_workers) if not pinned.worker_rows(worker)), None)
    if empty is not None:
        raise UsageError(
            f"--generation {generation}: {shards.uri} had no rows for worker {empty} then; give a later one of"
            f" 0..{count - 1}"
        )
    return pinned


def load_worker(shards: Shards, index: int, on_loaded: OnLoaded | None = None, *, targets: bool = False) -> Rows:
    """Read the files of one worker and no others. A lost DataNode is waited for.

    Keeps the rows, one file and one row group of it in memory.

    Args:
        shards: the set.
        index: number of the worker.
        on_loaded: called after each file.
        targets: read real targets instead of labels.
    Raises:
        UsageError: the set has no such worker.
        DataError: a file differs from the manifest.
        OSError: a file cannot be read.
    """
    if not 0 <= index < shards.num_workers:
        raise UsageError(f"there is no worker {index}: {shards.uri} has workers 0..{shards.num_workers - 1}")
    return _load(shards, shards.worker_files(index), on_loaded, targets, with_hashes=True)


def load_files(shards: Shards, files: list[ShardFile], *, targets: bool = False, with_hashes: bool = True) -> Rows:
    """Read some files of a worker, with the checks of ``load_worker``.

    Args:
        shards: the set.
        files: of one worker.
        targets: read real targets instead of labels.
        with_hashes: compute the hashes of the rows.
    """
    return _load(shards, files, None, targets, with_hashes=with_hashes)


def load_eval(shards: Shards, on_loaded: OnLoaded | None = None, *, targets: bool = False) -> Rows | None:
    """Read and verify the evaluation rows; None if the set has none."""
    files = shards.eval_files()
    return _load(shards, files, on_loaded, targets) if files else None


def store_of(uri: str) -> Store:
    """Return a store for reading a URI, with Hadoop's configuration unless it is a local path."""
    return Store() if split_uri(uri)[0] in ("", "file") else configured_store()


def _check_layout(shards: Shards) -> None:
    """Check the form of images and the sizes in the manifest.

    Raises DataError for images that this version does not read, ValueError for values that no job writes."""
    image = shards.manifest.image
    if image.dtype not in DTYPES or image.layout != "CHW":
        raise DataError(
            f"{shards.uri} holds {image.dtype} images in {image.layout} order; the trainer reads"
            f" {' and '.join(DTYPES)} in CHW: shard the data again with this version's jobs"
        )
    if any(abs(value) > float(np.finfo(np.float32).max) for value in image.mean):
        raise ValueError(f"means {image.mean}, which float32 does not hold")
    if min(shards.shape) < 1 or shards.mean.shape != shards.shape[:1] or shards.num_classes < 1 or shards.rows < 1:
        raise ValueError(f"image {image}, {shards.num_classes} classes, {shards.rows} rows")


def _check_workers(shards: Shards, required: int | None) -> None:
    """Check the number of workers and that each has rows. required: the number that the caller needs, None for any.

    Raises UsageError for another number than ``required``, DataError for a worker without rows."""
    count = len(shards.manifest.workers)
    # A worker reads one shard, so another number of workers needs another set.
    if required not in (None, count):
        raise UsageError(
            f"{shards.uri} holds shards for {count} workers, not {required}; {_resharding_advice(shards, required)}"
        )
    empty = [worker for worker in range(count) if not shards.worker_rows(worker)]
    if empty:
        raise DataError(
            f"{shards.uri}: {len(empty)} of {count} workers have no rows (the first is {empty[0]}), and a worker"
            f" without rows cannot train; {_resharding_advice(shards, max(1, count - len(empty)))}"
        )


def _resharding_advice(shards: Shards, workers: int | None) -> str:
    """Return the command that makes shards for another number of workers, as part of a message."""
    target = f"{shards.uri}-{workers}"
    return f"run spark-submit jobs/reshard.py --input {shards.uri} --output {target} --workers {workers}"


def _load(
    shards: Shards, files: list[ShardFile], on_loaded: OnLoaded | None, targets: bool, *, with_hashes: bool = False
) -> Rows:
    """Read and check files into one allocation, or map them. Raises DataError and OSError.

    Args:
        shards: the set.
        files: the files, in the order of the result.
        on_loaded: called after each file.
        targets: read real targets instead of labels.
        with_hashes: compute the hashes of the rows, 0 for copies, and read their neighbourhoods.
    """
    total = sum(file.rows for file in files)
    if shards.mapped and total:
        from trainer.data.row_files import map_rows  # imports this module

        rows = map_rows(shards, files, targets=targets, with_hashes=with_hashes)
        if on_loaded:
            on_loaded(total, total)
        return rows
    # Allocated once at full size: joining parts at the end would need the memory twice.
    images: Pixels = np.empty((total, *shards.shape), shards.layout.dtype)
    dtypes = column_types(shards, targets=targets, with_hashes=with_hashes)
    rows = Rows(images, **{name: np.empty(total, dtype) for name, dtype in dtypes.items()})
    at = 0
    for file in files:
        for block in row_blocks(shards, file, targets=targets, with_hashes=with_hashes):
            part = slice(at, at + len(block))
            images[part] = block.images_NCHW
            for name in dtypes:
                getattr(rows, name)[part] = getattr(block, name)
            at += len(block)
        if on_loaded:
            on_loaded(at, total)
    return rows


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
            columns = {name: table.column(name).to_numpy() for name in table.column_names if name != "image"}
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
    """Raise DataError if a file lacks a column of its set, or a column has nulls or a type that is not numeric."""
    needed = ["id", *["label"] * shards.has_labels, *[TARGET_COLUMN] * shards.has_targets, "image"]
    missing = next((name for name in needed if name not in table.column_names), None)
    if missing:
        raise DataError(f"{uri} has no column {missing}: it is damaged; rerun the job of its set")
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
    """Return a mapped local copy of a remote file, which the system deletes once it is closed."""
    assert shards.mapped
    shards.mapped.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=shards.mapped) as copy, path_in_errors(copy.name):
        for offset in range(0, file.bytes, PIECE_BYTES):
            kick()
            length = min(PIECE_BYTES, file.bytes - offset)
            copy.write(with_retries(shards.store.read_range)(shards.address(file), offset, length))
        copy.flush()
        return pa.memory_map(copy.name)


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
        raise DataError(
            f"{uri}, row {first + wrong[0]}: label {labels[wrong[0]]} is not in 0..{num_classes - 1};"
            " shard again with a larger --num-classes"
        )


def _size_in_words(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
