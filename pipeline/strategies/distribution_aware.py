"""PCA, then k-means; each neighbourhood dealt round robin, sparse ones to every worker (Provatas et al. 2021)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pyspark import RDD

from pipeline.assignment.groups import Start
from pipeline.clustering.lloyd import nearest
from pipeline.errors import UsageError
from pipeline.specs import option
from pipeline.strategies.base import START_HELP, Context, Fitted, StoredGroups, StoredNeighbourhoods
from pipeline.strategies.neighbourhoods import (
    COMPONENTS,
    LabelledPoints,
    NeighbourhoodStrategy,
    fit_pca,
    group_points,
    projected,
)

if TYPE_CHECKING:
    from pipeline.clustering.kmeans import BlockKMeansModel
    from pipeline.clustering.pca import BlockPCAModel

Engine = Literal["block", "spark-ml"]
Preset = Literal["paper-like", "plain"]
PRESETS: dict[Preset, dict[str, Any]] = {
    "paper-like": {"components": 160.0, "whiten": True},  # the published sparse neighbourhoods exist only so
    "plain": {"components": 0.95, "whiten": False},
}


@dataclass(frozen=True)
class DistributionAware(NeighbourhoodStrategy):
    """components, whiten: None for the preset's, filled in on construction, so never None later.
    sparse_if: a neighbourhood goes to every worker with size <= n ("le", the pseudo-code) or < n ("lt", the prose).

    Ignores labels: class balance is not guaranteed. Duplicates are (n - 1) * rows in sparse neighbourhoods.
    Cost: see pipeline/clustering/gram.py and lloyd.py; four passes over the images (that of the PCA over a
    sample), none through a shuffle."""

    name: ClassVar[str] = "distribution_aware"
    summary: ClassVar[str] = "each neighbourhood dealt round robin, sparse ones to every worker"
    copies_rows: ClassVar[bool] = True
    components: float = option(None, **COMPONENTS, shown="the preset's")
    whiten: bool = option(None, "scale components to equal variance, or keep their variances", shown="the preset's")
    n_init: int = option(1, "k-means starts, the best kept", metavar="R", least=1)
    sparse_if: Literal["le", "lt"] = option(
        "le", "a neighbourhood of at most (le) or fewer than (lt) N rows goes to every worker"
    )
    start: Start = option("zero", START_HELP)
    engine: Engine = option("block", "exact block PCA and integer k-means, or stock spark.ml, slow, for comparison")
    preset: Preset = option(
        "paper-like",
        "paper-like: 160 whitened components, which find sparse neighbourhoods; plain: components of 95 % of the"
        " variance, not whitened",
        recorded=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.engine == "spark-ml":
            if self.components < 1:
                raise UsageError(
                    f"--engine spark-ml needs a number of --components, not a share, got {self.components}"
                )
            if self.n_init != 1:
                raise UsageError(f"--engine spark-ml has one k-means start; leave out --n-init {self.n_init}")
            if self.fit_rows not in ("auto", "all"):
                raise UsageError(f"--engine spark-ml is fitted to all rows; leave out --fit-rows {self.fit_rows}")

    def fit(self, context: Context) -> Fitted:
        wanted = self.clusters or 2 * context.scan.num_classes
        if self.engine == "spark-ml":
            from pipeline.strategies.stock import PARTITIONS, fit_stock

            pca, kmeans = fit_stock(context, **{**asdict(self), "clusters": wanted})
            fitted = {"partitions": min(PARTITIONS, context.scan.rows)}
        else:
            pca = fit_pca(
                context, components=self.components, whiten=self.whiten, fit_rows=self.fit_rows, seed=self.seed
            )
            kmeans, fitted = None, {}
        with projected(context, pca) as points:
            if kmeans is None:
                kmeans = self._fit_clusters(context, points, wanted, pca)
            with context.phase("assign"):
                centres = kmeans.fitted.centres
                grouping, counts = group_points(
                    context, points, lambda part: nearest(part.points.points, centres)[0], len(centres)
                )
        return Fitted(
            grouping,
            counts,
            start=self.start,
            sparse_if=self.sparse_if,
            params=_resolved(pca, kmeans) | fitted,
            models={"pca": pca, "kmeans": kmeans},
        )

    def _fit_clusters(
        self, context: Context, points: RDD[LabelledPoints], wanted: int, pca: BlockPCAModel
    ) -> BlockKMeansModel:
        from pipeline.clustering.kmeans import BlockKMeans  # loads spark.ml, which --help and most tasks do without

        with context.phase("kmeans"):
            estimator = BlockKMeans(k=wanted, maxIter=self.max_iter, tol=self.tol, seed=self.seed, nInit=self.n_init)
            model = estimator.fit_points(
                points.map(lambda part: part.points),
                pca.projection.exponent,
                values=context.scan.rows * pca.projection.dimensions,
                report=lambda turn, inertia: context.report(f"iteration {turn}: inertia {inertia:.4e}"),
            )
            context.report(f"{len(model.fitted.centres)} clusters after {model.fitted.iterations} iterations")
            return model

    def refit(self, context: Context, stored: StoredGroups) -> Fitted:
        return Fitted(StoredNeighbourhoods(), stored.counts, self.start, self.sparse_if, params=stored.params)


def _resolved(pca: BlockPCAModel, kmeans: BlockKMeansModel) -> dict[str, Any]:
    return {
        "clusters": len(kmeans.fitted.centres),
        "rows_fitted": pca.rows,
        "components_fitted": len(pca.spectrum.variances),
        "explained_variance": round(float(pca.explained_variance_ratio.sum()), 6),
        "iterations": kmeans.fitted.iterations,
        "far_groups": kmeans.fitted.far_groups,
        "inertia": kmeans.trainingCost,
    }
