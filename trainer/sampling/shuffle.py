"""``shuffle``: passes over all rows, each in a new order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from trainer.sampling.orders import PassOrder, permutation
from trainer.sampling.passes import PassRows, PassSampler


@dataclass(frozen=True)
class ShuffleSampler(PassSampler):
    """Draws passes over all rows, each pass in a new order."""

    name: ClassVar[str] = "shuffle"
    summary: ClassVar[str] = "pass over a worker's rows, in a new order each time"

    def pass_order(self, rows: PassRows) -> PassOrder:
        return partial(permutation, rows.num_rows, rows.seed, rows.worker)
