"""PCA, then k-means; each neighbourhood dealt round robin, sparse ones to every worker (Provatas et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pipeline.assignment.groups import SparseIf, Start
from pipeline.core.errors import UsageError
from pipeline.core.specs import option
from pipeline.input.dataset import Dataset
from pipeline.strategies.base import SPARSE_HELP, START_HELP, Context, FitResult, StoredGroups
from pipeline.strategies.engines import load_engine, modules_of
from pipeline.strategies.neighbourhoods import COMPONENTS, NeighbourhoodStrategy

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
        sparse_if: a neighbourhood of ``size`` rows goes to all n workers if size <= n ("le", the pseudo-code of the
            paper) or size < n ("lt", its prose).
        start: the rule for the first worker of each neighbourhood.
        preset: the defaults of components and whiten.
    """

    name: ClassVar[str] = "distribution_aware"
    summary: ClassVar[str] = "neighbourhoods dealt round robin, sparse neighbourhoods copied to every worker"
    copies_rows: ClassVar[bool] = True
    components: float = option(None, **COMPONENTS, shown="set by --preset")
    whiten: bool = option(None, "scale components to equal variance", shown="set by --preset", advanced=True)
    sparse_if: SparseIf = option("le", SPARSE_HELP)
    start: Start = option("zero", START_HELP, advanced=True)
    preset: Preset = option(
        "paper-like",
        "paper-like: 160 whitened components, which find sparse neighbourhoods; plain: the components that explain 95 % of"
        " the variance, not whitened",
        recorded=False,
    )

    def __post_init__(self) -> None:
        """Take the preset's values for parameters that are None."""
        super().__post_init__()
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def larger_groups(self) -> str:
        return "a larger --radius" if self.clustering == "dbscan" else "fewer --clusters"

    @property
    def modules(self) -> tuple[str, ...]:
        return modules_of(self.engine)

    def check_without_labels(self) -> None:
        super().check_without_labels()
        if self.clusters is None and self.clustering != "dbscan":
            raise UsageError("--unlabelled needs --clusters K, as there is no number of classes to derive it from")

    def check_input(self, dataset: Dataset) -> None:
        load_engine(self.engine).check_input(self, dataset)

    def fit(self, context: Context) -> FitResult:
        """Return the neighbourhood of every row, which the engine finds."""
        clusters = self.clusters or 2 * context.scan.num_classes
        result = load_engine(self.engine).cluster(context, self, clusters, by_class=False)
        return FitResult(
            result.grouping, result.counts, self.start, self.sparse_if, params=result.params, models=result.models
        )

    def refit(self, context: Context, stored_groups: StoredGroups) -> FitResult:
        return stored_groups.fit_result(self.start, self.sparse_if)
