"""Passes over rows that grow: which rows a mini-batch holds, where a worker goes on with more of them after some passes.

A stretch is a number of passes over the same rows. Rows only join behind those that there are, so that a place among them
keeps its row. Given the stretches, a mini-batch is a pure function of (seed, worker, clock), as without them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from pipeline.core.arrays import Ints
from trainer.data.shards import Rows


class Stretch(NamedTuple):
    """Passes from number ``turn`` on, over the first ``rows`` rows, those of a generation. position: of the example with
    which the first of them begins, in all that the worker draws."""

    position: int
    turn: int
    rows: int
    generation: int


class Source(Protocol):
    """Where more rows come from."""

    def next(self, now: Stretch, position: int, turn: int) -> Stretch | None:
        """What begins with pass ``turn`` at a position, where there are more rows by now. The answer to it is kept."""
        ...

    def rows(self, generation: int) -> Rows:
        """At least those of a generation."""
        ...


class Following:
    """stretches: those that are decided, by position; the first begins at 0."""

    def __init__(self, stretches: list[Stretch], source: Source) -> None:
        assert stretches, "a worker begins with some rows"
        self.stretches, self.source = stretches, source

    def at(self, position: int) -> Stretch:
        """Whose example this is. Where a pass begins that nobody has decided about, there may be a new one."""
        place = bisect_right(self.stretches, position, key=lambda stretch: stretch.position) - 1
        now = self.stretches[place]
        turns, inside = divmod(position - now.position, now.rows)
        if place + 1 < len(self.stretches) or inside or not turns:
            return now
        found = self.source.next(now, position, now.turn + turns)
        if found is None:
            return now
        self.stretches.append(found)
        return found

    def chosen(self, batch: int, clock: int, order: Callable[[int, int], Ints]) -> tuple[Rows, Ints]:
        """The rows, and which of them the mini-batch at a clock holds, int64 [batch]. order(rows, turn): of a pass."""
        position, stop = clock * batch, (clock + 1) * batch
        parts: list[Ints] = []
        generation = 0
        while position < stop:
            now = self.at(position)
            turns, inside = divmod(position - now.position, now.rows)
            count = min(now.rows - inside, stop - position)
            parts.append(order(now.rows, now.turn + turns)[inside : inside + count])
            position, generation = position + count, max(generation, now.generation)
        return self.source.rows(generation), np.concatenate(parts)
