"""The common part of strategies that can use vectors instead of images: a column of the input, or a separate table."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np

from pipeline.assignment.chunks import pass_pieces, point_pieces
from pipeline.assignment.ranks import split_by_key
from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError, JobError
from pipeline.core.shardset.attempt import write_task_file
from pipeline.core.shardset.damage import content_digest
from pipeline.core.shardset.layout import Layout
from pipeline.core.storage.store import Store
from pipeline.input.dataset import Dataset, Run, ranges, results_or_error
from pipeline.input.embedding_table import (
    EmbeddingTable,
    FilePart,
    KeptVectors,
    Vectors,
    embedding_dataset,
    is_table,
    open_embeddings,
    sort_vectors,
    vector_layout,
)
from pipeline.input.vectors import vector_view
from pipeline.strategies.base import Context, Strategy

Part = tuple[Ints, Vectors]


@dataclass(frozen=True)
class EmbeddingStrategy(Strategy):
    """A strategy that can use the vectors of --embedding.

    embedding_digest: a digest of the contents of an embedding table, None before the table was read. It replaces the
    path of the table in the identity of the run."""

    embedding_digest: str | None = None

    @property
    @abstractmethod
    def vectors(self) -> str | None:
        """The column, or the path of the table, that holds the vectors; None for images."""

    def sources(self) -> tuple[str, ...]:
        return (self.vectors,) if self.vectors and is_table(self.vectors) else ()

    def with_source_digest(self, store: Store, run: Run[Any, Any]) -> Self:
        """Return a copy with the digest of the embedding table. Reads the table once.

        Raises DataError if the digest differs from the digest that the set was made with."""
        if not (self.vectors and is_table(self.vectors)):
            return self
        table = open_embeddings(store, self.vectors)
        digest = content_digest(store, table.paths, run)
        if self.embedding_digest not in (None, digest):
            raise DataError(
                f"{table.uri} holds other embeddings ({digest}) than the set was made with ({self.embedding_digest});"
                " restore them, or shard the input again"
            )
        changes: dict[str, Any] = {"embedding": table.uri, "embedding_digest": digest}
        return replace(self, **changes)

    def params(self) -> dict[str, Any]:
        values = super().params()
        return values | {"embedding_digest": self.embedding_digest} if self.embedding_digest else values

    def identity(self) -> dict[str, Any]:
        """Return the parameters that identify the run: a table of embeddings counts by its digest, not by its path."""
        values = self.params()
        if self.embedding_digest:
            del values["embedding"]
        return values


def row_layout(dataset: Dataset, embedding: str | None) -> Layout:
    """Return the layout of the data that the strategy uses per row.

    Raises UsageError if rows have no such column, DataError if the path holds no embedding table."""
    if embedding is None:
        return dataset.layout
    if is_table(embedding):
        return vector_layout(open_embeddings(dataset.store, embedding).length)
    return vector_view(dataset, embedding).layout


def embedded_rows(context: Context, embedding: str) -> Dataset:
    """Return the same rows, with the vectors of a column or of a table in place of the images."""
    dataset = context.images.dataset
    if not is_table(embedding):
        return vector_view(dataset, embedding)
    with context.phase("join"):
        table = open_embeddings(dataset.store, embedding)
        embedding_rows = embedding_dataset(dataset, table, join_vectors(context, table))
        context.report(
            f"{embedding_rows.rows:,} embeddings of {table.length} numbers by {len(table.paths)} files of {table.uri}"
        )
    return embedding_rows


def join_vectors(context: Context, table: EmbeddingTable) -> tuple[KeptVectors, ...]:
    """Write the vectors of a table, in id order, to files of the attempt, and return these files.

    Vectors go through one shuffle, 8 + 4 d bytes per row; images are not read. A task holds three times 64 MiB of
    vectors. Raises DataError if a row of the input has no vector or several, or if the table has ids that the input
    lacks."""
    spark = context.images.context
    dataset = context.images.dataset
    rows = dataset.rows
    size = 4 * table.length
    # Every task of the shuffle sorts a range of ids, small enough to hold its vectors in memory.
    tasks = point_pieces(pass_pieces(rows, size, spark.defaultParallelism), rows * size)
    pieces = ranges(0, rows, tasks)
    starts = np.array([low for low, _ in pieces], np.int64)

    def vectors_by_piece(part: FilePart) -> Iterator[tuple[int, Part | str]]:
        """Yield the vectors of a part of a file by piece, or an error text."""
        try:
            for ids, vectors in table.read(part):
                if len(beyond := np.flatnonzero(ids >= rows)):
                    raise DataError(f"{part.path}: id {ids[beyond[0]]} is not one of the rows 0..{rows - 1}")
                for piece, places in split_by_key(np.searchsorted(starts, ids, side="right") - 1):
                    yield piece, (ids[places], vectors[places])
        except JobError as error:
            yield 0, str(error)

    keep = partial(_write_piece, dataset.store, context.scratch, table, tuple(pieces))
    parts = spark.parallelize(table.parts, min(len(table.parts), 10_000)).flatMap(vectors_by_piece)
    ranges_or_errors = parts.partitionBy(len(pieces), int).mapPartitionsWithIndex(keep).collect()
    return tuple(sorted(results_or_error(ranges_or_errors), key=lambda each: each.low))


def _write_piece(
    store: Store,
    folder: str,
    table: EmbeddingTable,
    pieces: tuple[tuple[int, int], ...],
    piece: int,
    vectors_or_errors: Iterable[tuple[int, Part | str]],
) -> Iterator[KeptVectors | str]:
    """Write the vectors of a piece in id order and yield the file, or an error text.

    Args:
        store: the file system.
        folder: the run's scratch folder.
        table: the embedding table, for error lines and the vector length.
        pieces: the id ranges [low, high) of all pieces.
        piece: the number of this piece.
        vectors_or_errors: vectors and error texts of this piece, in any order.
    """
    low, high = pieces[piece]
    parts: list[Part] = []
    for _, part in vectors_or_errors:
        if isinstance(part, str):
            yield part
            return
        parts.append(part)
    vectors, problem = sort_vectors(parts, low, high, table.length)
    if problem:
        yield f"{table.uri}: {problem}"
        return
    yield KeptVectors(low, high, write_task_file(store, folder, vectors.astype("<f4").tobytes()))
