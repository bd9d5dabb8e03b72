"""Submodular sharding: each class is divided into representative blocks (RCD-SGD, He and Dube 2023)."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from pipeline.assignment.blocks import PART_ROWS, BlockRule, FunctionName, block_bytes, block_counts, owners_of_class
from pipeline.assignment.chunks import ChunkCounts, count_by_chunk, sum_counts
from pipeline.assignment.groups import GroupTable, Start, group_table, rows_by_worker
from pipeline.assignment.kept import KeptByRank, write_groups
from pipeline.assignment.ranks import split_by_key
from pipeline.clustering.gram import is_component_number
from pipeline.clustering.points import Points, concatenate_points
from pipeline.clustering.similarity import (
    Similarities,
    cosine_similarities,
    mean_distance,
    similarities,
    similarity_bytes,
)
from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError
from pipeline.core.hashing import is_drawn, keyed_hash
from pipeline.core.seeds import Purpose, word
from pipeline.core.shardset.ratios import Ratios, largest_remainder
from pipeline.core.specs import option
from pipeline.core.storage.store import Store
from pipeline.input.dataset import Block, Dataset
from pipeline.strategies.base import START_HELP, Context, FitResult, Grouping
from pipeline.strategies.embeddings import EmbeddingStrategy
from pipeline.strategies.neighbourhoods import (
    FIT_ROWS,
    TASK_MEMORY,
    LabelledPoints,
    Space,
    check_space,
    fit_space,
    project_rows,
)

if TYPE_CHECKING:
    from pyspark import RDD

Similarity = Callable[[npt.NDArray[np.int32]], Similarities]
SIGMA_ROWS = 10_000
MOST_TASKS = 2000  # more tasks would cost more than they save: each takes at least about 10 ms


@dataclass(frozen=True)
class Parts:
    """The groups of rows that are placed together: a class, or a random part of a large class.

    firsts: int64 [classes + 1], the number of the first group of each class; groups are numbered by class. key: the key
    of the hash that divides classes."""

    firsts: Ints
    key: int

    @classmethod
    def from_sizes(cls, sizes: Ints, most: int, key: int) -> Parts:
        """Divide each class into as few parts as have at most ``most`` rows on average, at least one."""
        return cls(np.concatenate([[0], np.cumsum(np.maximum(1, -(-sizes // most)))]), key)

    @property
    def number(self) -> int:
        return int(self.firsts[-1])

    @property
    def whole(self) -> bool:
        """True if every group is a whole class."""
        return self.number == len(self.firsts) - 1

    def __call__(self, labels: npt.NDArray[np.integer[Any]], ids: Ints) -> Ints:
        """Return the group of each row, int64 [rows]: its class, or a part of its class that a hash of its id chooses.

        labels: [rows]. ids: int64 [rows]."""
        if self.whole:
            return labels.astype(np.int64)
        part_in_class = keyed_hash(ids, self.key) % np.diff(self.firsts)[labels].astype(np.uint64)
        groups: Ints = self.firsts[labels] + part_in_class.astype(np.int64)
        return groups

    def capacities(self, sizes: Ints, of_class: Ints) -> Ints:
        """Divide the rows per class and worker among the groups, int64 [groups, workers].

        A worker gets its share of each part by largest remainder, in proportion to the rows that it still lacks.

        sizes: int64 [groups]. of_class: int64 [classes, workers]."""
        capacities = []
        for label, remaining in enumerate(of_class):
            for size in sizes[self.firsts[label] : self.firsts[label + 1]]:
                part = np.zeros_like(remaining)
                if size:
                    part = largest_remainder(np.array([size]), tuple(remaining.tolist()))[0]
                capacities.append(part)
                remaining = remaining - part
        return np.array(capacities)


@dataclass(frozen=True)
class OwnedByRank(Grouping):
    """The grouping that reads the owner of a row, by its rank, from the file of its group."""

    reads_images = False
    parts: Parts
    owned: KeptByRank

    def groups(self, block: Block) -> Ints:
        return self.parts(block.labels, block.ids)

    def workers(self, ids: Ints, groups: Ints, ranks: Ints, table: GroupTable) -> Ints:
        return self.owned(groups, ranks)


@dataclass(frozen=True)
class GroupTask:
    """The task that places groups of rows; it runs several in sequence if there are more than MOST_TASKS.

    Attributes:
        parts: the division of classes into groups.
        order: groups by size, the largest first.
        capacities: rows per group and worker, int64 [groups, workers].
        function: the set function of blocks.
        rule: the rule that selects the next block.
        ratios: the workers' shares; None: equal.
        similar: returns the similarities of the points of a group.
        store: the file system.
        scratch: the folder for the owners of rows.
    """

    parts: Parts
    order: tuple[int, ...]
    capacities: Ints
    function: FunctionName
    rule: BlockRule
    ratios: Ratios | None
    similar: Similarity
    store: Store
    scratch: str

    def split_by_group(self, blocks: Iterable[LabelledPoints]) -> Iterator[tuple[int, Points]]:
        """Yield (key, rows) for each group in each block, for the shuffle that brings a group into one task.

        The key is the group's position in ``order``, so that the tasks that start first place the largest groups."""
        places = {group: place for place, group in enumerate(self.order)}
        for block in blocks:
            ids = block.points.ids
            points = block.points.points
            groups = self.parts(block.labels, ids)
            for group, rows in split_by_key(groups):
                yield places[group], Points(ids[rows], points[rows])

    def place(self, grouped_points: Iterable[tuple[int, Points]]) -> Iterator[tuple[int, str]]:
        """Place some complete groups, and yield (group, file of the rows' owners)."""
        pieces = defaultdict(list)
        for place, points in grouped_points:
            pieces[self.order[place]].append(points)
        while pieces:
            group, parts = pieces.popitem()
            rows = concatenate_points(parts)
            similar = self.similar(rows.points[np.argsort(rows.ids)])
            owners = owners_of_class(similar, self.capacities[group], self.function, self.rule, self.ratios)
            yield group, write_groups(self.store, self.scratch, 0, owners.astype(np.int32)).path


def is_embedding(text: str) -> bool:
    """True for pca:C with a valid C, and for any other text: a column, or the path of a table."""
    share = re.fullmatch(r"pca:(\d+(?:\.\d+)?)", text)
    return is_component_number(float(share[1])) if share else bool(text) and not text.startswith("pca:")


@dataclass(frozen=True)
class Submodular(EmbeddingStrategy):
    """The most representative subsets of every class, one per worker (greedy submodular selection).

    Class counts are exact, as with ``stratified``; totals are within one row of the workers' shares. A class is placed
    in one task. A class of more than part_rows rows is divided into random parts, and every worker gets its share of
    each part, so that the parts' deviations from the class cancel out over the worker's rows.

    A task of n rows and p components holds 4 n^2 bytes of similarities. These take 2 p n^2 flop, graph-cut takes 2 n^2
    additions, and facility-location about 40 n^2. Only embeddings are shuffled, 4 p bytes per row. Raises UsageError if
    a task needs more than task_memory_gb.

    Attributes:
        function: the value of a block; see ``pipeline/assignment/blocks.py``.
        block_rule: the rule that selects the next block; see there.
        embedding: the vectors on which similarity is computed.
        fit_rows: rows that the PCA is fitted to.
        start: the rule for the first worker of each class.
        similarity: the similarity of two rows, see ``pipeline/clustering/similarity.py``.
        sigma_scope: the rows over which the width of the Gaussian is the mean distance.
        part_rows: the most rows of a class, on average, that are placed together.
        task_memory_gb: the memory that a task may take, in GB.
    """

    name: ClassVar[str] = "submodular"
    summary: ClassVar[str] = "the most representative subset of every class (greedy submodular selection)"
    looks_at_labels: ClassVar[bool] = True
    looks_at_pixels: ClassVar[bool] = True
    even_sizes: ClassVar[bool] = True
    even_classes: ClassVar[bool] = True
    function: FunctionName = option("graph-cut", "submodular function that rates a worker's rows of a class")
    block_rule: BlockRule = option(
        "micro",
        "worker that receives the next row: paper: the worker whose rows have the lowest value; size: the worker with the"
        " lowest share of its rows; micro: as paper, over blocks of equal size, of which a worker has as many as its ratio",
        advanced=True,
    )
    embedding: str = option(
        "pca:64",
        "vectors that define similarity: a number of principal components, a Parquet column, or the path of a table of"
        " (id, embedding)",
        metavar="pca:INT|COLUMN|URI",
        check=is_embedding,
        expected="pca:C, C components or a share of the variance below 1, the name of a column or the path of a table",
    )
    fit_rows: int | str = option("auto", **FIT_ROWS)
    start: Start = option("carry", START_HELP, advanced=True)
    similarity: Literal["gaussian", "cosine"] = option(
        "gaussian",
        "similarity of two rows: of their distance (gaussian), or of their angle as seen from the mean of the components,"
        " for vectors from 0 (cosine)",
        advanced=True,
    )
    sigma_scope: Literal["class", "all"] = option(
        "class",
        "rows whose mean distance is the width of the gaussian: those of the class, or of all classes, of which about"
        f" {SIGMA_ROWS:,} rows are measured",
        advanced=True,
    )
    part_rows: int = option(
        PART_ROWS,
        "rows of a class that are placed together, at most, on average; a larger class is divided by a hash of ids",
        least=100,
        advanced=True,
    )
    task_memory_gb: float = option(2.0, **TASK_MEMORY)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.similarity == "cosine" and self.sigma_scope != "class":
            raise UsageError("--similarity cosine has no sigma; leave out --sigma-scope all")

    def identity(self) -> dict[str, Any]:
        """Return the parameters that identify the run, so that sets of older versions stay valid."""
        later = {"similarity": "gaussian", "sigma_scope": "class"}
        return {name: value for name, value in super().identity().items() if later.get(name) != value}

    @property
    def vectors(self) -> str | None:
        return None if self.embedding.startswith("pca:") else self.embedding

    def check_input(self, dataset: Dataset) -> None:
        check_space(dataset, self.vectors, self.fit_rows)

    def fit(self, context: Context) -> FitResult:
        """Return the owner of each row: project the rows, shuffle them by group, and place each group in one task."""
        sizes = context.scan.label_counts.sum(axis=0)
        components = float(self.embedding.removeprefix("pca:")) if self.vectors is None else 1.0
        space = fit_space(
            context, embedding=self.vectors, components=components, whiten=False, fit_rows=self.fit_rows, seed=self.seed
        )
        parts = Parts.from_sizes(sizes, self.part_rows, word(self.seed, Purpose.CLASS_PARTS))
        with project_rows(context, space) as points:
            counts = context.scan.label_counts
            if not parts.whole:
                with context.phase("parts"):
                    counts = part_counts(context, points, parts)
                    context.report(f"{parts.number} parts of {len(sizes)} classes")
            task = self._task(context, parts, sizes, counts.sum(axis=0), self._similarity(context, space, points))
            with context.phase("memory"):
                self._report_memory(context, counts.sum(axis=0), space.projection.dimensions)
            with context.phase("blocks"):
                # Keyed by position in the order of sizes, so that the largest groups start first.
                keyed_points = points.mapPartitions(task.split_by_group)
                points_by_group = keyed_points.partitionBy(min(len(task.order), MOST_TASKS), int)
                paths = dict(points_by_group.mapPartitions(task.place).collect())
                context.report(f"{len(paths)} groups placed by {self.function}")
        grouping = OwnedByRank(parts, KeptByRank(context.images.dataset.store, paths))
        return FitResult(grouping, counts, start=self.start, params=space.params, models=space.models)

    def _similarity(self, context: Context, space: Space, points: RDD[LabelledPoints]) -> Similarity:
        """Return the function that computes the similarities of a group's points.

        sigma_scope all costs the distances of SIGMA_ROWS^2 pairs, in one task."""
        if self.similarity == "cosine":
            pca = space.models.get("pca")
            # Points are not centred, and would all lie in one direction.
            centre = space.projection(np.rint(pca.mean)[None].astype(np.uint8))[0] if pca else 0
            return partial(cosine_similarities, centre=np.asarray(centre, np.int64))
        if self.sigma_scope == "class":
            return similarities
        with context.phase("sigma"):
            key = word(self.seed, Purpose.SIMILARITY_WIDTH)
            draw = partial(is_drawn, rows=context.scan.rows, count=SIGMA_ROWS, key=key)
            few = points.map(lambda part: part.points.points[draw(part.points.ids)])
            sigma = few.coalesce(1).mapPartitions(lambda parts: [mean_distance(np.concatenate(list(parts)))]).first()
            context.report(f"sigma {math.ldexp(sigma, -space.projection.exponent):g}")
            return partial(similarities, sigma=sigma)

    def _task(
        self, context: Context, parts: Parts, of_classes: Ints, of_groups: Ints, similar: Similarity
    ) -> GroupTask:
        """Return the task that places groups.

        Args:
            context: the run.
            parts: the division of classes into groups.
            of_classes: rows of each class, int64 [classes].
            of_groups: rows of each group, int64 [groups].
            similar: returns the similarities of the points of a group.
        """
        table = group_table(of_classes, context.num_workers, self.start, "never", context.ratios)
        # The largest groups start first, so that no long task is the last.
        order = sorted(np.flatnonzero(of_groups).tolist(), key=lambda group: (-of_groups[group], group))
        return GroupTask(
            parts=parts,
            order=tuple(order),
            capacities=parts.capacities(of_groups, rows_by_worker(table).T),
            function=self.function,
            rule=self.block_rule,
            ratios=context.ratios,
            similar=similar,
            store=context.images.dataset.store,
            scratch=context.scratch,
        )

    def _report_memory(self, context: Context, sizes: Ints, dimensions: int) -> None:
        """Report the memory that the task of the largest group needs. Raises UsageError if it is too much.

        Args:
            context: the run.
            sizes: rows per group, int64 [groups].
            dimensions: numbers per embedding.
        """
        rows = int(sizes.max())
        micro = context.ratios if self.block_rule == "micro" else None
        blocks = sum(block_counts(micro)) if micro else context.num_workers
        needed = (similarity_bytes(rows, dimensions) + block_bytes(rows, blocks, self.function)) / 1e9
        need = f"the largest group has {rows:,} rows, for which a task needs {needed:.2f} GB"
        if needed > self.task_memory_gb:
            raise UsageError(
                f"{need}, more than --task-memory-gb {self.task_memory_gb:g}: use fewer --part-rows,"
                " or raise --task-memory-gb if executors have so much memory per task"
            )
        tasks = min(len(np.flatnonzero(sizes)), MOST_TASKS)
        context.report(f"{tasks} tasks, the largest first: {need}")


def part_counts(context: Context, points: RDD[LabelledPoints], parts: Parts) -> Ints:
    """Return the rows by chunk and group, int64 [chunks, groups].

    The driver receives about one number per chunk and group."""
    bounds = context.bounds

    def count(blocks: Iterable[LabelledPoints]) -> Iterator[ChunkCounts]:
        """Yield the counts of a partition's rows by chunk and group; nothing if it has no rows."""
        reports = [
            count_by_chunk(block.points.ids, parts(block.labels, block.points.ids), parts.number, bounds)
            for block in blocks
        ]
        if reports:
            yield reduce(add, reports)

    return sum_counts(points.mapPartitions(count).collect(), len(bounds), parts.number)
