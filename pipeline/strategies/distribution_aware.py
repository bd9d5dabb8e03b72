"""PCA, then k-means; each neighbourhood dealt round robin, sparse ones to every worker (Provatas et al. 2021; SPEC 2.3)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from pyspark import RDD

from pipeline.arrays import Ints
from pipeline.assignment.chunks import count_by_chunk
from pipeline.assignment.groups import SparseIf, Start
from pipeline.clustering.kmeans import BlockKMeans, BlockKMeansModel
from pipeline.clustering.lloyd import nearest
from pipeline.clustering.pca import BlockPCAModel
from pipeline.clustering.projection import Neighbourhoods
from pipeline.errors import UsageError
from pipeline.input.dataset import Block
from pipeline.strategies.base import Context, Fitted, Grouping, StoredGroups, StoredNeighbourhoods, Strategy
from pipeline.strategies.neighbourhoods import LabelledPoints, check_fit, fit_pca, projected

Engine = Literal["block", "spark-ml"]
PRESETS: dict[str, dict[str, Any]] = {
    "paper-like": {"components": 160.0, "whiten": True},  # the published sparse neighbourhoods exist only so
    "plain": {"components": 0.95, "whiten": False},
}


@dataclass(frozen=True)
class ByNeighbourhood(Grouping):
    neighbourhoods = True
    nearest: Neighbourhoods

    def groups(self, block: Block) -> Ints:
        return self.nearest(block.images)


@dataclass(frozen=True)
class DistributionAware(Strategy):
    """clusters: None for twice the number of classes. components: a count, or a share of variance below 1.
    sparse_if: a neighbourhood goes to every worker with size <= n ("le", the pseudo-code) or < n ("lt", the prose).

    Ignores labels: class balance is not guaranteed. Duplicates are (n - 1) * rows in sparse neighbourhoods.
    Cost: see pipeline/gram.py and pipeline/lloyd.py; three passes over the images, none through a shuffle."""

    name: ClassVar[str] = "distribution_aware"
    looks_at_pixels: ClassVar[bool] = True
    clusters: int | None = None
    components: float = 160.0
    whiten: bool = True
    max_iter: int = 150
    tol: float = 1e-4
    n_init: int = 1
    sparse_if: SparseIf = "le"
    start: Start = "zero"
    engine: Engine = "block"

    def __post_init__(self) -> None:
        check_fit(self.components, self.clusters, self.max_iter, self.tol)
        if self.n_init < 1:
            raise UsageError(f"--n-init must be at least 1, got {self.n_init}")
        if self.sparse_if not in ("le", "lt"):
            raise UsageError(f"--sparse-if must be le or lt, got {self.sparse_if!r}")
        if self.start not in ("zero", "carry"):
            raise UsageError(f"--start must be zero or carry, got {self.start!r}")
        if self.engine not in ("block", "spark-ml"):
            raise UsageError(f"--engine must be block or spark-ml, got {self.engine!r}")

    def fit(self, context: Context) -> Fitted:
        wanted = self.clusters or 2 * context.scan.num_classes
        if self.engine == "spark-ml":
            from pipeline.strategies.stock import fit_stock

            pca, kmeans = fit_stock(context, **{**asdict(self), "clusters": wanted})
        else:
            pca = fit_pca(context, components=self.components, whiten=self.whiten)
            kmeans = None
        with projected(context, pca) as points:
            if kmeans is None:
                kmeans = self._fit_clusters(context, points, wanted, pca)
            with context.phase("assign"):
                centres, bounds = kmeans.fitted.centres, context.bounds
                counts = points.map(
                    lambda part: count_by_chunk(
                        part.points.ids, nearest(part.points.points, centres)[0], len(centres), bounds
                    )
                ).reduce(np.add)
        return Fitted(
            ByNeighbourhood(Neighbourhoods(pca.projection, kmeans.fitted.centres)),
            counts,
            start=self.start,
            sparse_if=self.sparse_if,
            params=_resolved(pca, kmeans),
            models={"pca": pca, "kmeans": kmeans},
        )

    def _fit_clusters(
        self, context: Context, points: RDD[LabelledPoints], wanted: int, pca: BlockPCAModel
    ) -> BlockKMeansModel:
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
        "components_fitted": len(pca.spectrum.variances),
        "explained_variance": round(float(pca.explained_variance_ratio.sum()), 6),
        "iterations": kmeans.fitted.iterations,
        "inertia": kmeans.trainingCost,
    }
