"""The engine of this project: exact block PCA and integer k-means, the same bits however the work is cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pipeline.clustering.lloyd import Fit, nearest, nearest_of_class
from pipeline.clustering.points import ONE_TASK_BYTES, Points, fit_gathered
from pipeline.clustering.projection import Grid, Projection
from pipeline.core.arrays import Ints
from pipeline.input.dataset import Dataset
from pipeline.strategies.base import Context
from pipeline.strategies.engines.base import Clustering, ClusteringEngine, describe_kmeans
from pipeline.strategies.neighbourhoods import (
    LabelledPoints,
    NeighbourhoodStrategy,
    check_space,
    fit_space,
    group_rows,
    project_rows,
)

if TYPE_CHECKING:
    from pyspark import RDD

    from pipeline.clustering.kmeans import BlockKMeans


class BlockEngine(ClusteringEngine):
    def check_input(self, strategy: NeighbourhoodStrategy, dataset: Dataset) -> None:
        check_space(dataset, strategy.embedding, strategy.fit_rows)

    def cluster(
        self, context: Context, strategy: NeighbourhoodStrategy, clusters: int, *, by_class: bool
    ) -> Clustering:
        """Return the neighbourhoods of all rows: fit and project, cluster the points, and assign each to its nearest
        centre."""
        from pipeline.clustering.kmeans import BlockKMeans  # loads spark.ml; tasks import this module and do without

        sizes = context.scan.label_counts.sum(axis=0)
        space = fit_space(
            context,
            embedding=strategy.embedding,
            components=strategy.components,
            whiten=strategy.whiten,
            fit_rows=strategy.fit_rows,
            seed=strategy.seed,
        )
        estimator = BlockKMeans(
            k=clusters, maxIter=strategy.max_iter, tol=strategy.tol, seed=strategy.seed, nInit=strategy.n_init
        )
        with project_rows(context, space) as points:
            with context.phase("kmeans"):
                if by_class:
                    fits = fit_classes(context, points, estimator, space.projection, sizes)
                else:
                    fits = {0: fit_all(context, points, estimator, space.projection)}
                results, model = describe_kmeans(fits, space.projection.exponent, len(sizes) if by_class else None)
            with context.phase("assign"):
                # Functions of this module, because tasks must not pickle the context.
                find = partial(_cells, model.centres()) if by_class else partial(_clusters, fits[0].centres)
                grouping, counts = group_rows(context, points.map(find), results["clusters"])
        return Clustering(grouping, counts, results | space.params, {**space.models, "kmeans": model})


def _cells(centres: tuple[Ints, ...], part: LabelledPoints) -> tuple[Ints, Ints]:
    """Return the ids of rows and the number of the nearest centre of their own class."""
    return part.points.ids, nearest_of_class(part.labels, part.points.points, centres)


def _clusters(centres: Ints, part: LabelledPoints) -> tuple[Ints, Ints]:
    """Return the ids of rows and the number of the nearest centre."""
    return part.points.ids, nearest(part.points.points, centres)[0]


def fit_all(
    context: Context, points: RDD[LabelledPoints], estimator: BlockKMeans, projection: Projection | Grid
) -> Fit:
    """Return the fit of one k-means over all rows. For the arguments see ``fit_classes``."""
    fit = estimator.fit_points(
        points.map(lambda part: part.points),
        projection.exponent,
        values=context.scan.rows * projection.dimensions,
        report=lambda turn, inertia: context.report(f"iteration {turn}: inertia {inertia:.4e}"),
    ).fitted
    context.report(f"{len(fit.centres)} clusters after {fit.iterations} iterations")
    return fit


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

        def fit_present(parts: Iterable[LabelledPoints]) -> list[dict[int, Fit]]:
            # Every class reads all parts, but the iterator can be consumed only once.
            parts = list(parts)
            return [{label: fit_gathered(select_class(label, parts), settings) for label in present}]

        fits = points.coalesce(1).mapPartitions(fit_present).first()
    else:
        fits = {
            label: estimator.fit_points(
                points.mapPartitions(partial(select_class, label)),
                projection.exponent,
                values=int(sizes[label]) * projection.dimensions,
            ).fitted
            for label in present
        }
    context.report(f"{sum(len(fit.centres) for fit in fits.values())} clusters in {len(fits)} classes")
    return fits
