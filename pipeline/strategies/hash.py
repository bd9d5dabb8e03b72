"""Buckets of locality-sensitive hash functions as neighbourhoods: no clustering, one pass over the images."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from pipeline.assignment.groups import SparseIf, Start
from pipeline.clustering import hashes as functions_of_rows
from pipeline.clustering.gram import LARGE_ROWS, MAX_PIXELS, MOST_BYTES, requested_rows, rows_at_most
from pipeline.clustering.hashes import CENTROIDS, MOST_FUNCTIONS, SAMPLE_ROWS, Family, Hashes, check_dimensions
from pipeline.clustering.points import ONE_TASK_BYTES
from pipeline.clustering.projection import Grid
from pipeline.clustering.reduction import tree_reduce
from pipeline.core.arrays import Ints
from pipeline.core.errors import UnsuitableError, UsageError
from pipeline.core.hashing import is_drawn
from pipeline.core.seeds import Purpose, word
from pipeline.core.specs import option
from pipeline.input.dataset import Block, Dataset
from pipeline.spark.images import Images
from pipeline.strategies.base import (
    SPARSE_HELP,
    START_HELP,
    Context,
    FitResult,
    StoredGroups,
)
from pipeline.strategies.embeddings import EmbeddingStrategy, row_layout
from pipeline.strategies.neighbourhoods import EMBEDDING, FIT_ROWS, feature_grid, group_rows, images_or_vectors

if TYPE_CHECKING:
    from pyspark import RDD

FITTED = (
    "approximate number of rows, drawn by id, that the hash functions are fitted to, or all; auto: 10,000 (2,000 very large"
    " images)"
)
FUNCTIONS = 8
BUCKET_ROWS = 128
MOST_BUCKETS = 1 << 18
MOST_CELLS = 1 << 26  # counts by bucket, chunk and task that the driver holds, 8 bytes each


@dataclass(frozen=True)
class BucketSizes:
    """The sizes of buckets, in ascending order of their keys.

    keys, sizes: int64 [buckets]. If there are more than MOST_BUCKETS, the first MOST_BUCKETS + 1."""

    keys: Ints
    sizes: Ints

    @classmethod
    def from_keys(cls, keys: Iterable[Ints]) -> BucketSizes:
        """Return the buckets of some rows, from the rows' keys."""
        unique_keys, sizes = np.unique(np.concatenate([np.empty(0, np.int64), *keys]), return_counts=True)
        return cls(unique_keys[: MOST_BUCKETS + 1], sizes[: MOST_BUCKETS + 1])

    def __add__(self, other: BucketSizes) -> BucketSizes:
        """Return the summed sizes of both. More than MOST_BUCKETS + 1 buckets are cut off: the run then fails in any
        case."""
        keys = np.concatenate([self.keys, other.keys])
        sizes = np.concatenate([self.sizes, other.sizes])
        unique_keys, places = np.unique(keys, return_inverse=True)
        total = np.zeros(len(unique_keys), np.int64)
        np.add.at(total, places, sizes)
        return BucketSizes(unique_keys[: MOST_BUCKETS + 1], total[: MOST_BUCKETS + 1])

    def numbers(self) -> Ints:
        """Return the number of every bucket in key order, int64.

        The largest bucket is number 0; of equal sizes, the lower key is first."""
        numbers = np.empty(len(self.keys), np.int64)
        numbers[np.lexsort((self.keys, -self.sizes))] = np.arange(len(self.keys))
        return numbers


@dataclass(frozen=True)
class KeyedRows:
    """The bucket keys of a block's rows. ids, keys: int64 [rows]."""

    ids: Ints
    keys: Ints


def numbers_of(images: npt.NDArray[np.uint8], grid: Grid | None) -> npt.NDArray[np.uint8] | npt.NDArray[np.int32]:
    """Return the numbers that are hashed, from images uint8 [rows, bytes]: pixels, or features on their grid."""
    return images if grid is None else grid(images)


def key_rows(hashes: Hashes, grid: Grid | None, blocks: Iterable[Block]) -> Iterator[KeyedRows]:
    for block in blocks:
        yield KeyedRows(block.ids, hashes.buckets(numbers_of(block.images, grid)))


def rows_to_sample(fit_rows: int | str, rows: int, record_bytes: int) -> int:
    """Return the number of rows that the hash functions are fitted to.

    The default is SAMPLE_ROWS, or fewer for very large rows. Raises UsageError if more are requested than one task can
    hold.

    Args:
        fit_rows: a number of rows, "all" or "auto".
        rows: rows of the input.
        record_bytes: bytes per row.
    """
    large = record_bytes > MAX_PIXELS
    most = rows_at_most(record_bytes) if large else MOST_BYTES // record_bytes
    if fit_rows == "auto":
        fit_rows = min(LARGE_ROWS, most) if large else SAMPLE_ROWS
    num_rows = requested_rows(fit_rows, rows)
    if num_rows > most:
        raise UsageError(
            f"hash functions are fitted to at most {most:,} rows of {record_bytes:,} bytes; leave out --fit-rows {fit_rows}"
        )
    return num_rows


@dataclass(frozen=True)
class Hash(EmbeddingStrategy):
    """Buckets of locality-sensitive hashing as neighbourhoods, each dealt round robin; sparse ones go to every worker.

    Buckets are numbered by size, the largest first. Ignores labels, so class balance is not guaranteed. Costs 2 d M
    flop per row, for d numbers and M functions, and two passes over the images (the fit reads only a sample). The
    driver holds about 8 bytes per bucket for every chunk and task. Raises UsageError if there are too many buckets
    (MOST_BUCKETS, MOST_CELLS).

    Attributes:
        family: the kind of hash functions, see ``pipeline/clustering/hashes.py``.
        functions: the number of functions that the rows of a bucket agree on.
        width: the step of ``lsh``.
        centroids: the number of centroids per function of ``kmeans``.
        embedding: a Parquet column, or a table by id, whose vectors are hashed unchanged instead of images.
        fit_rows: the number of rows that the functions are fitted to.
        sparse_if: a bucket goes to all n workers if size <= n ("le"), size < n ("lt"), or never.
        start: the rule for the first worker of each bucket.
    """

    name: ClassVar[str] = "hash"
    summary: ClassVar[str] = (
        "buckets of locality-sensitive hashing dealt round robin, sparse buckets copied to every worker"
    )
    looks_at_pixels: ClassVar[bool] = True
    copies_rows: ClassVar[bool] = True
    family: Family = option(
        "dsh",
        "hash functions: steps of equal width along random directions (lsh), sides of random hyperplanes (sign), halves"
        " along principal directions (dsh), or the nearest of some k-means centroids (kmeans)",
    )
    functions: int | None = option(
        None,
        "number of hash functions, whose values all rows of a bucket share",
        least=1,
        most=MOST_FUNCTIONS,
        shown=f"{FUNCTIONS}, fewer if that leaves less than {BUCKET_ROWS} rows, or 4 per worker, per combination of bits",
    )
    width: float | None = option(
        None,
        "width of the steps of lsh, in grey levels or in units of the embedding",
        above=0,
        most=1e12,
        expected="a positive number of at most 1e12",
        shown="four times the median distance between nearest neighbours in a sample",
        advanced=True,
    )
    centroids: int | None = option(
        None, "number of centroids per function of kmeans", least=2, most=1024, shown=str(CENTROIDS), advanced=True
    )
    embedding: str | None = option(None, **EMBEDDING)
    fit_rows: int | str = option("auto", **FIT_ROWS | {"help": FITTED})
    sparse_if: SparseIf = option("le", SPARSE_HELP)
    start: Start = option("carry", START_HELP, advanced=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width is not None and self.family != "lsh":
            raise UsageError(f"--family {self.family} has no width; leave out --width {self.width:g}")
        if self.centroids is not None and self.family != "kmeans":
            raise UsageError(f"--family {self.family} has no centroids; leave out --centroids {self.centroids}")

    def params(self) -> dict[str, Any]:
        values = super().params()
        if self.centroids is None:  # as in manifests of older versions, whose sets stay valid
            del values["centroids"]
        return values

    @property
    def larger_groups(self) -> str:
        return "fewer --functions"

    @property
    def modules(self) -> tuple[str, ...]:
        return ("pipeline.clustering.hash_model",)

    @property
    def vectors(self) -> str | None:
        return self.embedding

    def check_input(self, dataset: Dataset) -> None:
        layout = row_layout(dataset, self.embedding)
        rows_to_sample(self.fit_rows, dataset.rows, layout.record_bytes)
        check_dimensions(self.family, math.prod(layout.shape), layout.dtype)

    def fit(self, context: Context) -> FitResult:
        """Return the buckets of all rows: fit the functions to a sample, hash every row, and number the buckets by
        size."""
        from pipeline.clustering.hash_model import HashModel  # loads spark.ml, which --help and most tasks do without

        images = images_or_vectors(context, self.embedding)
        grid = feature_grid(context, images) if images.dataset.layout.dtype == "float32" else None
        hashes = self.fit_functions(context, images, grid)
        with bucket_keys(context, images, hashes, grid) as rows:
            with context.phase("buckets"):
                # The whole key table goes to every task below, so its size is checked first.
                sizes = rows.mapPartitions(lambda part: [BucketSizes.from_keys(row.keys for row in part)])
                buckets = tree_reduce(sizes, add)
                number = len(buckets.keys)
                check_bucket_number(number, len(context.bounds) + rows.getNumPartitions(), self.family)
                few = int((buckets.sizes <= context.num_workers).sum())
                context.report(f"{number:,} buckets, {few:,} of at most {context.num_workers:,} rows")
            with context.phase("assign"):
                keys = buckets.keys
                numbers = buckets.numbers()
                groups = rows.map(lambda part: (part.ids, numbers[np.searchsorted(keys, part.keys)]))
                grouping, counts = group_rows(context, groups, number)
        params: dict[str, Any] = {"functions": hashes.functions, "buckets": number, "rows_fitted": hashes.rows}
        if self.family == "lsh":
            params["width"] = hashes.width / 2.0 ** (grid.exponent if grid else 0)
        model = HashModel(hashes, grid, keys[np.argsort(numbers)])
        return FitResult(grouping, counts, self.start, self.sparse_if, params, {"hashes": model})

    def refit(self, context: Context, stored_groups: StoredGroups) -> FitResult:
        return stored_groups.fit_result(self.start, self.sparse_if)

    def fit_functions(self, context: Context, images: Images, grid: Grid | None) -> Hashes:
        """Fit the hash functions to a sample of the rows, in one task."""
        with context.phase("functions"):
            rows = context.scan.rows
            num_rows = rows_to_sample(self.fit_rows, rows, images.dataset.record_bytes)
            if num_rows < rows:
                key = word(self.seed, Purpose.FIT_ROWS)
                sample = images.select_rows(partial(is_drawn, rows=rows, count=num_rows, key=key))
            else:
                sample = images.blocks().map(lambda block: block.images)
            width = self.width and self.width * 2.0 ** (grid.exponent if grid else 0)
            # The default leaves 128 rows, and 4 per worker, per combination of bits, so that few buckets are sparse.
            combinations = rows / max(BUCKET_ROWS, 4 * context.num_workers)
            centroids = self.centroids or CENTROIDS
            base = centroids if self.family == "kmeans" else 2
            functions = self.functions or min(FUNCTIONS, max(1, int(math.log2(max(1, combinations)) / math.log2(base))))
            family = self.family
            seed = self.seed

            def fit(blocks: Iterable[npt.NDArray[np.uint8]]) -> list[Hashes]:
                """Return the functions fitted to the blocks of the whole sample, which one task holds."""
                sample_rows = numbers_of(np.concatenate(list(blocks)), grid)
                return [functions_of_rows.fit(sample_rows, family, functions, seed, width=width, centroids=centroids)]

            hashes = sample.coalesce(1, shuffle=True).mapPartitions(fit).first()
            context.report(f"{hashes.functions} functions, fitted to {hashes.rows:,} rows")
            return hashes


def check_bucket_number(buckets: int, parts: int, family: Family) -> None:
    """Raise UnsuitableError if there are more buckets than can be dealt.

    Args:
        buckets: number of buckets.
        parts: number of chunks and tasks; the driver holds a count of every bucket for each.
        family: hash functions that made the buckets.
    """
    most = min(MOST_BUCKETS, MOST_CELLS // parts)
    if buckets > most:
        wider = " or a larger --width" * (family == "lsh")
        raise UnsuitableError(f"the rows are in more than {most:,} buckets; use fewer --functions{wider}")


@contextmanager
def bucket_keys(context: Context, images: Images, hashes: Hashes, grid: Grid | None) -> Iterator[RDD[KeyedRows]]:
    """Yield the bucket keys of all rows, computed once and persisted on the executors until the ``with`` block ends."""
    from pyspark import StorageLevel  # not at the top: flags of strategies are read without Spark

    with context.phase("hash"):
        size = 16 * context.scan.rows  # bytes: id and key, int64 each
        rows = images.blocks(kept_bytes=size).mapPartitions(partial(key_rows, hashes, grid))
        # In memory, many keys would take heap that the tasks need.
        rows.persist(StorageLevel.DISK_ONLY if size > ONE_TASK_BYTES else StorageLevel.MEMORY_AND_DISK)
        count = rows.map(lambda part: len(part.ids)).sum()
        context.report(f"{count:,} rows hashed")
    try:
        yield rows
    finally:
        rows.unpersist()
