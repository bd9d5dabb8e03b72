"""What the strategies that look at neighbourhoods share: their parameters, and the way from images to integer points."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from pyspark import RDD, StorageLevel

from pipeline.arrays import Ints
from pipeline.assignment.chunks import ChunkCounts, all_counts, count_by_chunk
from pipeline.assignment.kept import KeptGroups, KeptRange, keep
from pipeline.clustering.gram import rows_to_fit
from pipeline.clustering.lloyd import MOST_CLUSTERS
from pipeline.clustering.points import ONE_TASK_BYTES, Points
from pipeline.clustering.projection import Projection
from pipeline.hashing import keyed_hash
from pipeline.input.dataset import Block
from pipeline.seeds import Purpose, word
from pipeline.specs import option
from pipeline.strategies.base import Context, Grouping, Strategy

if TYPE_CHECKING:
    from pipeline.clustering.pca import BlockPCAModel


def count_or_word(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def is_fit_rows(rows: int | str) -> bool:
    return rows in ("auto", "all") or (isinstance(rows, int) and rows >= 100)


def is_component_number(components: float) -> bool:
    """Whether it is a whole number of components, or a share of the variance."""
    return math.isfinite(components) and components > 0 and (components <= 1 or components == int(components))


COMPONENTS: dict[str, Any] = {
    "help": "principal components: a count, or a share of the variance below 1",
    "metavar": "C",
    "check": is_component_number,
    "expected": "a whole number or a share of variance in (0, 1)",
}


@dataclass(frozen=True)
class NeighbourhoodStrategy(Strategy):
    """clusters: None for twice the number of classes. fit_rows: see ``gram.rows_to_fit``."""

    looks_at_pixels: ClassVar[bool] = True
    clusters: int | None = option(
        None, "neighbourhoods in all", metavar="K", least=1, most=MOST_CLUSTERS, shown="twice the classes"
    )
    components: float = option(50.0, **COMPONENTS)
    whiten: bool = option(False, "scale components to equal variance")
    fit_rows: int | str = option(
        "auto",
        "rows that the PCA is fitted to: all, or about N, drawn by their ids",
        metavar="N|all",
        parse=count_or_word,
        check=is_fit_rows,
        expected="all, auto or a whole number of at least 100",
        shown="about as many as cost what the eigenvectors cost: 10,000, or three a pixel",
    )
    max_iter: int = option(150, "k-means iterations", metavar="I", least=1)
    tol: float = option(
        1e-4, "k-means tolerance, as scikit-learn's", metavar="T", least=0, expected="a number of 0 or more"
    )

    def __post_init__(self) -> None:
        if self.fit_rows is None:  # as it was written before there was a default of fewer
            object.__setattr__(self, "fit_rows", "all")
        super().__post_init__()


@dataclass(frozen=True)
class LabelledPoints:
    """labels int32 [rows] beside the points of the same rows."""

    labels: np.ndarray[Any, np.dtype[np.int32]]
    points: Points


def project(projection: Projection, blocks: Iterable[Block]) -> Iterator[LabelledPoints]:
    for block in blocks:
        yield LabelledPoints(block.labels, Points(block.ids, projection(block.images)))


def is_drawn(rows: int, wanted: int, seed: int, ids: Ints) -> npt.NDArray[np.bool_]:
    """Whether the keyed hash of an id is among about the ``wanted`` lowest of all ``rows``: the same rows for any
    partitioning."""
    return keyed_hash(ids, word(seed, Purpose.FIT_ROWS)) < np.uint64((wanted << 64) // rows)


def fit_pca(context: Context, *, components: float, whiten: bool, fit_rows: int | str, seed: int) -> BlockPCAModel:
    """Of all rows, or of about as many as ``fit_rows`` asks for; the mean is theirs too."""
    from pipeline.clustering.pca import BlockPCA  # loads spark.ml, which --help and most tasks do without

    with context.phase("pca"):
        pixels = context.images.dataset.record_bytes
        rows = context.scan.rows
        wanted = rows_to_fit(fit_rows, rows, pixels)
        if wanted < rows:
            images = context.images.some(partial(is_drawn, rows, wanted, seed))
        else:
            images = context.images.blocks().map(lambda block: block.images)
        model = BlockPCA(components=float(components), whiten=whiten).fit_blocks(images, pixels)
        number = len(model.spectrum.variances)
        share = model.explained_variance_ratio.sum()
        fitted = f", fitted to {model.rows:,} rows (--fit-rows all for every row)" if wanted < rows else ""
        context.report(f"{number} components, {share:.1%} of the variance{', whitened' if whiten else ''}{fitted}")
        return model


@contextmanager
def projected(context: Context, model: BlockPCAModel) -> Iterator[RDD[LabelledPoints]]:
    """The points of all rows, kept by the executors for as long as the block runs."""
    with context.phase("project"):
        size = 4 * context.scan.rows * model.projection.dimensions
        points = context.images.blocks(kept_bytes=size).mapPartitions(partial(project, model.projection))
        # Of many, a JVM's heap would hold all that it may and then some, beside what its tasks need; and they pass through a
        # pipe to Python either way.
        points.persist(StorageLevel.DISK_ONLY if size > ONE_TASK_BYTES else StorageLevel.MEMORY_AND_DISK)
        rows = points.map(lambda part: len(part.labels)).sum()
        context.report(f"{rows:,} points of {model.projection.dimensions} integers")
    try:
        yield points
    finally:
        points.unpersist()


@dataclass(frozen=True)
class ByNeighbourhood(Grouping):
    """As the pass over the points has found them."""

    neighbourhoods = True
    found: KeptGroups

    def groups(self, block: Block) -> Ints:
        return self.found(block.ids)


def group_points(
    context: Context, points: RDD[LabelledPoints], groups: Callable[[LabelledPoints], Ints], num_groups: int
) -> tuple[ByNeighbourhood, Ints]:
    """The group of every row, and rows by (chunk, group): int64 [chunks, groups]. groups(part): those of a part's rows.

    A task sends the driver the chunks that its rows are in, and keeps the groups for the tasks that write."""
    bounds, store, scratch = context.bounds, context.images.dataset.store, context.scratch

    def look(parts: Iterable[LabelledPoints]) -> Iterator[tuple[ChunkCounts, KeptRange]]:
        low, counts = 0, []
        kept: list[npt.NDArray[np.int32]] = []
        for part in parts:
            of_rows = groups(part)
            low = low if kept else int(part.points.ids[0])
            counts.append(count_by_chunk(part.points.ids, of_rows, num_groups, bounds))
            kept.append(of_rows.astype(np.int32))
        if kept:
            yield reduce(add, counts), keep(store, scratch, low, np.concatenate(kept))

    looked = points.mapPartitions(look).collect()
    ranges = sorted((kept for _, kept in looked), key=lambda kept: kept.low)
    counts = all_counts((counts for counts, _ in looked), len(bounds), num_groups)
    return ByNeighbourhood(KeptGroups(store, tuple(ranges))), counts
