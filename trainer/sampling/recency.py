"""``recency``: online batch selection, by the most recent loss of each row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from trainer.sampling.base import LossTable
from trainer.sampling.row_table import RowTableSampler


@dataclass(frozen=True)
class RecencySampler(RowTableSampler):
    """Draws rows by the rank of their most recent loss: the probability falls exponentially from rank to rank.

    From rank to rank of N rows, the weight falls by the factor pressure^(1/N), so that the row of the greatest loss has
    about ``pressure`` times the weight of the one of the least. The first pass draws every row once.

    Loshchilov and Hutter, "Online Batch Selection for Faster Training of Neural Networks", 2015."""

    name: ClassVar[str] = "recency"
    summary: ClassVar[str] = "draw a row the more often, the greater its most recent loss is among a worker's rows"
    first_value: ClassVar[float] = -1.0  # below any loss: the row has not been drawn, and is due before all others

    def logits(self, entries: LossTable) -> npt.NDArray[np.float64]:
        ranks = np.empty(len(entries))
        # The loss of a row that was never drawn is negative; its rank is before all others.
        ranks[np.argsort(np.where(entries < 0, -np.inf, -entries), kind="stable")] = np.arange(len(entries))
        return -math.log(self.pressure) * ranks / len(entries)

    def entries(self, before: LossTable, losses: LossTable, hits: npt.NDArray[np.bool_]) -> LossTable:
        return losses
