"""Row i to worker i mod n, as TensorFlow's ``Dataset.shard`` does it."""

from dataclasses import dataclass
from typing import ClassVar

from pipeline.strategies.base import Context, Fitted, OneGroup, Strategy, row_counts


@dataclass(frozen=True)
class RoundRobin(Strategy):
    """Sizes differ by at most one. Keeps whatever order the files have: sorted or periodic data give skewed shards."""

    name: ClassVar[str] = "round_robin"
    summary: ClassVar[str] = "row i to worker i mod N"
    even_sizes: ClassVar[bool] = True

    def draws(self) -> bool:
        return False

    def fit(self, context: Context) -> Fitted:
        return Fitted(OneGroup(), row_counts(context))
