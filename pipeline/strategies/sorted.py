"""Shards of rows that are sorted by label, as files that one sensor or one day has written often are."""

from dataclasses import dataclass
from typing import ClassVar

from pipeline.assignment.shares import sorted_table
from pipeline.core.specs import option
from pipeline.strategies.base import Context, FitResult, Strategy
from pipeline.strategies.stratified import ByLabel


@dataclass(frozen=True)
class Sorted(Strategy):
    """A strategy that sorts rows by label, then by id, and cuts them into equal pieces.

    With a strictness below 1, only this share of every class is sorted and the rest is dealt equally."""

    name: ClassVar[str] = "sorted"
    summary: ClassVar[str] = "rows sorted by label and cut into equal pieces"
    looks_at_labels: ClassVar[bool] = True
    even_sizes: ClassVar[bool] = True
    decides_sizes: ClassVar[bool] = True
    strictness: float = option(1.0, "share of every class that is sorted; the rest is dealt equally", least=0, most=1)

    def uses_seed(self) -> bool:
        return False

    def fit(self, context: Context) -> FitResult:
        counts = context.scan.label_counts
        table = sorted_table(counts.sum(axis=0), context.num_workers, self.strictness)
        return FitResult(ByLabel(), counts, table=table)
