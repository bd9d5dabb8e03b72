"""Shards with few classes each, the pathological split of McMahan et al. (2017)."""

from dataclasses import dataclass
from typing import ClassVar

from pipeline.assignment.shares import class_table
from pipeline.core.seeds import Purpose, generator
from pipeline.core.specs import option
from pipeline.strategies.base import Context, FitResult, Strategy
from pipeline.strategies.stratified import ByLabel


@dataclass(frozen=True)
class ByClass(Strategy):
    """A strategy that gives every worker rows of the same number of classes.

    Which classes is drawn at random; every class is divided equally among its workers, in random order."""

    name: ClassVar[str] = "by_class"
    summary: ClassVar[str] = "rows of few classes at each worker"
    looks_at_labels: ClassVar[bool] = True
    decides_sizes: ClassVar[bool] = True
    classes_per_worker: int | None = option(
        None,
        "number of classes of each worker",
        metavar="CLASSES",
        least=1,
        shown="2, or more if classes would be left out",
    )

    def fit(self, context: Context) -> FitResult:
        counts = context.scan.label_counts
        sizes = counts.sum(axis=0)
        classes = int((sizes > 0).sum())
        # Of a single class there are no two; with few workers, two each would leave classes out.
        usual = min(classes, max(2, -(-classes // context.num_workers)))
        per_worker = self.classes_per_worker or usual
        table = class_table(sizes, context.num_workers, per_worker, generator(self.seed, Purpose.SKEW))
        return FitResult(ByLabel(self.seed), counts, params={"classes_per_worker": per_worker}, table=table)
