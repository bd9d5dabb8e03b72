"""Passes over rows through cohorts of workers: the rows that a pass still lacks are dealt anew to other workers. Pure.

Rows are numbered over all shards. A worker of a later cohort first draws its part of what is left of each interrupted pass,
then makes passes over its own rows. Every pass therefore still has every row once.

Fast workers may be many passes ahead of slow ones. The rest of all these passes would be rows of the slow workers alone, so
only the newest passes are completed, and the rest of older ones is left out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.seeds import Purpose, generator
from trainer.sampling.orders import PassOrder
from trainer.sampling.passes import PassRows
from trainer.sampling.shuffle import ShuffleSampler

# Passes that a change of workers completes. Workers in step are in one pass, or some of them have begun the next one.
MOST_OPEN = 2


class OrderRule(Protocol):
    """A rule for the order of a worker's rows, such as a sampler that makes passes."""

    def pass_order(self, rows: PassRows) -> PassOrder:
        """Return the order of some rows in each pass over them."""
        ...


@dataclass(frozen=True, eq=False)
class PassRule:
    """The rule by which the workers of all cohorts draw the rows of a pass.

    Attributes:
        seed: of the run.
        sampler: orders the rows of a worker.
        groups: the group of each row, by its number over all shards, int; None if the sampler needs no groups.
    """

    seed: int
    sampler: OrderRule = field(default_factory=ShuffleSampler)
    groups: Ints | None = None

    def order(self, rows: Ints, worker: int) -> PassOrder:
        """Return the order of a worker's rows in each pass over them, as places in ``rows``. rows: int64."""
        groups = None if self.groups is None else self.groups[rows]
        return self.sampler.pass_order(PassRows(len(rows), groups, self.seed, worker))

    def deal(self, rows: Ints, num_workers: int, number: int, turn: int) -> list[Ints]:
        """Return the part of each worker in what is left of a pass, in the order in which it is drawn.

        The rows are shuffled and dealt in turn, so that the parts of two workers differ by at most one row. If rows have
        groups, the groups are dealt one after the other, so that this holds for the rows of each group too.

        Args:
            rows: that are left, int64.
            num_workers: number of workers.
            number: of the deal: no other deal of this pass has it.
            turn: number of the pass.
        """
        rows = rows[generator(self.seed, Purpose.REMAINDER, number, turn).permutation(len(rows))]
        if self.groups is None:
            # Copies, because a view would keep the rows of all workers.
            return [rows[worker::num_workers].copy() for worker in range(num_workers)]
        rows = rows[np.argsort(self.groups[rows], kind="stable")]
        parts = [rows[worker::num_workers].copy() for worker in range(num_workers)]
        return [part[self.order(part, worker)(turn)] if len(part) else part for worker, part in enumerate(parts)]


@dataclass(frozen=True, eq=False)
class WorkerPasses:
    """The passes of one worker of a cohort. A position is a number of rows that it has drawn in the cohort.

    Attributes:
        worker: number of the worker.
        rule: orders its rows.
        turn: number of its first pass, from 0.
        parts: its rows of each interrupted pass in the order in which it draws them, int64; possibly empty.
        own: its rows of every later pass, int64.
    """

    worker: int
    rule: PassRule
    turn: int
    parts: tuple[Ints, ...]
    own: Ints

    def order(self, index: int) -> Ints:
        """Return the rows of pass ``turn + index`` in the order in which they are drawn, int64."""
        if index < len(self.parts):
            return self.parts[index]
        return self.own[self._own_order(self.turn + index)]

    @cached_property
    def _own_order(self) -> PassOrder:
        return self.rule.order(self.own, self.worker)

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

    def progress(self, position: int) -> tuple[int, int]:
        """Return the number of the pass in which the worker is at a position, from 0, and its position in it."""
        index, inside = self.place(position)
        return self.turn + index, inside

    def draw(self, position: int, count: int, order: Callable[[int], Ints]) -> tuple[Ints, int, int]:
        """Return the next ``count`` rows, int64, the passes that end among them, and the rows after the last of these ends.

        Passes of which the worker has no rows end with the pass before, or with the beginning of its first rows.

        Args:
            position: number of rows before them.
            count: number of rows, at least 1.
            order: ``order``, possibly with a cache.
        """
        first = self.place(position)[0] if position else 0
        last = self.place(position + count)[0]
        pieces: list[Ints] = []
        later_rows = 0
        while count:
            index, inside = self.place(position)
            pieces.append(order(index)[inside : inside + count])
            count -= len(pieces[-1])
            position += len(pieces[-1])
            later_rows = len(pieces[-1]) if index == last else 0
        return np.concatenate(pieces), last - first, later_rows if last > first else 0


def first_passes(own: Sequence[Ints], rule: PassRule) -> list[WorkerPasses]:
    """Return the passes of the workers with which a run begins. own: the rows of each worker; rule: orders them."""
    return [WorkerPasses(worker, rule, 0, (), rows) for worker, rows in enumerate(own)]


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


def open_passes(before: Sequence[WorkerPasses], positions: Sequence[int]) -> OpenPasses:
    """Return the passes that workers leave incomplete at their positions, MOST_OPEN at most."""
    places = [passes.progress(position) for passes, position in zip(before, positions, strict=True)]
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
    before: Sequence[WorkerPasses], positions: Sequence[int], own: Sequence[Ints], number: int
) -> list[WorkerPasses]:
    """Return the passes of the workers of a cohort that follows another one.

    What is left of a pass is dealt to them by the rule of the passes.

    Args:
        before: the passes of the workers before.
        positions: at which each of these ended.
        own: the rows of each worker of the cohort in passes that nobody has begun.
        number: of the deal; see ``PassRule.deal``.
    """
    rule = before[0].rule
    places = [passes.progress(position) for passes, position in zip(before, positions, strict=True)]
    begin, end, _ = open_passes(before, positions)
    parts: list[list[Ints]] = [[] for _ in own]
    # A worker in the middle of the pass leaves the rest of it; one that has not begun it leaves all of its rows.
    for turn in range(begin, end):
        left = [
            passes.order(turn - passes.turn)[inside if turn == at else 0 :]
            for passes, (at, inside) in zip(before, places, strict=True)
            if at <= turn
        ]
        for worker, part in enumerate(rule.deal(np.concatenate(left), len(own), number, turn)):
            parts[worker].append(part)
    return [WorkerPasses(worker, rule, begin, tuple(parts[worker]), rows) for worker, rows in enumerate(own)]
