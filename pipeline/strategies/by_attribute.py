"""Shards by a column of the input, such as a region, a device or a user: all rows with one value have one worker."""

from dataclasses import dataclass
from typing import ClassVar

from pipeline.core.specs import option
from pipeline.strategies.base import Context, FitResult, OneGroup, Strategy, row_counts


@dataclass(frozen=True)
class ByAttribute(Strategy):
    """A strategy that gives all rows with the same value of a column to the same worker.

    The value with most rows is placed first, each at the worker with the fewest rows, so that sizes differ by at most
    the rows of one value (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969)."""

    name: ClassVar[str] = "by_attribute"
    summary: ClassVar[str] = "all rows with equal values in a column at the same worker"
    decides_sizes: ClassVar[bool] = True
    column: str = option("label", "column of the input whose values are kept together", metavar="NAME")

    @property
    def bundle_column(self) -> str:
        return self.column

    def fit(self, context: Context) -> FitResult:
        return FitResult(OneGroup(), row_counts(context))
