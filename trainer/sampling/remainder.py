"""Passes over rows through cohorts of workers: the rows that a pass still lacks are dealt anew to other workers. Pure.

Rows are numbered over all shards. A worker of a later cohort first draws its part of what is left of each interrupted pass,
then makes passes over its own rows. Every pass therefore still has every row once.

Fast workers may be many passes ahead of slow ones. The rest of all these passes would be rows of the slow workers alone, so
only the newest passes are completed, and the rest of older ones is left out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.seeds import Purpose, generator
from trainer.coordination.cohorts import Cohort
from trainer.sampling.orders import permutation

# Passes that a change of workers completes. Workers in step are in one pass, or some of them have begun the next one.
MOST_OPEN = 2


@dataclass(frozen=True)
class WorkerPasses:
    """The passes of one worker of a cohort.

    Attributes:
        worker: number of the worker.
        seed: of the run.
        batch_size: rows per mini-batch of this worker.
        clock: its first clock.
        turn: number of its first pass, from 0.
        parts: its rows of each interrupted pass in the order in which it draws them, int64; possibly empty.
        own: its rows of every later pass, int64.
    """

    worker: int
    seed: int
    batch_size: int
    clock: int
    turn: int
    parts: tuple[Ints, ...]
    own: Ints

    def order(self, index: int) -> Ints:
        """Return the rows of pass ``turn + index`` in the order in which they are drawn, int64."""
        if index < len(self.parts):
            return self.parts[index]
        return self.own[permutation(len(self.own), self.seed, self.worker, self.turn + index)]

    def size(self, index: int) -> int:
        """Return the number of rows of pass ``turn + index``."""
        return len(self.parts[index]) if index < len(self.parts) else len(self.own)

    def place(self, position: int) -> tuple[int, int]:
        """Return the pass to which a position belongs, counted from ``turn``, and the position in it."""
        ends = list(accumulate(map(len, self.parts)))
        total = ends[-1] if ends else 0
        if position < total:
            index = bisect_right(ends, position)
            return index, position - (ends[index - 1] if index else 0)
        turns, inside = divmod(position - total, len(self.own))
        return len(ends) + turns, inside

    def progress(self, clock: int) -> tuple[int, int]:
        """Return the number of the pass in which the worker is at a clock, from 0, and its position in it."""
        index, inside = self.place((clock - self.clock) * self.batch_size)
        return self.turn + index, inside

    def draw(self, clock: int, order: Callable[[int], Ints]) -> tuple[Ints, int, int]:
        """Return the mini-batch at a clock: its rows int64 [B], the passes that end in it, and its rows after that.

        Passes of which the worker has no rows end with the pass before, or with the beginning of its first mini-batch.

        clock: number of the mini-batch.
        order: ``order``, possibly with a cache."""
        position = (clock - self.clock) * self.batch_size
        index, inside = self.place(position)
        passes = index if clock == self.clock else 0
        left = self.batch_size
        pieces: list[Ints] = []
        later_rows = left if passes else 0
        while left:
            part = order(index)[inside : inside + left]
            pieces.append(part)
            left -= len(part)
            # The pass ends here, and with it those without rows after it.
            if inside + len(part) == len(order(index)):
                after, inside = self.place(position + self.batch_size - left)
                passes += after - index
                index = after
                later_rows = left
        return np.concatenate(pieces), passes, later_rows


def first_passes(own: Sequence[Ints], batches: Sequence[int], seed: int) -> list[WorkerPasses]:
    """Return the passes of the workers with which a run begins.

    Args:
        own: the rows of each worker.
        batches: rows per mini-batch of each worker.
        seed: of the run.
    """
    pairs = zip(own, batches, strict=True)
    return [WorkerPasses(worker, seed, batch, 0, 0, (), rows) for worker, (rows, batch) in enumerate(pairs)]


class OpenPasses(NamedTuple):
    """The passes that a cohort leaves incomplete, and that the next one completes.

    Attributes:
        begin: number of the first one, from 0.
        end: number of the first pass after them.
        left_out: rows of passes before ``begin`` that some workers have not drawn.
    """

    begin: int
    end: int
    left_out: int


def open_passes(before: Sequence[WorkerPasses], clocks: Sequence[int]) -> OpenPasses:
    """Return the passes that workers leave incomplete at their clocks, MOST_OPEN at most."""
    places = [passes.progress(clock) for passes, clock in zip(before, clocks, strict=True)]
    # A pass has begun if a worker has drawn a row of it, or if it was interrupted before.
    end = max(turn + (inside > 0) for turn, inside in places)
    end = max(end, before[0].turn + len(before[0].parts))
    begin = max(min(turn for turn, _ in places), end - MOST_OPEN)
    left_out = 0
    for passes, (at, inside) in zip(before, places, strict=True):
        if at < begin:
            left_out += sum(passes.size(turn - passes.turn) for turn in range(at, begin)) - inside
    return OpenPasses(begin, end, left_out)


def later_passes(
    before: Sequence[WorkerPasses], cohort: Cohort, own: Sequence[Ints], batches: Sequence[int], number: int
) -> list[WorkerPasses]:
    """Return the passes of the workers of a cohort that follows another one.

    What is left of a pass is shuffled and dealt in turn, so that the parts of two workers differ by at most one row.

    Args:
        before: the passes of the workers that ended at ``cohort.ends``.
        cohort: the cohort.
        own: the rows of each of its workers in passes that nobody has begun.
        batches: rows per mini-batch of each of its workers.
        number: of the cohort, from 1.
    """
    seed = before[0].seed
    places = [passes.progress(clock) for passes, clock in zip(before, cohort.ends, strict=True)]
    end = open_passes(before, cohort.ends).end
    parts: list[list[Ints]] = [[] for _ in own]
    # A worker in the middle of the pass leaves the rest of it; one that has not begun it leaves all of its rows.
    for turn in range(cohort.turn, end):
        left = [
            passes.order(turn - passes.turn)[inside if turn == at else 0 :]
            for passes, (at, inside) in zip(before, places, strict=True)
            if at <= turn
        ]
        rows = np.concatenate(left)
        rows = rows[generator(seed, Purpose.REMAINDER, number, turn).permutation(len(rows))]
        for worker in range(len(own)):
            parts[worker].append(rows[worker :: len(own)])
    return [
        WorkerPasses(worker, seed, batches[worker], cohort.clock, cohort.turn, tuple(parts[worker]), own[worker])
        for worker in range(len(own))
    ]
