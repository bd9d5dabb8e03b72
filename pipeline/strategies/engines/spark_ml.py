"""Spark's own PCA, StandardScaler, KMeans and GaussianMixture: fitted, applied and assigned by spark.ml.

Its limits are spark.ml's. PCA computes all components whatever their number, in 3 to 4 ms per CIFAR row on the executors
and minutes on the driver, which holds d^2 doubles; it takes at most 65,535 values per row. The centres depend on the
order in which Spark adds the sums of partitions, so two runs may differ in the last bits and in rows at boundaries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from pyspark import RDD, StorageLevel
from pyspark.ml.clustering import GaussianMixture, GaussianMixtureModel, KMeans, KMeansModel
from pyspark.ml.feature import PCA, PCAModel, StandardScaler
from pyspark.ml.stat import Summarizer
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.clustering.columns import matrix_to_int, matrix_to_vector
from pipeline.clustering.gram import Spectrum, requested_rows
from pipeline.clustering.pca import BlockPCAModel
from pipeline.clustering.projection import quantise
from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError
from pipeline.core.hashing import is_drawn
from pipeline.core.seeds import Purpose, word
from pipeline.input.dataset import Dataset
from pipeline.spark.images import Images
from pipeline.spark.jvm import leading_components
from pipeline.strategies.base import Context
from pipeline.strategies.embeddings import row_layout
from pipeline.strategies.engines.base import Clustering, ClusteringEngine, FloatFit, describe_fits, number_clusters
from pipeline.strategies.neighbourhoods import (
    NeighbourhoodStrategy,
    Space,
    feature_grid,
    group_rows,
    images_or_vectors,
    pca_space,
)

PARTITIONS = 16  # the fewest: k-means|| depends on their number, which must not depend on the cluster
PARTITION_BYTES = 32 << 20  # images per partition, eight times as large as vectors
MOST_VALUES = 65_535  # limit of the columns of spark.ml's RowMatrix
ClusterModel = KMeansModel | GaussianMixtureModel


class SparkMlEngine(ClusteringEngine):
    def check_input(self, strategy: NeighbourhoodStrategy, dataset: Dataset) -> None:
        """Raise UsageError for images that have more pixels than spark.ml's PCA takes."""
        layout = row_layout(dataset, strategy.embedding)
        if layout.dtype == "uint8" and layout.record_bytes > MOST_VALUES:
            raise UsageError(
                f"--engine spark-ml takes images of at most {MOST_VALUES:,} values, got {layout.record_bytes:,}; use"
                " --engine block"
            )

    def cluster(
        self, context: Context, strategy: NeighbourhoodStrategy, clusters: int, *, by_class: bool
    ) -> Clustering:
        """Return the neighbourhoods of all rows, as spark.ml predicts them."""
        if clusters < 2:
            raise UsageError(
                f"--engine spark-ml finds at least 2 neighbourhoods{' per class' * by_class}, got {clusters}: give more"
                " --clusters, or use --engine block"
            )
        sizes = context.scan.label_counts.sum(axis=0)
        if by_class and strategy.clustering == "kmeans" and 1 in sizes:
            raise UsageError(
                f"--engine spark-ml cannot cluster class {sizes.tolist().index(1)}, which has a single row: use --engine"
                " block or scikit-learn, or leave out the row"
            )
        images = images_or_vectors(context, strategy.embedding)
        size = images.dataset.rows * images.dataset.record_bytes
        partitions = min(max(PARTITIONS, -(-size // PARTITION_BYTES)), images.dataset.rows)
        with persist_table(feature_table(images, partitions, by_class=by_class)) as table:
            space, points = project_table(context, strategy, images, table)
            with persist_table(points) as points:
                with context.phase("kmeans"):
                    # Classes without rows have no model, and no numbers.
                    present = np.flatnonzero(sizes).tolist() if by_class else [0]
                    parts = {label: points.where(F.col("part") == label) for label in present}
                    models = {label: fit_clusters(strategy, clusters, part) for label, part in parts.items()}
                    fits = {label: describe_model(model) for label, model in models.items()}
                    numbers = number_clusters(fits)
                    classes = len(sizes) if by_class else None
                    results, saved_models = describe_fits(strategy.clustering, fits, space.projection.exponent, classes)
                    context.report(f"{results['clusters']} clusters of spark.ml")
                with context.phase("assign"):
                    grouping, counts = group_rows(context, predict(points, models, numbers), results["clusters"])
        return Clustering(
            grouping, counts, results | space.params | {"partitions": partitions}, space.models | saved_models
        )


@contextmanager
def persist_table(table: DataFrame) -> Iterator[DataFrame]:
    """Yield a table that the executors persist until the ``with`` block ends."""
    table.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        yield table
    finally:
        table.unpersist()


def feature_table(images: Images, partitions: int, *, by_class: bool) -> DataFrame:
    """Return the table ``id, part, features``: features as vectors of doubles, part the label, or 0 for all rows.

    Args:
        images: the rows.
        partitions: the number of partitions, each of consecutive rows.
        by_class: the part of a row is its label.
    """
    dtype = np.dtype(images.dataset.layout.dtype)

    def numbers(rows: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        return np.ascontiguousarray(rows).view(dtype)

    part = F.col("label") if by_class else F.lit(0)
    features = matrix_to_vector(numbers, F.col("image")).alias("features")
    return images.frame(partitions).select("id", part.alias("part"), features)


def project_table(
    context: Context, strategy: NeighbourhoodStrategy, images: Images, table: DataFrame
) -> tuple[Space, DataFrame]:
    """Return the space of spark.ml's components, and the table ``id, part, point`` of the rows in it.

    Float rows are clustered unchanged, as with every engine.

    Args:
        context: the run.
        strategy: components and whitening.
        images: the rows.
        table: the rows as ``feature_table`` returns them.
    """
    if images.dataset.layout.dtype == "float32":
        grid = feature_grid(context, images)
        space = Space(images, grid, {"components_fitted": grid.dimensions}, {})
        return space, table.withColumnRenamed("features", "point")
    with context.phase("pca"):
        rows = images.dataset.rows
        count = requested_rows(strategy.fit_rows, rows)
        sample = table
        if count < rows:
            key = word(strategy.seed, Purpose.FIT_ROWS)
            draw = partial(is_drawn, rows=rows, count=count, key=key)
            sample = table.where(matrix_to_int(lambda ids: draw(ids[:, 0]), F.array("id")) == 1)
        moments = sample.select(
            F.count(F.lit(1)), Summarizer.variance(F.col("features")), Summarizer.mean(F.col("features"))
        ).first()
        assert moments is not None
        pca = fit_pca(sample, strategy.components, images.dataset.record_bytes)
        components = pca.transform(table)
        variances = np.nan_to_num(pca.explainedVariance.toArray()) * moments[1].toArray().sum()
        if strategy.whiten:
            scaler = StandardScaler(inputCol="component", outputCol="point", withMean=False, withStd=True)
            points = scaler.fit(pca.transform(sample)).transform(components)
        else:
            points = components.withColumnRenamed("component", "point")
        # The saved model is on a grid of integers, like those of the other engines.
        spectrum = Spectrum(pca.pc.toArray().T, np.maximum(variances, 0.0), float(moments[1].toArray().sum()))
        model = BlockPCAModel(quantise(spectrum, whiten=strategy.whiten), spectrum, moments[2].toArray(), moments[0])
        space = pca_space(context, model)
        context.report(f"{len(variances)} components, {space.params['explained_variance']:.1%} of the variance")
    return space, points.select("id", "part", "point")


def fit_pca(table: DataFrame, components: float, pixels: int) -> PCAModel:
    """Return spark.ml's principal components of the column features, as the column component.

    components: a number, or a share of the variance below 1. pixels: values per row."""
    number = min(int(components), pixels) if components >= 1 else pixels
    model = PCA(k=number, inputCol="features", outputCol="component").fit(table)
    if components >= 1:
        return model
    share = np.cumsum(np.nan_to_num(model.explainedVariance.toArray()))
    keep = min(int(np.searchsorted(share, components - 1e-12)) + 1, pixels)
    # spark.ml takes no share, but computes all components for any number: cut its model instead of fitting twice.
    short = PCAModel(leading_components(table.sparkSession.sparkContext, model, keep))
    short._set(k=keep)
    return short.setInputCol("features").setOutputCol("component")


def fit_clusters(strategy: NeighbourhoodStrategy, clusters: int, points: DataFrame) -> ClusterModel:
    """Return the k-means or the mixture of the best start, the first of equal ones."""
    mixes = strategy.clustering == "gaussian-mixture"
    starts: list[ClusterModel] = [
        (GaussianMixture if mixes else KMeans)(
            k=clusters,
            maxIter=strategy.max_iter,
            tol=strategy.tol,
            seed=(strategy.seed + start) % (1 << 63),
            featuresCol="point",
        ).fit(points)
        for start in range(strategy.n_init)
    ]
    return min(starts, key=lambda model: -score_of(model) if mixes else score_of(model))


def score_of(model: ClusterModel) -> float:
    """Return the inertia of k-means, or the log-likelihood of a mixture."""
    return float(model.summary.trainingCost if isinstance(model, KMeansModel) else model.summary.logLikelihood)


def describe_model(model: ClusterModel) -> FloatFit:
    """Return the clusters of a fitted model, for the manifest and the saved model."""
    if isinstance(model, KMeansModel):
        centres = np.stack(model.clusterCenters())
    else:
        centres = np.stack([gaussian.mean.toArray() for gaussian in model.gaussians])
    # If rows are equal, spark.ml finds fewer clusters than requested, but still lists a size for each request.
    sizes = np.array(model.summary.clusterSizes, np.int64)[: len(centres)]
    return FloatFit(centres, sizes, score_of(model), int(model.summary.numIter))


def predict(points: DataFrame, models: dict[int, ClusterModel], numbers: dict[int, Ints]) -> RDD[tuple[Ints, Ints]]:
    """Return (ids, neighbourhoods) of consecutive rows, by the model of each row's part.

    Args:
        points: the table ``id, part, point``.
        models: the model of each part.
        numbers: the neighbourhood of each cluster of each part, int64 [k].
    """
    table = points
    for part, model in models.items():
        if isinstance(model, GaussianMixtureModel):
            model.setProbabilityCol(f"probability_{part}")
        table = model.setPredictionCol(f"cluster_{part}").transform(table)
    # Every model predicts every row, as a union of parts would not keep the rows in order.
    own = F.coalesce(*(F.when(F.col("part") == part, F.col(f"cluster_{part}")) for part in models))

    def look_up_neighbourhoods(rows: Iterable[Any]) -> Iterator[tuple[Ints, Ints]]:
        """Yield (ids, neighbourhoods) of a Spark partition's rows (id, part, cluster), int64 [rows] each; nothing if it
        has none.

        The neighbourhood of a row is looked up by its cluster in ``numbers`` of its part."""
        values = np.array([tuple(row) for row in rows], np.int64).reshape(-1, 3)
        ids, parts, clusters = values.T
        neighbourhoods = np.empty(len(values), np.int64)
        for part in np.unique(parts).tolist():
            is_own = parts == part
            neighbourhoods[is_own] = numbers[part][clusters[is_own]]
        if len(values):
            yield ids, neighbourhoods

    return table.select("id", "part", own).rdd.mapPartitions(look_up_neighbourhoods)
