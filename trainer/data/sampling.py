"""The drawing of mini-batches: which of a worker's rows are in the mini-batch at a clock.

A draw is a pure function of (seed, worker, clock). A resumed run therefore needs no state but the clock, and workers of
a run never share random numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.seeds import Purpose, generator
from trainer.coordination.passes import RowSums
from trainer.data.follow import Following
from trainer.data.shards import Rows


def permutation(rows: int, seed: int, worker: int, turn: int) -> Ints:
    """Return the order of a worker's rows in pass ``turn`` over its shard: int64 [rows], read-only."""
    order = generator(seed, Purpose.ORDER, worker, turn).permutation(rows)
    order.flags.writeable = False
    return order


def indices(
    rows: int, batch: int, clock: int, seed: int, worker: int, order: Callable[[int], Ints] | None = None
) -> Ints:
    """Return the rows of the mini-batch at a clock: int64 [batch], from position clock * batch of consecutive passes.

    If a pass ends inside a mini-batch, the next pass fills it up, so that no row is left for a later pass. O(batch),
    and O(rows) for the first mini-batch of a pass, for any clock.

    Args:
        rows: number of rows in the shard.
        batch: rows per mini-batch.
        clock: number of the mini-batch.
        seed: of the run.
        worker: number of the worker.
        order: function from the number of a pass to the order of its rows; default: ``permutation``.
    """
    start = clock * batch
    stop = (clock + 1) * batch
    turns = range(start // rows, (stop - 1) // rows + 1)
    order = order or partial(permutation, rows, seed, worker)
    parts = [order(turn)[max(0, start - turn * rows) : stop - turn * rows] for turn in turns]
    return np.concatenate(parts)


def bernoulli(rows: int, fraction: float, clock: int, seed: int, worker: int) -> Ints | slice:
    """Return the rows of the mini-batch at a clock if each row is drawn independently with probability ``fraction``.

    The result is int64 [about rows * fraction], or the slice of all rows for a fraction of 1 or more. A binomial number
    of rows, drawn without replacement, has the same distribution as one coin per row, at a cost of O(drawn rows).

    Args:
        rows: number of rows in the shard.
        fraction: probability of a row.
        clock: number of the mini-batch.
        seed: of the run.
        worker: number of the worker.
    """
    if fraction >= 1:
        return slice(None)
    rng = generator(seed, Purpose.SAMPLING, worker, clock)
    return rng.choice(rows, rng.binomial(rows, fraction), replace=False, shuffle=False)


class Draw(NamedTuple):
    """The rows of one mini-batch.

    Attributes:
        rows: all rows of the worker.
        places: the positions of the mini-batch's rows among them, int64 [B], or the slice of all.
        passes: ends of passes in the mini-batch; None if the sampler does not make passes over the same rows.
        next_pass_rows: number of places after the last of these ends, which belong to the next pass.
    """

    rows: Rows
    places: Ints | slice
    passes: int | None = None
    next_pass_rows: int = 0

    def seen(self) -> RowSums | None:
        """Return the hash sums of the mini-batch. O(B). None if rows are not hashed, or passes are not known."""
        if self.passes is None or not len(self.rows.hashes):
            return None
        hashes = self.rows.hashes[self.places]
        return RowSums(int(hashes.sum()), int(hashes[len(hashes) - self.next_pass_rows :].sum()), self.passes)


class Sampler(Protocol):
    """Draws the mini-batches of one worker."""

    def draw(self, clock: int) -> Draw:
        """Return the mini-batch at a clock. Clocks may come in any order, and from any one thread."""
        ...


class ShuffleSampler:
    """Draws passes over fixed rows, each pass in a new order. Raises ValueError without rows.

    Args:
        rows: the worker's rows.
        batch_size: rows per mini-batch.
        seed: of the run.
        worker: number of the worker.
        places: positions of the rows that are drawn, int64; None for all.
    """

    def __init__(self, rows: Rows, batch_size: int, *, seed: int, worker: int, places: Ints | None = None) -> None:
        self.num_rows = len(rows) if places is None else len(places)
        if not self.num_rows or batch_size < 1:
            raise ValueError(f"no mini-batches of {batch_size} out of {self.num_rows} rows")
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.worker = worker
        # Two entries: a mini-batch can contain the end of one pass and the beginning of the next.
        self._order = lru_cache(maxsize=2)(partial(_ordered, places, self.num_rows, seed, worker))

    def draw(self, clock: int) -> Draw:
        """Return the mini-batch at a clock, with the number of passes over the rows that end in it."""
        rows = self.num_rows
        stop = (clock + 1) * self.batch_size
        passes = stop // rows - (stop - self.batch_size) // rows
        places = indices(rows, self.batch_size, clock, self.seed, self.worker, self._order)
        # After an end of a pass, the last ``stop % rows`` rows of the mini-batch belong to the next pass.
        return Draw(self.rows, places, passes, stop % rows if passes else 0)


def _ordered(places: Ints | None, rows: int, seed: int, worker: int, turn: int) -> Ints:
    """Return the order of a pass as ``permutation``, of the rows at ``places`` if there are any."""
    order = permutation(rows, seed, worker, turn)
    return order if places is None else places[order]


class BernoulliSampler:
    """Draws each row independently with probability ``fraction``; see ``bernoulli``. Raises ValueError without rows."""

    def __init__(self, rows: Rows, fraction: float, *, seed: int, worker: int) -> None:
        if not len(rows):
            raise ValueError("no mini-batches out of 0 rows")
        self.rows = rows
        self.fraction = fraction
        self.seed = seed
        self.worker = worker

    def draw(self, clock: int) -> Draw:
        return Draw(self.rows, bernoulli(len(self.rows), self.fraction, clock, self.seed, self.worker))


class FollowSampler:
    """Draws passes over rows that grow; see ``Following``.

    Args:
        follow: the passes and their rows.
        batch_size: rows per mini-batch.
        seed: of the run.
        worker: number of the worker.
    """

    def __init__(self, follow: Following, batch_size: int, *, seed: int, worker: int) -> None:
        self.follow = follow
        self.batch_size = batch_size
        self._order = lru_cache(maxsize=2)(lambda rows, turn: permutation(rows, seed, worker, turn))

    def draw(self, clock: int) -> Draw:
        rows, places = self.follow.chosen(self.batch_size, clock, self._order)
        return Draw(rows, places)
