"""The common part of strategies that use neighbourhoods: parameters, and the projection of images to integer points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from pipeline.assignment.chunks import ChunkCounts, count_by_chunk, sum_counts
from pipeline.assignment.kept import KeptGroups, KeptRange, write_groups
from pipeline.clustering.gram import MAX_PIXELS, is_component_number, rows_to_fit
from pipeline.clustering.lloyd import MOST_CLUSTERS
from pipeline.clustering.points import ONE_TASK_BYTES, Points
from pipeline.clustering.projection import Grid, Projection, grid_exponent
from pipeline.clustering.reduction import tree_reduce
from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError
from pipeline.core.hashing import is_drawn
from pipeline.core.seeds import Purpose, word
from pipeline.core.specs import option
from pipeline.input.dataset import Block, Dataset
from pipeline.spark.images import Images
from pipeline.strategies.base import Context, Grouping
from pipeline.strategies.clusterings import CLUSTERINGS, ClusteringName, EngineName
from pipeline.strategies.embeddings import EmbeddingStrategy, embedded_rows, row_layout

if TYPE_CHECKING:
    from pyspark import RDD

    from pipeline.clustering.pca import BlockPCAModel


def count_or_word(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def is_fit_rows(rows: int | str) -> bool:
    return rows in ("auto", "all") or (isinstance(rows, int) and rows >= 100)


COMPONENTS: dict[str, Any] = {
    "help": "number of principal components, or below 1 the share of variance that they explain",
    "check": is_component_number,
    "expected": "a whole number or a share of variance in (0, 1)",
}
EMBEDDING: dict[str, Any] = {
    "help": "vectors to use instead of pixels: a Parquet column, or the path of a table of (id, embedding)",
    "metavar": "COLUMN|URI",
}
FIT_ROWS: dict[str, Any] = {
    "help": "approximate number of rows, drawn by id, that the PCA is fitted to, or all; auto: 10,000 or three per pixel,"
    " whichever is more (2,000 for very large images)",
    "metavar": "INT|all",
    "parse": count_or_word,
    "check": is_fit_rows,
    "expected": "all, auto or a whole number of at least 100",
    "advanced": True,
}
TASK_MEMORY: dict[str, Any] = {
    "help": "memory limit per task that places a class or fits all rows, in gigabytes",
    "metavar": "GB",
    "above": 0,
    "recorded": False,
    "advanced": True,
}


@dataclass(frozen=True)
class NeighbourhoodStrategy(EmbeddingStrategy):
    """A strategy that clusters rows into neighbourhoods.

    Attributes:
        clusters: the number of neighbourhoods; None: twice the number of classes.
        embedding: a Parquet column, or a table by id, whose vectors are clustered unchanged instead of images.
        components: a number of principal components, or a share of the variance below 1.
        whiten: scale components to equal variance.
        fit_rows: rows that the PCA is fitted to, see ``gram.rows_to_fit``.
        max_iter: the limit of k-means iterations.
        tol: the tolerance of k-means.
        n_init: k-means starts, of which the best is kept.
        engine: the implementation of PCA and clustering, see ``pipeline/strategies/engines``.
        clustering: the definition of a neighbourhood: k-means, a component of a Gaussian mixture, or dense rows within
            a radius of each other.
        radius: the radius of dbscan, in units of the points; None: the median distance to the neighbour that makes a
            core row.
        min_neighbours: rows within the radius, itself included, that make a row a core of dbscan.
        task_memory_gb: the memory that the one task of scikit-learn may take, in GB.
    """

    # Parameters of later versions: they identify a run only with a value that is not the default.
    added: ClassVar[tuple[str, ...]] = ("clustering",)
    looks_at_pixels: ClassVar[bool] = True
    clusters: int | None = option(
        None,
        "number of neighbourhoods (class_cluster: rounded down to a multiple of the classes, but at least 1 per class)",
        least=1,
        most=MOST_CLUSTERS,
        shown="twice the number of classes",
    )
    embedding: str | None = option(None, **EMBEDDING)
    components: float = option(50.0, **COMPONENTS)
    whiten: bool = option(False, "scale components to equal variance", advanced=True)
    fit_rows: int | str = option("auto", **FIT_ROWS)
    max_iter: int = option(150, "maximum number of k-means iterations", least=1, advanced=True)
    tol: float = option(
        1e-4, "tolerance of k-means, as in scikit-learn", least=0, expected="a number of 0 or more", advanced=True
    )
    n_init: int = option(1, "number of k-means starts, of which the best is used", least=1, advanced=True)
    engine: EngineName = option(
        "block",
        "implementation: exact block PCA and integer k-means (block), those of spark.ml from end to end (spark-ml), or"
        " those of scikit-learn in a single task (scikit-learn)",
        advanced=True,
    )
    clustering: ClusteringName = option(
        "kmeans",
        "definition of a neighbourhood: nearest centre (kmeans), most probable component (gaussian-mixture, with --engine"
        " spark-ml or scikit-learn), or dense rows within a radius (dbscan, with --engine scikit-learn)",
        advanced=True,
    )
    radius: float | None = option(
        None,
        "radius of dbscan, in units of the components or of the embedding",
        above=0,
        shown="median distance to the neighbour that makes a core row",
        advanced=True,
    )
    min_neighbours: int = option(
        5, "rows within the radius, itself included, that make a row a core of dbscan", least=1, advanced=True
    )
    task_memory_gb: float = option(2.0, **TASK_MEMORY)

    def __post_init__(self) -> None:
        if self.fit_rows is None:  # from an older version, which always fitted to all rows
            object.__setattr__(self, "fit_rows", "all")
        super().__post_init__()
        self._check_clustering()

    def _check_clustering(self) -> None:
        """Raise UsageError for a clustering that the engine lacks, or options that the clustering would ignore."""
        if self.clustering not in CLUSTERINGS[self.engine]:
            having = next(name for name in reversed(CLUSTERINGS) if self.clustering in CLUSTERINGS[name])
            raise UsageError(f"--engine {self.engine} has no --clustering {self.clustering}; use --engine {having}")
        dense = self.clustering == "dbscan"
        if dense and (self.clusters is not None or self.n_init != 1):
            ignored = f"--n-init {self.n_init}" if self.clusters is None else f"--clusters {self.clusters}"
            raise UsageError(f"--clustering dbscan finds the number of clusters by itself; leave out {ignored}")
        # These two are not among the parameters that sets of other clusterings store.
        if not dense and self.radius is not None:
            raise UsageError(f"--clustering {self.clustering} has no radius; leave out --radius {self.radius:g}")
        if not dense and self.min_neighbours != _default(self, "min_neighbours"):
            raise UsageError(
                f"--clustering {self.clustering} has no cores; leave out --min-neighbours {self.min_neighbours}"
            )

    @property
    def vectors(self) -> str | None:
        return self.embedding

    def params(self) -> dict[str, Any]:
        values = super().params()
        if self.embedding is None:  # as in manifests of older versions, whose sets stay valid
            del values["embedding"]
        if self.clustering != "dbscan":
            del values["radius"]
            del values["min_neighbours"]
        return values

    def identity(self) -> dict[str, Any]:
        """Return the parameters that identify the run, so that sets of older versions stay valid."""
        values = super().identity()
        return {key: value for key, value in values.items() if key not in self.added or value != _default(self, key)}


def _default(spec: object, name: str) -> Any:
    return type(spec).__dataclass_fields__[name].default  # type: ignore[attr-defined]


def check_space(dataset: Dataset, embedding: str | None, fit_rows: int | str) -> None:
    """Raise UsageError if the embedding is a column that the rows lack, or if the PCA cannot be fitted to these rows.

    Raises DataError if the embedding is a path without an embedding table."""
    if embedding:
        row_layout(dataset, embedding)
    elif dataset.layout.dtype == "uint8":
        rows_to_fit(fit_rows, dataset.rows, dataset.layout.record_bytes)


@dataclass(frozen=True)
class LabelledPoints:
    """A block of rows: their labels, int32 [rows], and their ids and integer points."""

    labels: np.ndarray[Any, np.dtype[np.int32]]
    points: Points


def project(projection: Projection | Grid, blocks: Iterable[Block]) -> Iterator[LabelledPoints]:
    for block in blocks:
        yield LabelledPoints(block.labels, Points(block.ids, projection(block.images)))


def fit_pca(context: Context, *, components: float, whiten: bool, fit_rows: int | str, seed: int) -> BlockPCAModel:
    """Return the PCA and mean of all rows, or of about as many rows as ``fit_rows`` requests.

    Args:
        context: the run.
        components: a number of components, or a share of the variance below 1.
        whiten: scale components to equal variance.
        fit_rows: a number of rows, "all" or "auto".
        seed: the seed of the sample.
    """
    from pipeline.clustering.pca import BlockPCA  # loads spark.ml, which --help and most tasks do without

    with context.phase("pca"):
        pixels = context.images.dataset.record_bytes
        rows = context.scan.rows
        num_rows = rows_to_fit(fit_rows, rows, pixels)
        # Rows are drawn by a hash of their ids, so that the sample does not depend on partitions.
        if num_rows < rows:
            key = word(seed, Purpose.FIT_ROWS)
            images = context.images.select_rows(partial(is_drawn, rows=rows, count=num_rows, key=key))
        else:
            images = context.images.blocks().map(lambda block: block.images)
        model = BlockPCA(components=float(components), whiten=whiten).fit_blocks(images, pixels, num_rows)
        number = len(model.spectrum.variances)
        share = model.explained_variance_ratio.sum()
        more = "all for every row" if pixels <= MAX_PIXELS else "N for more"
        sample_note = f", fitted to {model.rows:,} rows (--fit-rows {more})" if num_rows < rows else ""
        context.report(f"{number} components, {share:.1%} of the variance{', whitened' if whiten else ''}{sample_note}")
        return model


@dataclass(frozen=True)
class Space:
    """The space of integer points that rows are projected to.

    Attributes:
        images: the rows that are projected.
        projection: the projection of a row to integers.
        params: entries for the manifest.
        models: the fitted models by name.
    """

    images: Images
    projection: Projection | Grid
    params: dict[str, Any]
    models: dict[str, Any]


def pca_space(context: Context, model: BlockPCAModel) -> Space:
    """Return the space of a PCA's projection of the images, with the manifest's entries about the fit."""
    params = {
        "rows_fitted": model.rows,
        "components_fitted": len(model.spectrum.variances),
        "explained_variance": round(float(model.explained_variance_ratio.sum()), 6),
    }
    return Space(context.images, model.projection, params, {"pca": model})


def images_or_vectors(context: Context, embedding: str | None) -> Images:
    """Return the images, or the vectors of ``embedding`` in their place."""
    images = context.images
    return Images(images.context, embedded_rows(context, embedding)) if embedding else images


def feature_grid(context: Context, images: Images) -> Grid:
    """Return the grid of integers to which float32 features are rounded, as fine as their largest values allow.

    From there on all arithmetic is exact (see ``projection``), so no result depends on the order of partitions. Costs
    one pass over the features."""
    layout = images.dataset.layout
    with context.phase("bounds"):
        largest = images.blocks().map(lambda block: np.abs(block.numbers(layout)).max(axis=0).ravel())
        # A feature is a float32 of four bytes. Images would go through a PCA; features keep all their dimensions.
        grid = Grid(layout.record_bytes // 4, grid_exponent(tree_reduce(largest, np.maximum).astype(np.float64)))
        context.report(f"{grid.dimensions} numbers per row, unchanged")
    return grid


def fit_space(
    context: Context, *, embedding: str | None, components: float, whiten: bool, fit_rows: int | str, seed: int
) -> Space:
    """Return the space in which rows are compared, see ``Space``.

    Images are projected to their principal components. Vectors of an embedding and other float32 features keep all
    their dimensions and are only rounded to a grid of integers.

    Args:
        context: the run.
        embedding: the column or table of vectors to use instead of images, or None.
        components: a number of components, or a share of the variance below 1.
        whiten: scale components to equal variance.
        fit_rows: a number of rows that the PCA is fitted to, "all" or "auto".
        seed: the seed of the sample.
    """
    images = images_or_vectors(context, embedding)
    if images.dataset.layout.dtype == "float32":
        grid = feature_grid(context, images)
        return Space(images, grid, {"components_fitted": grid.dimensions}, {})
    return pca_space(context, fit_pca(context, components=components, whiten=whiten, fit_rows=fit_rows, seed=seed))


@contextmanager
def project_rows(context: Context, space: Space) -> Iterator[RDD[LabelledPoints]]:
    """Yield the points of all rows, which the executors persist until the ``with`` block ends."""
    from pyspark import StorageLevel  # not at the top: flags of strategies are read without Spark

    with context.phase("project"):
        size = 4 * context.scan.rows * space.projection.dimensions
        points = space.images.blocks(kept_bytes=size).mapPartitions(partial(project, space.projection))
        # Many points in memory would take heap that the tasks need, and gain little: they pass through a pipe to Python
        # either way.
        points.persist(StorageLevel.DISK_ONLY if size > ONE_TASK_BYTES else StorageLevel.MEMORY_AND_DISK)
        rows = points.map(lambda part: len(part.labels)).sum()
        context.report(f"{rows:,} points of {space.projection.dimensions} integers")
    try:
        yield points
    finally:
        points.unpersist()


@dataclass(frozen=True)
class ByNeighbourhood(Grouping):
    """The grouping by the neighbourhoods that a pass over the points has computed."""

    neighbourhoods = True
    reads_images = False
    kept_groups: KeptGroups

    def groups(self, block: Block) -> Ints:
        return self.kept_groups(block.ids)


def group_rows(
    context: Context, groups_by_row: RDD[tuple[Ints, Ints]], num_groups: int
) -> tuple[ByNeighbourhood, Ints]:
    """Return the grouping of all rows, and the rows by chunk and group, int64 [chunks, groups].

    A task sends the driver only the counts of its chunks, and writes the groups to a file for the tasks that write
    shards.

    Args:
        context: the run.
        groups_by_row: (ids, groups) of blocks of rows; a partition holds consecutive blocks.
        num_groups: the number of groups.
    """
    # Local names, because tasks must not pickle the context.
    bounds = context.bounds
    store = context.images.dataset.store
    scratch = context.scratch

    def count_and_keep(parts: Iterable[tuple[Ints, Ints]]) -> Iterator[tuple[ChunkCounts, KeptRange]]:
        """Write the groups of a partition's rows to a file, and yield their counts and the file.

        Yields nothing for a partition without rows."""
        first_id = -1
        group_arrays: list[npt.NDArray[np.int32]] = []
        for ids, groups in parts:
            if not group_arrays:
                first_id = int(ids[0])
            group_arrays.append(groups.astype(np.int32))
        if group_arrays:
            whole = np.concatenate(group_arrays)
            # The blocks of a partition are consecutive: the first id gives all ids.
            counts = count_by_chunk(np.arange(first_id, first_id + len(whole)), whole, num_groups, bounds)
            yield counts, write_groups(store, scratch, first_id, whole)

    ranges_and_counts = groups_by_row.mapPartitions(count_and_keep).collect()
    ranges = sorted((kept_range for _, kept_range in ranges_and_counts), key=lambda kept_range: kept_range.low)
    counts = sum_counts((counts for counts, _ in ranges_and_counts), len(bounds), num_groups)
    return ByNeighbourhood(KeptGroups(store, tuple(ranges))), counts
