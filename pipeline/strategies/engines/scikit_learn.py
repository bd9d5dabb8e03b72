"""The pipeline of Provatas et al. (2021) as they ran it: scikit-learn's PCA and KMeans on one machine.

One task reads all rows, or the sample of --fit-rows, as doubles and fits both. Every row is then assigned by the fitted
objects themselves, in as many tasks as there are."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from sklearn.cluster import DBSCAN, KMeans
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from sklearn.neighbors import NearestNeighbors

from pipeline.clustering.gram import Spectrum, requested_rows
from pipeline.clustering.pca import BlockPCAModel
from pipeline.clustering.projection import quantise
from pipeline.core.arrays import Floats, Ints
from pipeline.core.errors import UsageError
from pipeline.core.hashing import is_drawn
from pipeline.core.seeds import Purpose, word
from pipeline.core.shardset.layout import Layout
from pipeline.input.dataset import Block, Dataset
from pipeline.strategies.base import Context
from pipeline.strategies.clusterings import ClusteringName
from pipeline.strategies.embeddings import row_layout
from pipeline.strategies.engines.base import (
    Clustering,
    ClusteringEngine,
    FloatFit,
    describe_fits,
    number_clusters,
)
from pipeline.strategies.neighbourhoods import (
    NeighbourhoodStrategy,
    Space,
    feature_grid,
    group_rows,
    images_or_vectors,
    pca_space,
)

ClusterModel: TypeAlias = Any  # KMeans, GaussianMixture or Balls; scikit-learn has no types
PAIRED_ROWS = 10_000  # DBSCAN may hold the distances of all pairs of rows


class ScikitLearnEngine(ClusteringEngine):
    def check_input(self, strategy: NeighbourhoodStrategy, dataset: Dataset) -> None:
        """Raise UsageError if the rows of the fit are more than one task may hold."""
        layout = row_layout(dataset, strategy.embedding)
        rows = rows_to_collect(strategy, dataset.rows)
        needed = partial(fit_bytes, layout, strategy.clustering)
        limit = strategy.task_memory_gb * 1e9
        if needed(rows) > limit:
            most = bisect_right(range(rows), limit, key=needed) - 1
            sample = f"fit to a sample by --fit-rows {most}, " if most >= 100 else ""
            raise UsageError(
                f"--engine scikit-learn holds {rows:,} rows in one task, {needed(rows) / 1e9:.2f} GB, more than"
                f" --task-memory-gb {strategy.task_memory_gb:g}: {sample}raise --task-memory-gb, or use --engine block"
            )

    def cluster(
        self, context: Context, strategy: NeighbourhoodStrategy, clusters: int, *, by_class: bool
    ) -> Clustering:
        """Return the neighbourhoods of all rows, as the objects of scikit-learn predict them."""
        images = images_or_vectors(context, strategy.embedding)
        dataset = images.dataset
        grid = feature_grid(context, images) if dataset.layout.dtype == "float32" else None
        sizes = context.scan.label_counts.sum(axis=0)
        with context.phase("scikit-learn"):
            rows = rows_to_collect(strategy, dataset.rows)
            draw = partial(is_drawn, rows=dataset.rows, count=rows, key=word(strategy.seed, Purpose.FIT_ROWS))
            select = draw if rows < dataset.rows else None

            def fit(_: int) -> FittedPipeline:
                """Return the pipeline fitted to the rows, which this task holds."""
                return fit_pipeline(strategy, clusters, *collect(dataset, select, by_class=by_class), grid is None)

            pipeline = images.context.parallelize([0], 1).map(fit).first()
            missing = set(np.flatnonzero(sizes).tolist()) - set(pipeline.models) if by_class else None
            if missing:
                raise UsageError(f"class {min(missing)} has no row in the sample that is fitted; use more --fit-rows")
            if grid is None:
                space = pca_space(context, pipeline.grid_model(whiten=strategy.whiten))
            else:
                space = Space(images, grid, {"rows_fitted": pipeline.rows, "components_fitted": grid.dimensions}, {})
            fits = {label: describe_model(model, pipeline.shift) for label, model in pipeline.models.items()}
            numbers = number_clusters(fits)
            classes = len(sizes) if by_class else None
            results, saved_models = describe_fits(strategy.clustering, fits, space.projection.exponent, classes)
            context.report(f"{results['clusters']} clusters, fitted to {pipeline.rows:,} rows in one task")
        with context.phase("assign"):
            # Local names, because tasks must not pickle the context.
            layout = dataset.layout

            def groups(block: Block) -> tuple[Ints, Ints]:
                numbers_of_rows, parts = numbers_and_parts(block, layout, by_class=by_class)
                return block.ids, pipeline.groups(numbers, numbers_of_rows.astype(np.float64), parts)

            grouping, counts = group_rows(context, images.blocks().map(groups), results["clusters"])
        return Clustering(grouping, counts, results | space.params, space.models | saved_models)


@dataclass(frozen=True, eq=False)
class FittedPipeline:
    """The objects of scikit-learn that are fitted to some rows. Picklable.

    Attributes:
        pca: the components; None for float rows, which are clustered unchanged.
        models: the clusters of each class, or of all rows as class 0.
        rows: the number of rows of the fit.
    """

    pca: PCA | None
    models: dict[int, ClusterModel]
    rows: int

    def groups(self, numbers: dict[int, Ints], rows: Floats, parts: Ints) -> Ints:
        """Return the neighbourhoods of rows, int64 [rows].

        Args:
            numbers: the neighbourhood of each cluster of each class, int64 [k].
            rows: pixels or features, float64 [rows, d].
            parts: the class of each row whose model predicts it, int [rows].
        """
        points = rows if self.pca is None else self.pca.transform(rows)
        groups = np.empty(len(rows), np.int64)
        for part in np.unique(parts).tolist():
            is_own = parts == part
            groups[is_own] = numbers[part][self.models[part].predict(points[is_own])]
        return groups

    def grid_model(self, *, whiten: bool) -> BlockPCAModel:
        """Return the components as a spark.ml model on a grid of integers, as every engine saves them."""
        pca = self.pca
        assert pca is not None
        share = pca.explained_variance_ratio_.sum()
        total = float(pca.explained_variance_.sum() / share) if share > 0 else 0.0
        spectrum = Spectrum(pca.components_, np.maximum(pca.explained_variance_, 0.0), total)
        return BlockPCAModel(quantise(spectrum, whiten=whiten), spectrum, pca.mean_, self.rows)

    @property
    def shift(self) -> Floats | float:
        """The point of the mean row. scikit-learn subtracts it from every point, the models on the grid do not."""
        if self.pca is None:
            return 0.0
        variances = self.pca.explained_variance_
        scale = np.sqrt(np.where(variances > 0, variances, 1.0)) if self.pca.whiten else 1.0
        shift: Floats = (self.pca.components_ @ self.pca.mean_) / scale
        return shift


class Balls:
    """DBSCAN that also predicts: a row belongs to the nearest core row within the radius, or to the noise.

    labels_: the cluster of each fitted row, the noise as the last. centres: float64 [k, p], the mean of each."""

    def __init__(self, radius: float | None, neighbours: int) -> None:
        self.radius = radius
        self.neighbours = neighbours

    def fit(self, points: Floats) -> Balls:
        """Find the clusters of some rows. The default radius is the median distance to the neighbour that makes a core
        row."""
        search = NearestNeighbors(n_neighbors=min(self.neighbours, len(points))).fit(points)
        radius = self.radius or float(np.median(search.kneighbors(points)[0][:, -1])) or 1.0
        dbscan = DBSCAN(eps=radius, min_samples=self.neighbours).fit(points)
        cores = dbscan.core_sample_indices_
        # Rows that were not fitted are predicted by core rows, which alone have balls.
        self.radius = radius
        self.clusters = int(dbscan.labels_.max()) + 1
        self.core_labels = dbscan.labels_[cores]
        self.search = NearestNeighbors(n_neighbors=1).fit(points[cores]) if len(cores) else None
        self.labels_ = self.predict(points)
        self.noise = bool((self.labels_ == self.clusters).any()) or not self.clusters
        number = self.clusters + self.noise
        self.centres = np.stack([points[self.labels_ == each].mean(axis=0) for each in range(number)])
        return self

    def predict(self, points: Floats) -> Ints:
        """Return the cluster of each row, int64 [rows]; the number of clusters stands for noise."""
        if self.search is None:
            return np.zeros(len(points), np.int64)
        distances, nearest = self.search.kneighbors(points)
        labels: Ints = np.where(distances[:, 0] <= self.radius, self.core_labels[nearest[:, 0]], self.clusters)
        return labels


def describe_model(model: ClusterModel, shift: Floats | float) -> FloatFit:
    """Return the clusters of a model. shift: added to their centres, see ``FittedPipeline.shift``."""
    if isinstance(model, Balls):
        # Rows outside of the fit may be noise even if no row of the fit is.
        centres = np.vstack([model.centres, model.centres[:1]]) if not model.noise else model.centres
        sizes = np.bincount(model.labels_, minlength=len(centres)).astype(np.int64)
        return FloatFit(centres + shift, sizes, noise=True)
    if isinstance(model, GaussianMixture):
        sizes = np.bincount(model.labels_, minlength=model.n_components).astype(np.int64)
        score = float(model.lower_bound_) * len(model.labels_)
        return FloatFit(model.means_ + shift, sizes, score, int(model.n_iter_))
    centres = model.cluster_centers_ + shift
    sizes = np.bincount(model.labels_, minlength=len(centres)).astype(np.int64)
    return FloatFit(centres, sizes, float(model.inertia_), int(model.n_iter_))


def new_model(strategy: NeighbourhoodStrategy, clusters: int, rows: int) -> ClusterModel:
    """Return an unfitted model for --clustering.

    clusters: the most clusters; DBSCAN finds its own number. rows: rows to fit."""
    if strategy.clustering == "dbscan":
        return Balls(strategy.radius, strategy.min_neighbours)
    settings = {"max_iter": strategy.max_iter, "tol": strategy.tol, "n_init": strategy.n_init}
    # scikit-learn fits no mixture to a single row, whose neighbourhood is the same by any definition.
    kind = KMeans if strategy.clustering == "kmeans" or rows == 1 else GaussianMixture
    return kind(min(clusters, rows), random_state=strategy.seed % (1 << 32), **settings)


def rows_to_collect(strategy: NeighbourhoodStrategy, rows: int) -> int:
    """Return the number of rows that one task holds for the fit."""
    if strategy.fit_rows == "auto" and strategy.clustering == "dbscan":
        return min(rows, PAIRED_ROWS)
    return requested_rows(strategy.fit_rows, rows)


def fit_bytes(layout: Layout, clustering: ClusteringName, rows: int) -> int:
    """Return the memory of the fit of some images or vectors.

    That is doubles, the covariance of pixels with its eigenvectors, a centred copy of vectors in KMeans, and in the
    worst case all pairs of rows in DBSCAN."""
    pairs = 8 * rows**2 if clustering == "dbscan" else 0
    if layout.dtype == "uint8":
        return 8 * rows * layout.record_bytes + 24 * layout.record_bytes**2 + pairs
    return 4 * rows * layout.record_bytes + pairs


def numbers_and_parts(block: Block, layout: Layout, *, by_class: bool) -> tuple[npt.NDArray[Any], Ints]:
    """Return the pixels or features of a block [rows, d], and the class of each row, or 0, int64 [rows]."""
    numbers = block.numbers(layout).reshape(len(block.ids), -1)
    return numbers, block.labels.astype(np.int64) if by_class else np.zeros(len(numbers), np.int64)


def collect(
    dataset: Dataset, select: Callable[[Ints], npt.NDArray[np.bool_]] | None, *, by_class: bool
) -> tuple[Floats, Ints]:
    """Return all rows, or those that ``select(ids)`` selects, float64 [rows, d] in id order, and their classes, or 0."""
    blocks = []
    parts = []
    for block in dataset.read(0, dataset.rows):
        numbers, part = numbers_and_parts(block, dataset.layout, by_class=by_class)
        is_selected = np.ones(len(part), np.bool_) if select is None else select(block.ids)
        blocks.append(numbers[is_selected])
        parts.append(part[is_selected])
    # Doubles block by block, so that a second copy of all rows never exists.
    rows = np.empty((sum(map(len, blocks)), blocks[0].shape[1]))
    at = 0
    while blocks:
        numbers = blocks.pop(0)
        rows[at : at + len(numbers)] = numbers
        at += len(numbers)
    return rows, np.concatenate(parts)


def fit_pipeline(
    strategy: NeighbourhoodStrategy, clusters: int, rows: Floats, parts: Ints, pixels: bool
) -> FittedPipeline:
    """Return the pipeline fitted to some rows.

    Args:
        strategy: components, whitening, starts and iterations.
        clusters: the most clusters per class.
        rows: pixels or features, float64 [rows, d].
        parts: the class of each row, or 0.
        pixels: the rows are pixels, whose components are clustered.
    """
    pca = None
    points = rows
    if pixels:
        number = strategy.components if strategy.components < 1 else min(int(strategy.components), *rows.shape)
        pca = PCA(number, whiten=strategy.whiten, svd_solver="covariance_eigh").fit(rows)
        points = pca.transform(rows)
    models = {}
    with warnings.catch_warnings():
        # Fewer distinct rows than clusters are no fault here: some neighbourhoods stay empty.
        warnings.simplefilter("ignore", ConvergenceWarning)
        for part in np.unique(parts).tolist():
            own = points[parts == part]
            model = new_model(strategy, clusters, len(own))
            model.fit(own)
            if isinstance(model, GaussianMixture):
                model.labels_ = model.predict(own)
            models[part] = model
    return FittedPipeline(pca, models, len(rows))
