"""The ``distribution_aware`` strategy on stock spark.ml PCA and KMeans: a far slower reference (see the benchmark)."""

from __future__ import annotations

from typing import Any

import numpy as np
from pyspark.ml.clustering import KMeans
from pyspark.ml.feature import PCA
from pyspark.ml.functions import vector_to_array
from pyspark.ml.stat import Summarizer
from pyspark.sql import functions as F

from pipeline.clustering.columns import matrix_to_vector
from pipeline.clustering.gram import Spectrum
from pipeline.clustering.kmeans import BlockKMeansModel
from pipeline.clustering.lloyd import Fit
from pipeline.clustering.pca import BlockPCAModel
from pipeline.clustering.projection import quantise
from pipeline.strategies.base import Context

PARTITIONS = 16


def fit_stock(
    context: Context,
    *,
    clusters: int,
    components: float,
    whiten: bool,
    max_iter: int,
    tol: float,
    seed: int,
    **_: Any,
) -> tuple[BlockPCAModel, BlockKMeansModel]:
    """Fit spark.ml's PCA and k-means, rounded to the same integer grid, so that the assignment stays exact.

    The centres depend on the number of partitions, as k-means|| does, which is therefore the same on every cluster, and
    on the order in which Spark adds the partitions' sums. PCA's rank-1 updates cost 3-4 ms per CIFAR row.

    Args:
        context: the run.
        clusters: the number of clusters.
        components: the number of components.
        whiten: scale components to equal variance.
        max_iter: the limit of k-means iterations.
        tol: the tolerance of k-means.
        seed: the seed of k-means.
    """
    pixels = matrix_to_vector(lambda images: images, F.col("image"))
    table = context.images.frame(PARTITIONS).select(pixels.alias("pixels")).cache()
    with context.phase("pca"):
        pca = PCA(k=int(components), inputCol="pixels", outputCol="raw").fit(table)
        rows = pca.pc.toArray().T
        # The sign of a component is arbitrary: make its largest entry positive, so that runs can be compared.
        rows = rows * np.sign(rows[np.arange(len(rows)), np.abs(rows).argmax(axis=1)])[:, None]
        summary = table.select(Summarizer.variance(F.col("pixels")), Summarizer.mean(F.col("pixels"))).first()
        assert summary is not None
        total = float(summary[0].toArray().sum())
        spectrum = Spectrum(rows, np.maximum(pca.explainedVariance.toArray() * total, 1e-12), total)
        projection = quantise(spectrum, whiten=whiten)
    with context.phase("kmeans"):
        scale = np.sqrt(spectrum.variances) if whiten else np.ones(len(rows))
        weights = (rows / scale[:, None]).T
        projected = matrix_to_vector(lambda images: images @ weights, vector_to_array(F.col("pixels")))
        points = table.select(projected.alias("point")).cache()
        kmeans = KMeans(k=clusters, maxIter=max_iter, tol=tol, seed=seed, featuresCol="point").fit(points)
        centres = np.rint(np.stack(kmeans.clusterCenters()) * 2.0**projection.exponent).astype(np.int64)
        sizes = np.array(kmeans.summary.clusterSizes, np.int64)
        # Number clusters by size and then by centre, because spark.ml's own order is arbitrary.
        order = np.lexsort((*centres.T[::-1], -sizes))
        inertia = round(float(kmeans.summary.trainingCost) * 4.0**projection.exponent)
        fit = Fit(centres[order], sizes[order], inertia, int(kmeans.summary.numIter))
        points.unpersist()
    table.unpersist()
    model = BlockPCAModel(projection, spectrum, summary[1].toArray(), context.scan.rows)
    return model, BlockKMeansModel(fit, projection.exponent)
