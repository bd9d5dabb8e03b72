"""``sliding-window``: more of the rows whose latest predictions were now correct, now wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import UsageError
from pipeline.core.specs import option
from trainer.sampling.base import LossTable
from trainer.sampling.row_table import RowTableSampler

MOST_PREDICTIONS = 10  # float32 then has 8,192 times the change of an entry exactly, as so many workers push it


@dataclass(frozen=True)
class SlidingWindowSampler(RowTableSampler):
    """Draws rows by the uncertainty of the model: the binary entropy of the correct ones among their last predictions.

    A row has the weight pressure^h, with the entropy h of 0 if all of its last ``window`` predictions were correct, or all
    wrong, and 1 if half of them were correct. The first ``window`` passes draw every row once.

    Song, Kim, Kim and Lee, "Carpe Diem, Seize the Samples Uncertain 'At the Moment' for Adaptive Batch Selection", CIKM
    2020. Unlike here, they take the entropy over the predicted classes, and the pressure falls during the run."""

    name: ClassVar[str] = "sliding-window"
    summary: ClassVar[str] = "draw a row the more often, the less its last predictions agree on correct or wrong"
    # An entry is a binary number: the digit 1, and one digit per prediction, which is 1 for a correct one.
    first_value: ClassVar[float] = 1.0
    window: int = option(10, "last predictions of a row that count", least=2, most=MOST_PREDICTIONS)

    @property
    def passes(self) -> int:
        return self.window

    def check(self, *, has_classes: bool, has_neighbourhoods: bool) -> None:
        super().check(has_classes=has_classes, has_neighbourhoods=has_neighbourhoods)
        # A real number is never predicted exactly, so that the model would be equally certain of all rows.
        if not has_classes:
            raise UsageError(
                f"--sampling {self.name} counts correct predictions of classes, but the model fits real targets: give"
                " --sampling recency, or leave it out"
            )

    def logits(self, entries: LossTable) -> npt.NDArray[np.float64]:
        return math.log(self.pressure) * _entropies(self.window)[_codes(entries)]

    def entries(self, before: LossTable, losses: LossTable, hits: npt.NDArray[np.bool_]) -> LossTable:
        codes = 2 * _codes(before) + hits
        full = 2**self.window
        # The oldest prediction leaves a full window.
        return np.where(codes < 2 * full, codes, codes % full + full).astype(np.float32)


def _codes(entries: LossTable) -> npt.NDArray[np.int64]:
    """Return entries as integers. Servers divide sums of changes, so that an entry may be off by a rounding error."""
    return np.rint(entries).astype(np.int64)


@lru_cache
def _entropies(window: int) -> npt.NDArray[np.float64]:
    """Return the entropy of every entry, in bits, float64 [2^(window + 1)]; 1 for a row without predictions."""
    codes = np.arange(2 ** (window + 1))
    correct = np.bitwise_count(codes) - 1.0
    predictions = np.floor(np.log2(np.maximum(codes, 1)))
    shares = np.divide(correct, predictions, out=np.full(len(codes), 0.5), where=predictions > 0)
    shares = np.stack([shares, 1 - shares])
    logarithms = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    entropies: npt.NDArray[np.float64] = -(shares * logarithms).sum(axis=0)
    return entropies
