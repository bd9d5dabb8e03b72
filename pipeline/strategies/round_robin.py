"""Row i to worker i mod n (SPEC 2.1, ``mod``; TF's ``Dataset.shard``)."""

from dataclasses import dataclass
from typing import ClassVar

from pipeline.strategies.base import Context, Fitted, Grouping, Strategy, row_counts


@dataclass(frozen=True)
class RoundRobin(Strategy):
    """Sizes differ by at most one. Keeps whatever order the files have: sorted or periodic data give skewed shards."""

    name: ClassVar[str] = "round_robin"

    def fit(self, context: Context) -> Fitted:
        return Fitted(Grouping(), row_counts(context))
