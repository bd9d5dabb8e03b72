"""A seeded uniform permutation, then round robin: the baseline of Provatas et al. (2021)."""

from dataclasses import dataclass
from typing import ClassVar

from pipeline.assignment.bundles import BundleOrder
from pipeline.assignment.groups import GroupTable
from pipeline.assignment.permutation import keyed_permutation
from pipeline.core.arrays import Ints
from pipeline.strategies.base import Context, FitResult, OneGroup, Strategy, row_counts


@dataclass(frozen=True)
class RankPermutation(OneGroup):
    permutes_ranks = True

    seed: int

    def workers(self, ids: Ints, groups: Ints, ranks: Ints, table: GroupTable) -> Ints:
        return table.owners(groups, keyed_permutation(ranks, int(table.sizes[0]), self.seed))


@dataclass(frozen=True)
class Random(Strategy):
    """A seeded random permutation of the rows, dealt round robin.

    Sizes differ by at most one; class counts are hypergeometric. The permutation is a keyed function of the rank, so it
    needs no shuffle."""

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "a random permutation dealt round robin; equal shard sizes"
    even_sizes: ClassVar[bool] = True
    bundle_order: ClassVar[BundleOrder] = "drawn"

    def fit(self, context: Context) -> FitResult:
        return FitResult(RankPermutation(self.seed), row_counts(context))
