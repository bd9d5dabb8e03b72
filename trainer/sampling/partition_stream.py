"""The mini-batches of a worker whose rows are divided anew, and the steps in which workers wait for each other."""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from trainer.coordination.barriers import Barriers
from trainer.sampling.orders import indices, permutation
from trainer.sampling.partition_plan import PartitionDraw, PartitionPhase, PartitionPlan


@lru_cache(maxsize=8)
def plan_barriers(plan: PartitionPlan, *, reads_own_writes: bool) -> Barriers:
    """Return the barriers of workers that do not make each step together. O(N log N).

    All losses of a phase must be in the table before the next one begins. Within a phase, each loss of a row updates the
    statistics of the ones before (``LossStatistics``), so it must be computed with a table that has them. A row has
    another worker in every epoch of the warm-up, so that counted epochs begin with a barrier too, and in every pass that
    other workers complete. In an interval it has one worker, which needs barriers between passes only if its parameters may
    lack its own gradients.

    Args:
        plan: with intervals.
        reads_own_writes: see Protocol.
    """
    options = plan.options
    turns = plan.turns if plan.start else range(max(options.ignore_epochs + 1, plan.turns.start), options.warmup_epochs)
    begins = {plan.begin(turn) for turn in turns}
    clocks = {plan.clock + step for begin in begins for step in (begin // plan.batch, -(-begin // plan.batch))}
    clocks |= set(plan.first_steps)
    if not reads_own_writes:
        # The losses of the last interval divide nothing.
        for phase in plan.phases[:-1]:
            passes = range(0) if phase.is_dealt else range(1, options.interval - phase.passes)
            for size, batch in set(zip(plan.sizes, plan.batches, strict=True)):
                clocks |= _pass_steps(phase.first, size, batch, passes)
    return Barriers(tuple(sorted(clocks)))


def _pass_steps(first: int, rows: int, batch: int, passes: range) -> set[int]:
    """Return the steps in which passes begin and, after a step that also has rows of the pass before, the next one.

    Args:
        first: the step in which pass 0 begins.
        rows: rows of a pass.
        batch: rows of a step.
        passes: numbers of the passes.
    """
    return {first + step for turn in passes for step in (turn * rows // batch, -(-turn * rows // batch))}


class PartitionStream:
    """The mini-batches of one worker by clock. Clocks may come in any order.

    Args:
        plan: the division of rows.
        worker: number of the worker.
    """

    def __init__(self, plan: PartitionPlan, worker: int) -> None:
        self.plan = plan
        self.worker = worker
        self._deal = lru_cache(maxsize=2)(plan.order)
        self._importance: npt.NDArray[np.floating] = np.empty(0)
        self._order = lru_cache(maxsize=2)(partial(permutation, seed=plan.seed, worker=worker))
        self._rows = np.empty(0, np.int64)

    def draw(self, clock: int, importance: npt.NDArray[np.floating] | None) -> PartitionDraw:
        """Return the mini-batch at a clock. importance: of each row, [N], at the start of the interval; None in the
        warm-up."""
        phase = self.plan.phase(clock)
        if phase.number:
            assert importance is not None, "an interval follows losses"
            self._adopt(importance)
        return self._dealt(clock) if phase.is_dealt else self._interval_batch(clock - phase.first, phase)

    def _adopt(self, importance: npt.NDArray[np.floating]) -> None:
        """Divide the rows by their importance: once per interval. A roll-back may bring other values for the same clock."""
        if np.array_equal(self._importance, importance):
            return
        self._importance = importance.copy()
        self._rows = np.flatnonzero(self.plan.divide(importance) == self.worker)
        self._deal = lru_cache(maxsize=2)(partial(self.plan.order, importance=self._importance))

    def _dealt(self, clock: int) -> PartitionDraw:
        """Return the worker's part of the rows that are dealt in a step."""
        plan = self.plan
        start = (clock - plan.clock) * plan.batch + sum(plan.batches[: self.worker])
        turns, inside = plan.place(start + np.arange(plan.batches[self.worker]))
        numbers = np.empty(len(turns), np.int64)
        for turn in np.unique(turns).tolist():
            numbers[turns == turn] = self._deal(turn)[inside[turns == turn]]
        return PartitionDraw(numbers, plan.ordinals(turns, inside))

    def _interval_batch(self, step: int, phase: PartitionPhase) -> PartitionDraw:
        """Return a mini-batch of passes over own rows. step: number of the step in the phase."""
        plan = self.plan
        rows = self._rows
        batch = plan.batches[self.worker]
        # Every pass of the run has an order of its own.
        first = plan.run_pass(phase.number, phase.passes)
        places = indices(
            len(rows), batch, step, plan.seed, self.worker, lambda turn: self._order(len(rows), turn=first + turn)
        )
        passes = phase.passes + (step * batch + np.arange(batch)) // len(rows)
        return PartitionDraw(rows[places], np.where(passes < plan.options.interval, passes + 1, 0))
