"""Row i to worker i mod n, like TensorFlow's ``Dataset.shard``."""

from dataclasses import dataclass
from typing import ClassVar

from pipeline.strategies.base import Context, FitResult, OneGroup, Strategy, row_counts


@dataclass(frozen=True)
class RoundRobin(Strategy):
    """Row i to worker i mod n.

    Sizes differ by at most one. The order of the files is kept, so sorted or periodic data give skewed shards."""

    name: ClassVar[str] = "round_robin"
    summary: ClassVar[str] = "row i goes to worker i modulo the number of workers"
    even_sizes: ClassVar[bool] = True

    def uses_seed(self) -> bool:
        return False

    def fit(self, context: Context) -> FitResult:
        return FitResult(OneGroup(), row_counts(context))
