"""Passes over rows that grow: the rows of each mini-batch if a worker gets more rows after some passes.

A stretch is a number of passes over the same rows. New rows are only appended, so that the index of a row never
changes. Given the stretches, a mini-batch is a pure function of (seed, worker, clock), as for fixed rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from pipeline.core.arrays import Ints
from trainer.data.rows import Rows


class Stretch(NamedTuple):
    """Passes over the rows of one generation.

    Attributes:
        position: number of the stretch's first example among all examples that the worker draws.
        turn: number of its first pass.
        rows: number of rows: the first ones, up to and including this generation.
        generation: of the set.
    """

    position: int
    turn: int
    rows: int
    generation: int


class RowSource(Protocol):
    """A source of additional rows."""

    def next(self, now: Stretch, position: int, turn: int) -> Stretch | None:
        """Return the stretch that begins with pass ``turn`` at a position, or None if there are no more rows yet.

        The caller keeps a stretch that is returned, and does not ask for it again.

        Args:
            now: the stretch so far.
            position: number of the first example of the pass.
            turn: number of the pass.
        """
        ...

    def rows(self, generation: int) -> Rows:
        """Return the rows up to a generation, and possibly later ones."""
        ...


class Following:
    """The mini-batches of a worker whose rows grow. stretches: the known ones by position; the first begins at 0."""

    def __init__(self, stretches: list[Stretch], source: RowSource) -> None:
        assert stretches, "a worker begins with some rows"
        self.stretches = stretches
        self.source = source

    def find(self, position: int) -> Stretch:
        """Return the stretch of an example. At the start of a pass in the last stretch, the source may add another."""
        place = bisect_right(self.stretches, position, key=lambda stretch: stretch.position) - 1
        now = self.stretches[place]
        turns, inside = divmod(position - now.position, now.rows)
        if place + 1 < len(self.stretches) or inside or not turns:
            return now
        next_stretch = self.source.next(now, position, now.turn + turns)
        if next_stretch is None:
            return now
        self.stretches.append(next_stretch)
        return next_stretch

    def chosen(self, batch: int, clock: int, order: Callable[[int, int], Ints]) -> tuple[Rows, Ints]:
        """Return the rows, and the selection for the mini-batch at a clock, int64 [batch].

        Args:
            batch: rows per mini-batch.
            clock: number of the mini-batch.
            order: function from (rows, turn) to the order of the rows in a pass.
        """
        position = clock * batch
        stop = (clock + 1) * batch
        parts: list[Ints] = []
        generation = 0
        # A mini-batch may cross ends of passes and of stretches.
        while position < stop:
            now = self.find(position)
            turns, inside = divmod(position - now.position, now.rows)
            count = min(now.rows - inside, stop - position)
            parts.append(order(now.rows, now.turn + turns)[inside : inside + count])
            position = position + count
            generation = max(generation, now.generation)
        return self.source.rows(generation), np.concatenate(parts)
