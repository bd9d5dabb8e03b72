"""K-means inside each class, then every (class, cluster) cell dealt round robin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pyspark import RDD

from pipeline.arrays import Ints
from pipeline.assignment.groups import Start
from pipeline.clustering.lloyd import Fit, nearest
from pipeline.clustering.points import ONE_TASK_BYTES, Points, fit_gathered
from pipeline.clustering.projection import Projection
from pipeline.input.dataset import Block
from pipeline.specs import option
from pipeline.strategies.base import START_HELP, Context, Fitted, Grouping, StoredGroups, StoredNeighbourhoods
from pipeline.strategies.neighbourhoods import (
    LabelledPoints,
    NeighbourhoodStrategy,
    count_points,
    fit_pca,
    projected,
)

if TYPE_CHECKING:
    from pipeline.clustering.kmeans import BlockKMeans


@dataclass(frozen=True)
class Cells(Grouping):
    """centres: per class int64 [clusters, p]; cells are numbered class by class."""

    neighbourhoods = True
    projection: Projection
    centres: tuple[Ints, ...]

    @property
    def firsts(self) -> Ints:
        return np.cumsum([0, *(len(c) for c in self.centres)])

    def cells(self, labels: np.ndarray[tuple[int], np.dtype[np.int32]], points: Points) -> Ints:
        result = np.empty(len(labels), np.int64)
        for label in np.unique(labels):
            rows = labels == label
            result[rows] = self.firsts[label] + nearest(points.points[rows], self.centres[label])[0]
        return result

    def groups(self, block: Block) -> Ints:
        return self.cells(block.labels, Points(block.ids, self.projection(block.images)))


def select_class(label: int, parts: Iterable[LabelledPoints]) -> Iterator[Points]:
    for part in parts:
        rows = part.labels == label
        if rows.any():
            yield Points(part.points.ids[rows], part.points.points[rows])


def fit_classes(
    context: Context, points: RDD[LabelledPoints], estimator: BlockKMeans, projection: Projection, sizes: Ints
) -> dict[int, Fit]:
    """One k-means a class that has rows: all of them in one task while that can hold the points."""
    present = np.flatnonzero(sizes).tolist()
    if context.scan.rows * projection.dimensions * 4 <= ONE_TASK_BYTES:
        settings = estimator.settings()

        def fit_all(parts: Iterable[LabelledPoints]) -> list[dict[int, Fit]]:
            parts = list(parts)
            return [{label: fit_gathered(select_class(label, parts), settings) for label in present}]

        return points.coalesce(1).mapPartitions(fit_all).first()
    return {
        label: estimator.fit_points(
            points.mapPartitions(partial(select_class, label)),
            projection.exponent,
            values=int(sizes[label]) * projection.dimensions,
        ).fitted
        for label in present
    }


@dataclass(frozen=True)
class ClassCluster(NeighbourhoodStrategy):
    """clusters: in all, shared evenly by the classes (None: two a class). Keeps stratified's bound for every cell, so
    class balance too. One k-means a class, on points of one common PCA; no sparse cells, no duplicates."""

    name: ClassVar[str] = "class_cluster"
    summary: ClassVar[str] = "k-means inside each class, each cluster dealt round robin"
    looks_at_labels: ClassVar[bool] = True
    even_sizes: ClassVar[bool] = True
    even_classes: ClassVar[bool] = True
    start: Start = option("carry", START_HELP)

    def fit(self, context: Context) -> Fitted:
        from pipeline.clustering.kmeans import BlockKMeans  # loads spark.ml, which --help and most tasks do without

        sizes = context.scan.label_counts.sum(axis=0)
        classes = len(sizes)
        each = max(1, (self.clusters or 2 * classes) // classes)
        pca = fit_pca(context, components=self.components, whiten=self.whiten)
        with projected(context, pca) as points:
            with context.phase("kmeans"):
                estimator = BlockKMeans(k=each, maxIter=self.max_iter, tol=self.tol, seed=self.seed)
                fits = fit_classes(context, points, estimator, pca.projection, sizes)
                models = {
                    f"kmeans-{label:03d}": estimator.model(fit, pca.projection.exponent) for label, fit in fits.items()
                }
                none = np.zeros((0, pca.projection.dimensions), np.int64)
                centres = [fits[label].centres if label in fits else none for label in range(classes)]
                context.report(f"{sum(map(len, centres))} clusters in {len(fits)} classes")
            cells = Cells(pca.projection, tuple(centres))
            with context.phase("assign"):
                number, bounds = int(cells.firsts[-1]), context.bounds
                counts = count_points(points, lambda part: cells.cells(part.labels, part.points), number, bounds)
        params = {"clusters": number, "components_fitted": len(pca.spectrum.variances)}
        return Fitted(cells, counts, start=self.start, params=params, models={"pca": pca, **models})

    def refit(self, context: Context, stored: StoredGroups) -> Fitted:
        return Fitted(StoredNeighbourhoods(), stored.counts, start=self.start, params=stored.params)
