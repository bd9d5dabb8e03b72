"""K-means inside each class, then every (class, cluster) cell dealt round robin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pyspark import RDD

from pipeline.assignment.groups import Start
from pipeline.clustering.lloyd import Fit, nearest_of_class
from pipeline.clustering.points import ONE_TASK_BYTES, Points, fit_gathered
from pipeline.clustering.projection import Grid, Projection
from pipeline.core.arrays import Ints
from pipeline.core.specs import option
from pipeline.strategies.base import START_HELP, Context, FitResult, StoredGroups, StoredNeighbourhoods
from pipeline.strategies.neighbourhoods import (
    LabelledPoints,
    NeighbourhoodStrategy,
    group_points,
    project_rows,
)

if TYPE_CHECKING:
    from pipeline.clustering.kmeans import BlockKMeans


def select_class(label: int, parts: Iterable[LabelledPoints]) -> Iterator[Points]:
    """Yield the points of the rows with a label, block by block."""
    for part in parts:
        rows = part.labels == label
        if rows.any():
            yield Points(part.points.ids[rows], part.points.points[rows])


def fit_classes(
    context: Context, points: RDD[LabelledPoints], estimator: BlockKMeans, projection: Projection | Grid, sizes: Ints
) -> dict[int, Fit]:
    """Run one k-means per class that has rows, and return the fits by class.

    All classes are fitted in one task as long as it can hold the points.

    Args:
        context: the run.
        points: the labelled points of all rows.
        estimator: settings of k-means.
        projection: the grid of the points.
        sizes: rows of every class, int64 [classes].
    """
    present = np.flatnonzero(sizes).tolist()
    if context.scan.rows * projection.dimensions * 4 <= ONE_TASK_BYTES:
        settings = estimator.settings()

        def fit_all(parts: Iterable[LabelledPoints]) -> list[dict[int, Fit]]:
            # Every class reads all parts, but the iterator can be consumed only once.
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
    """K-means inside each class, with every (class, cluster) cell dealt round robin.

    clusters: the total number, divided evenly among the classes (None: two per class). Row counts of every cell differ
    by at most one between workers, as with ``stratified``, so classes are balanced too. One k-means per class, on
    points of one common PCA; no sparse cells, no duplicates."""

    name: ClassVar[str] = "class_cluster"
    summary: ClassVar[str] = "k-means clusters inside each class, dealt round robin"
    looks_at_labels: ClassVar[bool] = True
    even_sizes: ClassVar[bool] = True
    even_classes: ClassVar[bool] = True
    start: Start = option("carry", START_HELP, advanced=True)

    def fit(self, context: Context) -> FitResult:
        """Return the (class, cluster) cell of every row: project all rows, then cluster and assign each class by
        itself."""
        # These load spark.ml, which --help and most tasks do without.
        from pipeline.clustering.kmeans import BlockKMeans
        from pipeline.clustering.kmeans_by_class import KMeansByClassModel

        sizes = context.scan.label_counts.sum(axis=0)
        classes = len(sizes)
        each = max(1, (self.clusters or 2 * classes) // classes)
        space = self.space(context)
        with project_rows(context, space) as points:
            with context.phase("kmeans"):
                estimator = BlockKMeans(k=each, maxIter=self.max_iter, tol=self.tol, seed=self.seed)
                fits = fit_classes(context, points, estimator, space.projection, sizes)
                model = KMeansByClassModel(fits, classes, space.projection.exponent)
                centres = model.centres()
                # Clusters are numbered over all classes, so that every (class, cluster) cell is one group.
                number = sum(map(len, centres))
                context.report(f"{number} clusters in {len(fits)} classes")
            with context.phase("assign"):
                grouping, counts = group_points(
                    context,
                    points,
                    lambda part: nearest_of_class(part.labels, part.points.points, centres),
                    number,
                )
        params = {"clusters": number, **space.params}
        return FitResult(grouping, counts, start=self.start, params=params, models={**space.models, "kmeans": model})

    def refit(self, context: Context, stored_groups: StoredGroups) -> FitResult:
        return FitResult(StoredNeighbourhoods(), stored_groups.counts, start=self.start, params=stored_groups.params)
