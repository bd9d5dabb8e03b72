"""The measurement of a committed set for the quality figures and the report: two passes over its files.

A pass is a local function of a file, or of several of one worker, and a merge on the driver, which holds a small record
for each. ``run(fn, items)`` runs the local functions: ``dataset.serial`` here, a Spark job in ``runs/report.py``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import Dtype, Layout
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.shardset.parts import Neighbourhood, ShardFile
from pipeline.core.shardset.schema import no_labels, raw_images
from pipeline.core.storage.store import Store
from pipeline.input.dataset import Block, Run, serial
from pipeline.input.formats import Columns
from pipeline.input.formats.base import block_rows
from pipeline.quality.agreement import Cells, label_agreement
from pipeline.quality.metrics import Quality, assess
from pipeline.quality.moments import Floats, Ints, Moments, mean_distance, merge, moments, spread_evenly, thumbnails

SAMPLE_ROWS = 3000
MOST_COUNTED = 1 << 22  # limit of counts by worker; by part, four times as many: 32 and 128 MB on the driver
SPARSE_IMAGES = 24
MOST_CLASS_SUMS = 1 << 13  # limit of sums by part and class, of 8 kB each: 64 MB on the driver, as much again by worker
MOST_PARTS = 1 << 14  # of which the driver holds sums and a sample, of 10 kB each: 160 MB
MOST_LABELS = 1 << 16  # of coarse labels, whose number the manifest does not have


@dataclass(frozen=True)
class Reader:
    """The properties of a set that a task needs to read its files; small, unlike the manifest.

    Attributes:
        store: the file system.
        uri: the folder of the set.
        layout: the layout of an image, or of real-valued features.
        limits: the integer columns to read, each with the upper bound of its values.
        counted: int64, ascending, the neighbourhoods whose rows are counted by worker.
        compared: the columns of labels that are compared with neighbourhoods.
        kept_columns: kept columns of whole numbers, which are compared too if they hold classes.
        most_cells: the most pairs of a neighbourhood and a value of a kept column that a part may have.
        by_class: whether the images of each class are compared too.
    """

    store: Store
    uri: str
    layout: Layout
    limits: dict[str, int]
    counted: Ints
    compared: tuple[str, ...]
    kept_columns: tuple[str, ...] = ()
    most_cells: int = 0
    by_class: bool = False

    def owners(self, file: ShardFile) -> Iterator[Block]:
        """Yield the rows of a file that are not copies (copy number 0) as blocks, in file order.

        A block holds the owner rows among at most 2,048 rows of the file, fewer for large images. Raises DataError if
        the file is not Parquet, its rows or columns disagree with the manifest, or a number is null or out of its
        limits."""
        path = f"{self.uri}/{file.path}"
        names = [*self.limits, *self.kept_columns, "image"]
        with self.store.open(path) as handle:
            try:
                parquet = pq.ParquetFile(handle)
            except pa.ArrowInvalid as error:
                raise DataError(f"{path} is not a whole Parquet file: {str(error).splitlines()[0]}") from None
            rows = parquet.metadata.num_rows
            columns = parquet.schema_arrow.names
            if rows != file.rows or not set(names) <= set(columns):
                raise DataError(
                    f"{path} has {rows} rows of {', '.join(columns)}, the manifest says {file.rows} of {', '.join(names)}; "
                    "rerun the job with --overwrite"
                )
            # The offset of a batch locates a broken image in the error line.
            at = 0
            for batch in parquet.iter_batches(block_rows(self.layout.record_bytes), columns=names):
                yield self._owner_rows(batch, path, at)
                at += len(batch)

    def _owner_rows(self, batch: pa.RecordBatch, path: str, at: int) -> Block:
        """Return the rows of a batch that are not copies. Raises DataError for a null or a number out of its limits.

        at: position of the batch's first row in the file, for error lines. path: the file."""
        for name, limit in self.limits.items():
            values = batch.column(name)
            ends = pc.min_max(values)
            if values.null_count or not 0 <= ends["min"].as_py() <= ends["max"].as_py() < limit:
                raise DataError(
                    f"{path} has a {name} that is null or not in [0, {limit}); rerun the job with --overwrite"
                )
        # Copies have the number of their copy, from 1.
        owned = batch.column("copy").to_numpy() == 0
        rows = slice(None) if owned.all() else owned  # a slice does not copy the images
        pixels = raw_images(batch.column("image"), self.layout.record_bytes, path, at)[rows]
        numbers = {name: batch.column(name).to_numpy()[rows] for name in self.limits}
        labels = numbers["label"] if "label" in numbers else no_labels(len(pixels))
        return Block(
            numbers["id"],
            Columns(
                labels,
                pixels,
                numbers.get("coarse_label"),
                numbers.get("neighbourhood"),
                attributes={name: batch.column(name).filter(pa.array(owned)) for name in self.kept_columns},
            ),
        )

    def planes(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8 | np.float32]:
        """Return the bytes of images, uint8 [rows, bytes], as numbers [rows, C, H, W]."""
        numbers = np.ascontiguousarray(pixels).view(self.layout.dtype)
        return numbers.reshape(len(pixels), *self.layout.shape)


class ImageSample(NamedTuple):
    """A sample of rows spread evenly over the ids, in id order: the same for every sharding of one input."""

    ids: Ints  # [rows]
    groups: Ints  # [rows] neighbourhoods, or labels in a set without them
    features: Floats  # [rows, F] thumbnails


class SparseImage(NamedTuple):
    """An image of a sparse neighbourhood, whose rows all go to every worker: uint8 [C, H, W]."""

    id: int
    label: int
    neighbourhood: int
    pixels: npt.NDArray[np.uint8]


def join_samples(parts: Sequence[ImageSample]) -> ImageSample:
    """Return all rows of one or more samples, sorted by id, so that the order of the files does not matter."""
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(columns[0])
    return ImageSample(*(column[order] for column in columns))


def rarest(images: Sequence[SparseImage]) -> list[SparseImage]:
    """Return the first SPARSE_IMAGES images, starting with the smallest neighbourhood (the highest number).

    Images of one neighbourhood are sorted by id."""
    return sorted(images, key=lambda image: (-image.neighbourhood, image.id))[:SPARSE_IMAGES]


class WorkerFiles(NamedTuple):
    """Files of one worker that a pass reads one after the other."""

    worker: int
    files: Sequence[ShardFile]


def parts_of(shards: ShardSet) -> list[WorkerFiles]:
    """Return the files that have rows, one in each part; with more than MOST_PARTS files several of a worker."""
    files_of = [[file for file in entry.files if file.rows] for entry in shards.manifest.workers]
    size = max(1, -(-sum(map(len, files_of)) // MOST_PARTS))
    return [
        WorkerFiles(worker, files[start : start + size])
        for worker, files in enumerate(files_of)
        for start in range(0, len(files), size)
    ]


def sample_part(
    reader: Reader, sample_ids: Ints, sparse: Ints, part: WorkerFiles
) -> tuple[ImageSample, list[SparseImage]]:
    """Run the first pass over a part: return its owners among ``sample_ids``, and images of sparse neighbourhoods.

    Args:
        reader: the set.
        sample_ids: the ids of the sample.
        sparse: the numbers of the sparse neighbourhoods.
        part: the files.
    """
    samples = []
    images: list[SparseImage] = []
    for block in chain.from_iterable(map(reader.owners, part.files)):
        near = block.columns.neighbourhoods
        planes = reader.planes(block.images)
        is_sampled = np.isin(block.ids, sample_ids)
        groups = block.labels if near is None else near
        samples.append(ImageSample(block.ids[is_sampled], groups[is_sampled], thumbnails(planes[is_sampled])))
        if near is not None and reader.layout.dtype == "uint8":
            for at in np.flatnonzero(np.isin(near, sparse)):
                images.append(SparseImage(int(block.ids[at]), int(block.labels[at]), int(near[at]), planes[at].copy()))
            images = rarest(images)  # a stream adds a file in each batch
    return join_samples(samples), images


def sum_moments(
    reader: Reader, bandwidth: float, pixels: npt.NDArray[np.uint8], labels: Ints, near: Ints | None
) -> Moments:
    """Return the sums over some rows.

    Args:
        reader: the set.
        bandwidth: the kernel's bandwidth.
        pixels: uint8 [rows, bytes].
        labels: [rows].
        near: neighbourhoods [rows], or None.
    """
    features = thumbnails(reader.planes(pixels))
    places = labels[:0]
    if near is not None and len(reader.counted):
        # Without the last entry, every result is a valid index; rows of uncounted neighbourhoods are dropped below.
        places = np.searchsorted(reader.counted[:-1], near)
        places = places[reader.counted[places] == near]
    classes = reader.limits.get("label", 1)
    return moments(features, labels, places, classes, len(reader.counted), bandwidth, reader.by_class)


def largest_groups(groups: Sequence[Neighbourhood], most: int) -> Ints:
    """Return the numbers of the largest neighbourhoods, at most ``most``, ascending."""
    sizes = np.array([group.size for group in groups], np.int64)
    return np.sort(np.argsort(-sizes, kind="stable")[:most])


def no_moments(reader: Reader, bandwidth: float) -> Moments:
    """Return the sums over no rows: the start of every merge, and the result for an empty shard."""
    return sum_moments(
        reader, bandwidth, np.zeros((0, reader.layout.record_bytes), np.uint8), np.zeros(0, np.int64), None
    )


@dataclass(frozen=True)
class PartSums:
    """The sums over the owners of a part.

    cells: rows by neighbourhood and label, by column of labels; without kept columns that hold no classes."""

    moments: Moments
    cells: dict[str, Cells]


def sum_part(reader: Reader, bandwidth: float, part: WorkerFiles) -> PartSums:
    """Run the second pass over a part: return the sums over its owners."""
    total = no_moments(reader, bandwidth)
    cells: dict[str, list[Cells]] = {name: [] for name in (*reader.compared, *reader.kept_columns)}
    for block in chain.from_iterable(map(reader.owners, part.files)):
        near = block.columns.neighbourhoods
        total = merge(total, sum_moments(reader, bandwidth, block.images, block.labels, near))
        for name in list(cells):
            labels = _compared_labels(block, name)
            # A kept column may hold other numbers than classes.
            if labels is None:
                del cells[name]
                continue
            assert near is not None
            limit = reader.limits.get(name, MOST_LABELS)
            cells[name].append(Cells.from_groups(near.astype(np.int64), labels.astype(np.int64), limit))
    sums = {name: Cells.total(parts) for name, parts in cells.items() if parts}
    for name in reader.kept_columns:
        if name in sums and len(sums[name].keys) > reader.most_cells:
            del sums[name]
    return PartSums(total, sums)


def _compared_labels(block: Block, name: str) -> npt.NDArray[np.integer[Any]] | None:
    """Return a column of labels of a block; None for a kept column with a null or a number that is no class."""
    if name == "label":
        return block.labels
    if name not in block.columns.attributes:
        assert block.columns.coarse_labels is not None
        return block.columns.coarse_labels
    values = block.columns.attributes[name]
    ends = pc.min_max(values)
    if values.null_count or (len(values) and not 0 <= ends["min"].as_py() <= ends["max"].as_py() < MOST_LABELS):
        return None
    labels: npt.NDArray[np.int64] = values.to_numpy()
    return labels


def measure(shards: ShardSet, run: Run[Any, Any] = serial) -> tuple[Quality, ImageSample, list[SparseImage]]:
    """Return the figures of a committed set, their sample, and images of its rarest neighbourhoods.

    Reads every file twice, because the sums need the kernel's bandwidth. Raises DataError if a file disagrees with the
    manifest."""
    manifest = shards.manifest
    rows = manifest.rows
    workers = manifest.workers
    groups = manifest.neighbourhoods or []
    limits = {"id": rows, "copy": len(workers)}
    if "label" in manifest.labels.columns:
        limits["label"] = manifest.labels.num_classes
    if groups:
        limits["neighbourhood"] = len(groups)
    if "coarse_label" in manifest.labels.columns:
        limits["coarse_label"] = MOST_LABELS
    layout = Layout(manifest.image.chw, dtype=cast(Dtype, manifest.image.dtype))
    parts = parts_of(shards)
    most = max(1, len(parts))
    counted_groups = largest_groups(groups, min(MOST_COUNTED // len(workers), 4 * MOST_COUNTED // most))
    # The driver holds the rows of every part by neighbourhood and label.
    cells = len(groups) * manifest.labels.num_classes * len(parts)
    compared: tuple[str, ...] = tuple(
        name for name in ("label", "coarse_label") if 0 < cells <= 4 * MOST_COUNTED and name in limits
    )
    kept_columns = tuple(column.name for column in manifest.columns if compared and column.type == "int64")
    most_cells = MOST_COUNTED // max(1, len(parts) * len(kept_columns))
    by_class = len(workers) > 1 and 1 < limits.get("label", 1) <= MOST_CLASS_SUMS // most
    reader = Reader(
        shards.store, shards.uri, layout, limits, counted_groups, compared, kept_columns, most_cells, by_class
    )

    sparse = np.flatnonzero([group.sparse for group in groups])
    samples, images = zip(
        *run(partial(sample_part, replace(reader, kept_columns=()), spread_evenly(rows, SAMPLE_ROWS), sparse), parts),
        strict=True,
    )
    # The second pass needs the bandwidth, which depends on the whole sample.
    sample = join_samples(samples)
    bandwidth = mean_distance(sample.features)
    totals = [no_moments(reader, bandwidth)] * len(workers)  # ``merge`` changes no sum in place
    results = run(partial(sum_part, reader, bandwidth), parts)
    for part, sums in zip(parts, results, strict=True):
        totals[part.worker] = merge(totals[part.worker], sums.moments)
    owners = sum(total.rows for total in totals)
    if owners != rows:
        raise DataError(
            f"{shards.uri}: the shards own {owners} examples, the manifest says {rows}; rerun with --overwrite"
        )
    dense = [not groups[number].sparse for number in counted_groups]
    figures = assess([entry.rows for entry in workers], totals, dense, sample.features, bandwidth)
    agreement = {
        name: label_agreement(Cells.total(sums.cells[name] for sums in results), limits.get(name, MOST_LABELS))
        for name in (*compared, *kept_columns)
        if all(name in sums.cells for sums in results)
    }
    figures = replace(figures, label_agreement=agreement)
    return figures, sample, rarest(list(chain.from_iterable(images)))
