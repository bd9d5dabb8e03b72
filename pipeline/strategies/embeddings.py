"""What the strategies share that look at ready vectors instead of images: a column of the input, or a table beside it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self
from uuid import uuid4

import numpy as np

from pipeline.assignment.chunks import pass_pieces, point_pieces
from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError, JobError
from pipeline.core.shardset.attempt import task_folder
from pipeline.core.shardset.damage import content_digest
from pipeline.core.shardset.layout import Layout
from pipeline.core.storage.store import Store
from pipeline.input.dataset import Dataset, Run, ranges
from pipeline.input.embedding_table import (
    EmbeddingTable,
    FilePart,
    KeptVectors,
    Vectors,
    embedded,
    in_order,
    is_table,
    open_embeddings,
    vector_layout,
)
from pipeline.input.vectors import vector_view
from pipeline.strategies.base import Context, Strategy

Part = tuple[Ints, Vectors]


@dataclass(frozen=True)
class EmbeddingStrategy(Strategy):
    """embedding_digest: of what the table of --embedding holds, once it was looked at. It stands for the table's place in
    what makes two runs the same."""

    embedding_digest: str | None = None

    @property
    @abstractmethod
    def vectors(self) -> str | None:
        """The column, or the path of the table, whose vectors are looked at; None for images."""

    def sources(self) -> tuple[str, ...]:
        return (self.vectors,) if self.vectors and is_table(self.vectors) else ()

    def prepared(self, store: Store, run: Run[Any, Any]) -> Self:
        """Reads the table once, for its digest."""
        for uri in self.sources():
            table = open_embeddings(store, uri)
            digest = content_digest(store, table.paths, run)
            if self.embedding_digest not in (None, digest):
                raise DataError(
                    f"{table.uri} holds other embeddings ({digest}) than the set was made with ({self.embedding_digest});"
                    " restore them, or shard the input again"
                )
            found: dict[str, Any] = {"embedding": table.uri, "embedding_digest": digest}
            return replace(self, **found)
        return self

    def params(self) -> dict[str, Any]:
        found = super().params()
        return found | {"embedding_digest": self.embedding_digest} if self.embedding_digest else found

    def identity(self) -> dict[str, Any]:
        found = self.params()
        if self.embedding_digest:
            del found["embedding"]
        return found


def seen_layout(dataset: Dataset, embedding: str | None) -> Layout:
    """What is looked at of a row. Raises UsageError for a column that rows have not, DataError for a table that is none."""
    if embedding is None:
        return dataset.layout
    if is_table(embedding):
        return vector_layout(open_embeddings(dataset.store, embedding).length)
    return vector_view(dataset, embedding).layout


def embedded_rows(context: Context, embedding: str) -> Dataset:
    """The same rows, with the vectors of a column or of a table for images."""
    dataset = context.images.dataset
    if not is_table(embedding):
        return vector_view(dataset, embedding)
    with context.phase("join"):
        table = open_embeddings(dataset.store, embedding)
        joined = embedded(dataset, table, join(context, table))
        context.report(
            f"{joined.rows:,} embeddings of {table.length} numbers by {len(table.paths)} files of {table.uri}"
        )
    return joined


def join(context: Context, table: EmbeddingTable) -> tuple[KeptVectors, ...]:
    """The vectors of a table in the order of ids, kept in files of the attempt.

    Raises DataError where a row of the input has none or several, or the table has others. Vectors go through one shuffle,
    8 + 4 d bytes a row; images are not read. A task holds three times 64 MiB of vectors."""
    spark, dataset = context.images.context, context.images.dataset
    rows, size = dataset.rows, 4 * table.length
    tasks = point_pieces(pass_pieces(rows, size, spark.defaultParallelism), rows * size)
    pieces = ranges(0, rows, tasks)
    starts = np.array([low for low, _ in pieces], np.int64)

    def look(part: FilePart) -> Iterator[tuple[int, Part | str]]:
        """The vectors of a part of a file by piece, or what is wrong with it: a task that raises is tried again."""
        try:
            for ids, vectors in table.read(part):
                if len(beyond := np.flatnonzero(ids >= rows)):
                    raise DataError(f"{part.path}: id {ids[beyond[0]]} is not one of the rows 0..{rows - 1}")
                places = np.searchsorted(starts, ids, side="right") - 1
                for place in np.unique(places).tolist():
                    mine = places == place
                    yield place, (ids[mine], vectors[mine])
        except JobError as error:
            yield 0, str(error)

    keep = partial(_keep, dataset.store, context.scratch, table, tuple(pieces))
    looked = spark.parallelize(table.parts, min(len(table.parts), 10_000)).flatMap(look)
    kept = looked.partitionBy(len(pieces), int).mapPartitionsWithIndex(keep).collect()
    if problems := [each for each in kept if isinstance(each, str)]:
        raise DataError(problems[0])
    return tuple(sorted((each for each in kept if isinstance(each, KeptVectors)), key=lambda each: each.low))


def _keep(
    store: Store,
    folder: str,
    table: EmbeddingTable,
    pieces: tuple[tuple[int, int], ...],
    piece: int,
    found: Iterable[tuple[int, Part | str]],
) -> Iterator[KeptVectors | str]:
    """The vectors of a piece in order, written to a file whose name is unique to this try of a task."""
    low, high = pieces[piece]
    parts: list[Part] = []
    for _, part in found:
        if isinstance(part, str):
            yield part
            return
        parts.append(part)
    vectors, problem = in_order(parts, low, high, table.length)
    if problem:
        yield f"{table.uri}: {problem}"
        return
    kept = KeptVectors(low, high, f"{folder}/{uuid4().hex}")
    task_folder(store, folder)
    store.write_new(kept.path, vectors.astype("<f4").tobytes())
    yield kept
