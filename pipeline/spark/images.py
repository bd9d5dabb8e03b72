"""A dataset in Spark: an RDD of blocks for the jobs, a DataFrame for users. Tasks read their own ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.assignment.chunks import pass_pieces, point_pieces
from pipeline.core.arrays import Ints
from pipeline.core.shardset.schema import SPARK_TYPES, record_schema
from pipeline.input.dataset import Block, Dataset, ranges
from pipeline.input.records import record_batch

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext
    from pyspark.sql import DataFrame

T = TypeVar("T")
R = TypeVar("R")


def run_on(context: SparkContext) -> Callable[[Callable[[T], R], Sequence[T]], list[R]]:
    """Return ``run(fn, items)``, which runs one task per item (at most 10,000) and returns ordered results."""

    def run(fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
        items = list(items)
        return context.parallelize(items, max(1, min(len(items), 10_000))).map(fn).collect()

    return run


@dataclass(frozen=True)
class Images:
    """The rows of a data set, read by Spark's tasks."""

    context: SparkContext
    dataset: Dataset

    def pieces(self) -> list[tuple[int, int]]:
        """Return the id ranges for expensive passes; see ``pass_pieces``."""
        rows = self.dataset.rows
        record_bytes = self.dataset.record_bytes
        return ranges(0, rows, pass_pieces(rows, record_bytes, self.context.defaultParallelism))

    def blocks(self, kept_bytes: int = 0) -> RDD[Block]:
        """Return the rows in blocks of at most 2,048, read lazily by the task that uses them.

        kept_bytes: the size of all data that executors will persist for them; more data give more partitions."""
        dataset = self.dataset
        pieces = self.pieces()
        if (finer := point_pieces(len(pieces), kept_bytes)) > len(pieces):
            pieces = ranges(0, dataset.rows, finer)
        return self.context.parallelize(pieces, len(pieces)).flatMap(lambda piece: dataset.read(*piece))

    def select_rows(self, select: Callable[[Ints], npt.NDArray[np.bool_]]) -> RDD[npt.NDArray[np.uint8]]:
        """Return the images of the rows that ``select(ids)`` selects, uint8 [rows, bytes] in blocks; see ``read_some``."""
        dataset = self.dataset
        pieces = self.pieces()
        return self.context.parallelize(pieces, len(pieces)).flatMap(lambda piece: dataset.read_some(*piece, select))

    def frame(self, partitions: int | None = None) -> DataFrame:
        """Return the table ``id, label[, coarse_label][, target], image``.

        The metadata of ``image`` hold its shape, dtype and layout. partitions: their number; default: as for a pass."""
        from pyspark.sql import SparkSession

        spark = SparkSession.builder.getOrCreate()
        dataset = self.dataset
        pieces = self.pieces()
        if partitions is not None:
            pieces = ranges(0, dataset.rows, min(partitions, dataset.rows))
        schema = record_schema(replace(dataset.layout, attributes=()), neighbourhood=False, copy=False)

        # spark.range only carries piece numbers, one per partition; the tasks read the rows themselves.
        def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for piece in batch.column(0).to_pylist():
                    for block in dataset.read(*pieces[piece]):
                        yield record_batch(schema, block)

        ddl = ", ".join(f"{field.name} {SPARK_TYPES[str(field.type)]}" for field in schema)
        table = spark.range(0, len(pieces), 1, len(pieces)).mapInArrow(read, ddl)
        metadata = {key.decode(): value.decode() for key, value in schema.field("image").metadata.items()}
        return table.withMetadata("image", metadata)
