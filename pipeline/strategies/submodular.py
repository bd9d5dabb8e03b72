"""Each class cut into blocks that are as like it as can be: greedy choice by a submodular function."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pipeline.arrays import Ints
from pipeline.assignment.blocks import BlockRule, FunctionName, block_bytes, block_counts, owners_of_class
from pipeline.assignment.groups import GroupTable, Start, group_table, rows_by_worker
from pipeline.assignment.kept import KeptByRank, keep
from pipeline.clustering.gram import is_component_number
from pipeline.clustering.points import Points, gather
from pipeline.clustering.similarity import held_bytes, similarities
from pipeline.errors import UsageError
from pipeline.input.dataset import Block, Dataset
from pipeline.shardset.ratios import Ratios
from pipeline.specs import option
from pipeline.storage.store import Store
from pipeline.strategies.base import START_HELP, Context, Fitted, Grouping, Strategy
from pipeline.strategies.neighbourhoods import FIT_ROWS, LabelledPoints, check_space, fit_space, projected


@dataclass(frozen=True)
class OwnedByRank(Grouping):
    """The groups are the classes; the owner of a row stands in the file of its class."""

    reads_images = False
    owned: KeptByRank

    def groups(self, block: Block) -> Ints:
        return block.labels.astype(np.int64)

    def workers(self, ids: Ints, groups: Ints, ranks: Ints, table: GroupTable) -> Ints:
        return self.owned(groups, ranks)


@dataclass(frozen=True)
class ClassTask:
    """What is done to one class, in a task of its own. capacities: int64 [classes, workers]; order: classes by size."""

    order: tuple[int, ...]
    capacities: Ints
    function: FunctionName
    rule: BlockRule
    ratios: Ratios | None
    store: Store
    scratch: str

    def by_class(self, parts: Iterable[LabelledPoints]) -> Iterator[tuple[int, Points]]:
        """The rows of each class among some, with its place in the order."""
        for part in parts:
            for place, label in enumerate(self.order):
                rows = part.labels == label
                if rows.any():
                    yield place, Points(part.points.ids[rows], part.points.points[rows])

    def place(self, parts: Iterable[tuple[int, Points]]) -> Iterator[tuple[int, str]]:
        """The owners of one class's rows, kept: (class, file)."""
        found = list(parts)
        if not found:
            return
        label = self.order[found[0][0]]
        rows = gather(points for _, points in found)
        points = rows.points[np.argsort(rows.ids)]
        del found, rows
        owners = owners_of_class(similarities(points), self.capacities[label], self.function, self.rule, self.ratios)
        yield label, keep(self.store, self.scratch, 0, owners.astype(np.int32)).path


def is_embedding(text: str) -> bool:
    share = re.fullmatch(r"pca:(\d+(?:\.\d+)?)", text)
    return is_component_number(float(share[1])) if share else bool(text) and not text.startswith("pca:")


@dataclass(frozen=True)
class Submodular(Strategy):
    """function: what a block is worth; block_rule: which block is next; see ``pipeline/assignment/blocks.py``.

    Exact class counts, as stratified's; totals within one of their shares. Of n rows of a class and B blocks a task holds
    4 n^2 bytes of similarities, and takes 128 n^2 flop for them and about n^2 additions a function: graph-cut 2 n^2,
    facility-location about 40 n^2 (lazy). Only embeddings go through a shuffle, 4 bytes a component and row.
    Raises UsageError where the largest class needs more than task_memory_gb."""

    name: ClassVar[str] = "submodular"
    summary: ClassVar[str] = "each class in blocks that are as like it as can be (greedy, submodular)"
    looks_at_labels: ClassVar[bool] = True
    looks_at_pixels: ClassVar[bool] = True
    even_sizes: ClassVar[bool] = True
    even_classes: ClassVar[bool] = True
    function: FunctionName = option("graph-cut", "what the rows of a class on one worker are worth together")
    block_rule: BlockRule = option(
        "micro",
        "who gets a row next: paper: the worker whose rows are worth least; size: whose part is filled least; micro: as"
        " paper, among equal blocks of which a worker has as many as its ratio says",
    )
    embedding: str = option(
        "pca:64",
        "what similarity is measured on: principal components of images, or the vectors of a Parquet column as they are",
        metavar="pca:C|COLUMN",
        check=is_embedding,
        expected="pca:C, C components or a share of the variance below 1, or the name of a column",
    )
    fit_rows: int | str = option("auto", **FIT_ROWS)
    start: Start = option("carry", START_HELP)
    task_memory_gb: float = option(
        2.0, "memory that the task of a class may take, refused beyond", metavar="GB", above=0, recorded=False
    )

    @property
    def column(self) -> str | None:
        return None if self.embedding.startswith("pca:") else self.embedding

    def draws(self) -> bool:
        """The seed chooses the rows that the PCA is fitted to."""
        return self.column is None and self.fit_rows != "all"

    def check_input(self, dataset: Dataset) -> None:
        check_space(dataset, self.column, self.fit_rows)

    def fit(self, context: Context) -> Fitted:
        sizes = context.scan.label_counts.sum(axis=0)
        components = float(self.embedding.removeprefix("pca:")) if self.column is None else 1.0
        space = fit_space(
            context, embedding=self.column, components=components, whiten=False, fit_rows=self.fit_rows, seed=self.seed
        )
        task = self._task(context, sizes)
        with context.phase("memory"):
            self._tell_memory(context, sizes, space.projection.dimensions)
        with projected(context, space) as points, context.phase("blocks"):
            moved = points.mapPartitions(task.by_class).partitionBy(len(task.order), int)
            paths = dict(moved.mapPartitions(task.place).collect())
            context.report(f"{len(paths)} classes placed by {self.function}")
        grouping = OwnedByRank(KeptByRank(context.images.dataset.store, paths))
        return Fitted(grouping, context.scan.label_counts, start=self.start, params=space.params, models=space.models)

    def _task(self, context: Context, sizes: Ints) -> ClassTask:
        table = group_table(sizes, context.num_workers, self.start, "never", context.ratios)
        order = sorted(np.flatnonzero(sizes).tolist(), key=lambda label: (-sizes[label], label))
        return ClassTask(
            tuple(order),
            rows_by_worker(table).T,
            self.function,
            self.block_rule,
            context.ratios,
            context.images.dataset.store,
            context.scratch,
        )

    def _tell_memory(self, context: Context, sizes: Ints, dimensions: int) -> None:
        """What the task of the largest class holds. Raises UsageError where that is too much."""
        rows = int(sizes.max())
        micro = context.ratios if self.block_rule == "micro" else None
        blocks = sum(block_counts(micro)) if micro else context.num_workers
        needed = (held_bytes(rows, dimensions) + block_bytes(rows, blocks, self.function)) / 1e9
        told = f"class {int(sizes.argmax())} has {rows:,} rows, whose task takes {needed:.2f} GB"
        if needed > self.task_memory_gb:
            raise UsageError(
                f"{told}, more than --task-memory-gb {self.task_memory_gb:g}; raise it if an executor has that for a task,"
                " or use class_cluster"
            )
        context.report(f"a task a class, the largest first: {told}")
