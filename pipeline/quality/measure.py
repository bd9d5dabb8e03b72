"""What the quality figures and the report take from a committed set: two passes over its files, nothing else.

A pass is a local function of one file and a merge on the driver, which holds one small record a file; ``run(fn, items)``
carries the local functions out: ``dataset.serial`` here, a Spark job in ``jobs.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import Layout
from pipeline.core.shardset.manifest import ShardFile, ShardSet
from pipeline.core.shardset.schema import no_labels, raw_images
from pipeline.core.storage.store import Store
from pipeline.input.dataset import Block, Run, serial
from pipeline.input.formats import Columns
from pipeline.input.formats.base import block_rows
from pipeline.quality.metrics import (
    Floats,
    Ints,
    Moments,
    Quality,
    assess,
    mean_distance,
    merge,
    moments,
    spread_evenly,
    thumbnails,
)

SAMPLE_ROWS = 3000
MOST_COUNTED = 1 << 22  # neighbourhoods by worker, and a quarter of those by file: 32 and 128 MB on the driver
SPARSE_IMAGES = 24


@dataclass(frozen=True)
class Reader:
    """What a task must know of a set to read its files; small, unlike the manifest.

    layout: of an image, or of real-valued features. limits: the whole-number columns to read, each with its values' upper
    bound. counted: int64, ascending, the neighbourhoods whose rows are counted by worker."""

    store: Store
    uri: str
    layout: Layout
    limits: dict[str, int]
    counted: Ints

    def owners(self, file: ShardFile) -> Iterator[Block]:
        """The rows with copy 0 in file order, at most 2,048 at a time.

        Raises DataError for a file that is not Parquet or disagrees with the manifest."""
        path = f"{self.uri}/{file.path}"
        names = [*self.limits, "image"]
        with self.store.open(path) as handle:
            try:
                parquet = pq.ParquetFile(handle)
            except pa.ArrowInvalid as error:
                raise DataError(f"{path} is not a whole Parquet file: {str(error).splitlines()[0]}") from None
            rows, columns = parquet.metadata.num_rows, parquet.schema_arrow.names
            if rows != file.rows or not set(names) <= set(columns):
                raise DataError(
                    f"{path} has {rows} rows of {', '.join(columns)}, the manifest says {file.rows} of {', '.join(names)}; "
                    "rerun the job with --overwrite"
                )
            at = 0
            for batch in parquet.iter_batches(block_rows(self.layout.record_bytes), columns=names):
                yield self._owned(batch, path, at)
                at += len(batch)

    def _owned(self, batch: pa.RecordBatch, path: str, at: int) -> Block:
        for name, limit in self.limits.items():
            values = batch.column(name)
            ends = pc.min_max(values)
            if values.null_count or not 0 <= ends["min"].as_py() <= ends["max"].as_py() < limit:
                raise DataError(
                    f"{path} has a {name} that is null or not in [0, {limit}); rerun the job with --overwrite"
                )
        owned = batch.column("copy").to_numpy() == 0
        pixels = raw_images(batch.column("image"), self.layout.record_bytes, path, at)[owned]
        numbers = {name: batch.column(name).to_numpy()[owned] for name in self.limits}
        labels = numbers["label"] if "label" in numbers else no_labels(len(pixels))
        return Block(numbers["id"], Columns(labels, pixels, None, numbers.get("neighbourhood")))

    def planes(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8 | np.float32]:
        """The bytes of images, uint8 [rows, bytes], as [rows, C, H, W]."""
        numbers = np.ascontiguousarray(pixels).view(self.layout.dtype)
        return numbers.reshape(len(pixels), *self.layout.shape)


class ImageSample(NamedTuple):
    """Rows spread evenly over the ids, in id order: the same for every sharding of one input."""

    ids: Ints  # [rows]
    groups: Ints  # [rows] neighbourhoods, or labels in a set without them
    features: Floats  # [rows, F] thumbnails


class SparseImage(NamedTuple):
    """One image of a sparse neighbourhood: uint8 [C, H, W]."""

    id: int
    label: int
    neighbourhood: int
    pixels: npt.NDArray[np.uint8]


def join(parts: Sequence[ImageSample]) -> ImageSample:
    """All rows of one or more samples, by id, so that the order of the files does not matter."""
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(columns[0])
    return ImageSample(*(column[order] for column in columns))


def rarest(images: Sequence[SparseImage]) -> list[SparseImage]:
    """The first SPARSE_IMAGES, from the smallest neighbourhood (the highest number) up, then by id."""
    return sorted(images, key=lambda image: (-image.neighbourhood, image.id))[:SPARSE_IMAGES]


def sample_file(reader: Reader, wanted: Ints, sparse: Ints, file: ShardFile) -> tuple[ImageSample, list[SparseImage]]:
    """First pass: of one file the owners among the ``wanted`` ids, and some of the sparse neighbourhoods' images."""
    samples, images = [], []
    for block in reader.owners(file):
        near, planes = block.columns.neighbourhoods, reader.planes(block.images)
        chosen = np.isin(block.ids, wanted)
        groups = block.labels if near is None else near
        samples.append(ImageSample(block.ids[chosen], groups[chosen], thumbnails(planes[chosen])))
        if near is not None and reader.layout.dtype == "uint8":
            for at in np.flatnonzero(np.isin(near, sparse)):
                images.append(SparseImage(int(block.ids[at]), int(block.labels[at]), int(near[at]), planes[at].copy()))
    return join(samples), rarest(images)


def sums(reader: Reader, bandwidth: float, pixels: npt.NDArray[np.uint8], labels: Ints, near: Ints | None) -> Moments:
    """The sums over some rows: pixels [rows, C*H*W], labels [rows], near (neighbourhoods) [rows] or None."""
    features = thumbnails(reader.planes(pixels))
    places = labels[:0]
    if near is not None and len(reader.counted):
        places = np.searchsorted(reader.counted[:-1], near)
        places = places[reader.counted[places] == near]
    return moments(features, labels, places, reader.limits.get("label", 1), len(reader.counted), bandwidth)


def largest(groups: Sequence[Mapping[str, Any]], most: int) -> Ints:
    """The numbers of so many neighbourhoods at most, ascending."""
    sizes = np.array([group["size"] for group in groups], np.int64)
    return np.sort(np.argsort(-sizes, kind="stable")[:most])


def no_moments(reader: Reader, bandwidth: float) -> Moments:
    """The sums over no row: the start of every merge, and all there is of an empty shard."""
    return sums(reader, bandwidth, np.zeros((0, reader.layout.record_bytes), np.uint8), np.zeros(0, np.int64), None)


def file_moments(reader: Reader, bandwidth: float, file: ShardFile) -> Moments:
    """Second pass: the sums over the owners of one file."""
    total = no_moments(reader, bandwidth)
    for block in reader.owners(file):
        total = merge(total, sums(reader, bandwidth, block.images, block.labels, block.columns.neighbourhoods))
    return total


def measure(shards: ShardSet, run: Run[Any, Any] = serial) -> tuple[Quality, ImageSample, list[SparseImage]]:
    """The figures of a committed set, the sample they rest on and the images of its rarest neighbourhoods.

    Reads every file twice: the kernel's bandwidth must be known before the sums are taken. Raises DataError where a file
    disagrees with the manifest."""
    manifest = shards.manifest
    rows, workers, groups = manifest["rows"], manifest["workers"], manifest["neighbourhoods"] or []
    limits = {"id": rows, "copy": len(workers)}
    if "label" in manifest["labels"]["columns"]:
        limits["label"] = manifest["labels"]["num_classes"]
    if groups:
        limits["neighbourhood"] = len(groups)
    layout = Layout(tuple(manifest["image"]["shape"]), dtype=manifest["image"]["dtype"])
    listed = [
        (worker, ShardFile.from_json(file))
        for worker, entry in enumerate(workers)
        for file in entry["files"]
        if file["rows"]
    ]
    files = [file for _, file in listed]
    counted = largest(groups, min(MOST_COUNTED // len(workers), 4 * MOST_COUNTED // max(1, len(files))))
    reader = Reader(shards.store, shards.uri, layout, limits, counted)

    sparse = np.flatnonzero([group["sparse"] for group in groups])
    samples, images = zip(
        *run(partial(sample_file, reader, spread_evenly(rows, SAMPLE_ROWS), sparse), files), strict=True
    )
    sample = join(samples)
    bandwidth = mean_distance(sample.features)
    totals = [no_moments(reader, bandwidth) for _ in workers]
    for (worker, _), part in zip(listed, run(partial(file_moments, reader, bandwidth), files), strict=True):
        totals[worker] = merge(totals[worker], part)
    owners = sum(total.rows for total in totals)
    if owners != rows:
        raise DataError(
            f"{shards.uri}: the shards own {owners} examples, the manifest says {rows}; rerun with --overwrite"
        )
    dense = [not groups[number]["sparse"] for number in counted]
    figures = assess([entry["rows"] for entry in workers], totals, dense, sample.features, bandwidth)
    return figures, sample, rarest([image for part in images for image in part])
