"""Stratified sharding: each class is dealt round robin over the workers (Provatas et al. 2021)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pipeline.assignment.groups import GroupTable, Start
from pipeline.assignment.permutation import keyed_permutations
from pipeline.core.arrays import Ints
from pipeline.core.specs import option
from pipeline.input.dataset import Block
from pipeline.strategies.base import START_HELP, Context, FitResult, Grouping, Strategy


@dataclass(frozen=True)
class ByLabel(Grouping):
    """The grouping by label.

    shuffle: the seed of a permutation inside each class, or None for id order."""

    permutes_ranks = True
    reads_images = False

    shuffle: int | None = None

    def groups(self, block: Block) -> Ints:
        return block.labels.astype(np.int64)

    def workers(self, ids: Ints, groups: Ints, ranks: Ints, table: GroupTable) -> Ints:
        """Return the worker of each row, int64 [rows], from its class and its rank in the class, permuted if
        requested."""
        if self.shuffle is not None:
            labels, places = np.unique(groups, return_inverse=True)
            keys = [self.shuffle * 1_000_003 + label for label in labels.tolist()]
            ranks = keyed_permutations(ranks, places, table.sizes[labels], keys)
        return super().workers(ids, groups, ranks, table)


@dataclass(frozen=True)
class Stratified(Strategy):
    """A strategy that deals each class round robin, so that class counts differ by at most one between workers.

    start="zero" is the paper's rule, and gives the remainders of all classes to the workers with low numbers;
    with start="carry" the workers' totals also differ by at most one."""

    name: ClassVar[str] = "stratified"
    summary: ClassVar[str] = "each class dealt round robin"
    looks_at_labels: ClassVar[bool] = True
    even_classes: ClassVar[bool] = True
    start: Start = option("zero", START_HELP, advanced=True)
    shuffle_within_class: bool = option(False, "deal the rows of each class in random order")

    def uses_seed(self) -> bool:
        return self.shuffle_within_class

    def fit(self, context: Context) -> FitResult:
        shuffle = self.seed if self.shuffle_within_class else None
        return FitResult(ByLabel(shuffle), context.scan.label_counts, start=self.start)
