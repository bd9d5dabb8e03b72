"""The losses of a worker's rows in its own mini-batches, and draws by a weight of each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Floats, Ints


class RecordedLosses:
    """The losses of rows over their visits: the last one, and mean and variance.

    Args:
        rows: N.

    Attributes:
        last: the most recent loss of each row, float64 [N]; NaN for a row without any.
        counts: visits of each row, int64 [N].
    """

    def __init__(self, rows: int) -> None:
        self.last: Floats = np.full(rows, np.nan)
        self.counts: Ints = np.zeros(rows, np.int64)
        self._means = np.zeros(rows)
        self._squares = np.zeros(rows)  # sums of squared deviations from the means

    def __len__(self) -> int:
        return len(self.last)

    def note(self, places: Ints, losses: npt.NDArray[np.floating]) -> None:
        """Add the losses of a mini-batch. places: the positions of its rows, int64 [B]; losses: float [B]."""
        rest = np.arange(len(places))
        # A row may be in a mini-batch twice, at the end of a pass. Its losses count in their order.
        while len(rest):
            rows, first = np.unique(places[rest], return_index=True)
            self._note_distinct(rows, losses[rest[first]].astype(np.float64))
            rest = np.delete(rest, first)

    def _note_distinct(self, rows: Ints, losses: Floats) -> None:
        """Add a loss of each of several rows, by Welford's method."""
        self.last[rows] = losses
        self.counts[rows] += 1
        deviations = losses - self._means[rows]
        self._means[rows] += deviations / self.counts[rows]
        self._squares[rows] += deviations * (losses - self._means[rows])

    def variances(self) -> Floats:
        """Return the population variance of each row's losses, float64 [N]; 0 for a row with fewer than two."""
        variances: Floats = self._squares / np.maximum(self.counts, 1)
        return variances


# select(losses, number of rows to select, epoch, generator) returns the positions of rows, each once.
# epoch: the worker's last complete pass, from 0, or the one that begins (--gossip-signal start).
ExampleSelector: TypeAlias = Callable[[RecordedLosses, int, int, np.random.Generator], Ints]


def draw_by_weight(weights: Floats, size: int, rng: np.random.Generator) -> Ints:
    """Draw positions without replacement, one after the other in proportion to the weights that are left.

    Positions of weight 0 are drawn at random, after all others. Efraimidis and Spirakis, "Weighted random sampling with a
    reservoir", 2006.

    Args:
        weights: not negative, float64 [N].
        size: number of positions, at most N.
        rng: decides.
    """
    keys = np.full(len(weights), np.inf)
    times = rng.exponential(size=len(weights))
    np.divide(times, weights, out=keys, where=weights > 0)
    order = np.lexsort((rng.random(len(weights)), keys))
    selected: Ints = order[:size].astype(np.int64)
    return selected
