"""PCA, then k-means; each neighbourhood dealt round robin, sparse ones to every worker (Provatas et al. 2021)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pyspark import RDD

from pipeline.assignment.groups import SparseIf, Start
from pipeline.clustering.lloyd import nearest
from pipeline.clustering.projection import Grid, Projection
from pipeline.core.errors import UsageError
from pipeline.core.specs import option
from pipeline.input.dataset import Dataset
from pipeline.strategies.base import SPARSE_HELP, START_HELP, Context, FitResult, StoredGroups, StoredNeighbourhoods
from pipeline.strategies.neighbourhoods import (
    COMPONENTS,
    LabelledPoints,
    NeighbourhoodStrategy,
    group_points,
    pca_space,
    project_rows,
)

if TYPE_CHECKING:
    from pipeline.clustering.kmeans import BlockKMeansModel

Engine = Literal["block", "spark-ml"]
Preset = Literal["paper-like", "plain"]
PRESETS: dict[Preset, dict[str, Any]] = {
    "paper-like": {"components": 160.0, "whiten": True},  # needed to reproduce the published sparse neighbourhoods
    "plain": {"components": 0.95, "whiten": False},
}


@dataclass(frozen=True)
class DistributionAware(NeighbourhoodStrategy):
    """Neighbourhoods of PCA and k-means, each dealt round robin; sparse ones go to every worker.

    Ignores labels, so class balance is not guaranteed. Sparse neighbourhoods add (n - 1) * rows duplicates. Costs four
    passes over the images (the PCA reads only a sample), none through a shuffle; see pipeline/clustering/gram.py and
    lloyd.py.

    Attributes:
        components: a number of components, or a share of the variance below 1. None takes the preset's on construction.
        whiten: scale components to equal variance. None takes the preset's on construction.
        n_init: k-means starts, of which the best is kept.
        sparse_if: a neighbourhood of ``size`` rows goes to all n workers if size <= n ("le", the pseudo-code of the
            paper) or size < n ("lt", its prose).
        start: the rule for the first worker of each neighbourhood.
        engine: the block implementation or stock spark.ml.
        preset: the defaults of components and whiten.
    """

    name: ClassVar[str] = "distribution_aware"
    summary: ClassVar[str] = "neighbourhoods dealt round robin, sparse neighbourhoods copied to every worker"
    copies_rows: ClassVar[bool] = True
    components: float = option(None, **COMPONENTS, shown="set by --preset")
    whiten: bool = option(None, "scale components to equal variance", shown="set by --preset", advanced=True)
    n_init: int = option(1, "number of k-means starts, of which the best is used", least=1, advanced=True)
    sparse_if: SparseIf = option("le", SPARSE_HELP)
    start: Start = option("zero", START_HELP, advanced=True)
    engine: Engine = option(
        "block",
        "implementation: exact block PCA and integer k-means, or those of spark.ml, slow and for comparison",
        advanced=True,
    )
    preset: Preset = option(
        "paper-like",
        "paper-like: 160 whitened components, which find sparse neighbourhoods; plain: the components that explain 95 % of"
        " the variance, not whitened",
        recorded=False,
    )

    def __post_init__(self) -> None:
        """Take the preset's values for parameters that are None. Raises UsageError for options that spark.ml lacks."""
        super().__post_init__()
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.engine == "spark-ml":
            # Stock spark.ml has no share of variance, repeated starts, vectors or samples.
            if self.components < 1:
                raise UsageError(
                    f"--engine spark-ml needs a number of --components, not a share, got {self.components}"
                )
            if self.n_init != 1:
                raise UsageError(f"--engine spark-ml has a single k-means start; leave out --n-init {self.n_init}")
            if self.embedding:
                raise UsageError("--engine spark-ml clusters images; leave out --embedding")
            if self.fit_rows not in ("auto", "all"):
                raise UsageError(f"--engine spark-ml is fitted to all rows; leave out --fit-rows {self.fit_rows}")

    def check_without_labels(self) -> None:
        super().check_without_labels()
        if self.clusters is None:
            raise UsageError("--unlabelled needs --clusters K, as there is no number of classes to derive it from")

    def check_input(self, dataset: Dataset) -> None:
        super().check_input(dataset)
        if self.engine == "spark-ml" and dataset.layout.dtype != "uint8":
            raise UsageError(f"--engine spark-ml takes images of pixels, not {dataset.layout.describe()}")

    def fit(self, context: Context) -> FitResult:
        """Return the neighbourhood of every row: fit and project, cluster the points, and assign each to its nearest
        centre."""
        # Both engines yield models on the same integer grid, so that the assignment below is exact for either.
        clusters = self.clusters or 2 * context.scan.num_classes
        if self.engine == "spark-ml":
            from pipeline.strategies.stock import PARTITIONS, fit_stock

            pca, kmeans = fit_stock(context, **{**asdict(self), "clusters": clusters})
            space = pca_space(context, pca)
            fitted_params = {"partitions": min(PARTITIONS, context.scan.rows)}
        else:
            space = self.space(context)
            kmeans = None
            fitted_params = {}
        with project_rows(context, space) as points:
            if kmeans is None:
                kmeans = self._fit_clusters(context, points, clusters, space.projection)
            with context.phase("assign"):
                centres = kmeans.fitted.centres
                grouping, counts = group_points(
                    context, points, lambda part: nearest(part.points.points, centres)[0], len(centres)
                )
        return FitResult(
            grouping,
            counts,
            start=self.start,
            sparse_if=self.sparse_if,
            params=_kmeans_results(kmeans) | space.params | fitted_params,
            models={**space.models, "kmeans": kmeans},
        )

    def _fit_clusters(
        self, context: Context, points: RDD[LabelledPoints], clusters: int, projection: Projection | Grid
    ) -> BlockKMeansModel:
        """Return the k-means model of the points. clusters: the most clusters."""
        from pipeline.clustering.kmeans import BlockKMeans  # loads spark.ml, which --help and most tasks do without

        with context.phase("kmeans"):
            estimator = BlockKMeans(k=clusters, maxIter=self.max_iter, tol=self.tol, seed=self.seed, nInit=self.n_init)
            model = estimator.fit_points(
                points.map(lambda part: part.points),
                projection.exponent,
                values=context.scan.rows * projection.dimensions,
                report=lambda turn, inertia: context.report(f"iteration {turn}: inertia {inertia:.4e}"),
            )
            context.report(f"{len(model.fitted.centres)} clusters after {model.fitted.iterations} iterations")
            return model

    def refit(self, context: Context, stored_groups: StoredGroups) -> FitResult:
        return FitResult(
            StoredNeighbourhoods(), stored_groups.counts, self.start, self.sparse_if, params=stored_groups.params
        )


def _kmeans_results(kmeans: BlockKMeansModel) -> dict[str, Any]:
    """Return the results of k-means that the manifest lists among the parameters."""
    return {
        "clusters": len(kmeans.fitted.centres),
        "iterations": kmeans.fitted.iterations,
        "far_groups": kmeans.fitted.far_groups,
        "inertia": kmeans.trainingCost,
    }
