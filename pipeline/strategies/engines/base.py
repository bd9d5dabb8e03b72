"""The interface of an engine: an implementation of PCA and clusterings that finds the neighbourhoods of all rows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.clustering.lloyd import Fit, canonical_order
from pipeline.core.arrays import Floats, Ints
from pipeline.input.dataset import Dataset
from pipeline.strategies.base import Context, Grouping
from pipeline.strategies.clusterings import ClusteringName
from pipeline.strategies.neighbourhoods import NeighbourhoodStrategy


@dataclass(frozen=True)
class Clustering:
    """The neighbourhoods of all rows.

    Attributes:
        grouping: the mapping of rows to neighbourhoods.
        counts: rows by chunk and neighbourhood, int64 [chunks, neighbourhoods].
        params: results of the fit for the manifest.
        models: fitted models by name, which are saved with the shards.
    """

    grouping: Grouping
    counts: Ints
    params: dict[str, Any]
    models: dict[str, Any]


class ClusteringEngine(ABC):
    """An implementation of PCA and clusterings. ``ENGINES`` names it."""

    @abstractmethod
    def check_input(self, strategy: NeighbourhoodStrategy, dataset: Dataset) -> None:
        """Raise UsageError if the engine cannot cluster these rows. Called before the scan."""

    @abstractmethod
    def cluster(
        self, context: Context, strategy: NeighbourhoodStrategy, clusters: int, *, by_class: bool
    ) -> Clustering:
        """Return the neighbourhoods of all rows.

        Args:
            context: the run.
            strategy: its components, whitening, starts and iterations.
            clusters: the most neighbourhoods, or per class the most.
            by_class: cluster each class by itself; neighbourhoods are then numbered class by class.
        """


@dataclass(frozen=True)
class FloatFit:
    """The clusters of a class, or of all rows, as a library with floating-point arithmetic found them.

    Attributes:
        centres: their means, float64 [k, p], in units of the points.
        sizes: rows per cluster, int64 [k].
        score: the summed squared distance of k-means, or the log-likelihood of a mixture.
        iterations: the number of iterations.
        noise: the last cluster is the rows that belong to none.
    """

    centres: Floats
    sizes: Ints
    score: float = 0.0
    iterations: int = 0
    noise: bool = False

    def order(self) -> Ints:
        """Return the positions of the clusters by size, then by centre, noise last, int64 [k].

        The libraries number clusters arbitrarily; in this order, two runs can be compared."""
        clusters = len(self.sizes) - self.noise
        order = canonical_order(self.centres[:clusters], self.sizes[:clusters])
        return np.append(order, np.arange(clusters, len(self.sizes)))


def number_clusters(fits: dict[int, FloatFit]) -> dict[int, Ints]:
    """Return the neighbourhood of every cluster of each class, int64 [k]; numbers run class by class."""
    numbers = {}
    first = 0
    for label, fit in fits.items():
        numbers[label] = first + np.argsort(fit.order())
        first += len(fit.sizes)
    return numbers


def describe_fits(
    clustering: ClusteringName, fits: dict[int, FloatFit], exponent: int, classes: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of a clustering for the manifest, and its spark.ml models by name.

    Args:
        clustering: the kind of clustering.
        fits: the fits by class, or the fit of all rows as class 0.
        exponent: the exponent of the grid 2^-exponent, on which every engine saves its k-means.
        classes: the number of classes if each has a fit of its own, else None.
    """
    number = {"clusters": sum(len(fit.sizes) for fit in fits.values())}
    # Models on the grid exist for k-means only; sets of other clusterings store the neighbourhoods of their rows.
    if clustering == "kmeans":
        whole = {}
        for label, fit in fits.items():
            order = fit.order()
            centres = np.rint(np.ldexp(fit.centres[order], exponent)).astype(np.int64)
            inertia = round(math.ldexp(fit.score, 2 * exponent))
            whole[label] = Fit(centres, fit.sizes[order], inertia, fit.iterations)
        results, model = describe_kmeans(whole, exponent, classes)
        return results, {"kmeans": model}
    if classes is not None:
        return number, {}
    if clustering == "dbscan":
        return number | {"noise_rows": int(fits[0].sizes[-1]) if fits[0].noise else 0}, {}
    return number | {"iterations": fits[0].iterations, "log_likelihood": fits[0].score}, {}


def describe_kmeans(fits: dict[int, Fit], exponent: int, classes: int | None) -> tuple[dict[str, Any], Any]:
    """Return the results of k-means on a grid for the manifest, and its spark.ml model.

    For the arguments see ``describe_fits``."""
    from pipeline.clustering.kmeans import BlockKMeansModel  # loads spark.ml
    from pipeline.clustering.kmeans_by_class import KMeansByClassModel

    number = {"clusters": sum(len(fit.centres) for fit in fits.values())}
    if classes is not None:
        return number, KMeansByClassModel(fits, classes, exponent)
    model = BlockKMeansModel(fits[0], exponent)
    results = number | {
        "iterations": fits[0].iterations,
        "far_groups": fits[0].far_groups,
        "inertia": model.trainingCost,
    }
    return results, model
