"""K-means inside each class, then every (class, cluster) cell dealt round robin."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from pipeline.assignment.groups import Start
from pipeline.core.specs import option
from pipeline.input.dataset import Dataset
from pipeline.strategies.base import START_HELP, Context, FitResult, StoredGroups
from pipeline.strategies.engines import load_engine, modules_of
from pipeline.strategies.neighbourhoods import NeighbourhoodStrategy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClassCluster(NeighbourhoodStrategy):
    """K-means inside each class, with every (class, cluster) cell dealt round robin.

    clusters: the total number, rounded down to a multiple of the classes, but at least one per class (None: two per
    class). Row counts of every cell differ by at most one between workers, as with ``stratified``, so classes are
    balanced too. One k-means per class, on points of one common PCA; no sparse cells, no duplicates."""

    name: ClassVar[str] = "class_cluster"
    summary: ClassVar[str] = "k-means clusters inside each class, dealt round robin"
    added: ClassVar[tuple[str, ...]] = (*NeighbourhoodStrategy.added, "engine", "n_init")
    looks_at_labels: ClassVar[bool] = True
    even_sizes: ClassVar[bool] = True
    even_classes: ClassVar[bool] = True
    start: Start = option("carry", START_HELP, advanced=True)

    @property
    def modules(self) -> tuple[str, ...]:
        return modules_of(self.engine)

    def check_input(self, dataset: Dataset) -> None:
        load_engine(self.engine).check_input(self, dataset)

    def fit(self, context: Context) -> FitResult:
        """Return the (class, cluster) cell of every row, which the engine finds class by class."""
        classes = context.scan.num_classes
        clusters_per_class = max(1, (self.clusters or 2 * classes) // classes)
        if clusters_per_class == 1:
            logger.warning(
                f"warning: --clusters {self.clusters} for {classes} classes is one cluster per class, so class_cluster deals"
                f" rows as stratified --start {self.start} does; give at least {2 * classes}"
            )
        # Clusters are numbered over all classes, so that every (class, cluster) cell is one group.
        result = load_engine(self.engine).cluster(context, self, clusters_per_class, by_class=True)
        return FitResult(result.grouping, result.counts, start=self.start, params=result.params, models=result.models)

    def refit(self, context: Context, stored_groups: StoredGroups) -> FitResult:
        return stored_groups.fit_result(self.start)
