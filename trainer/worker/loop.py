"""The loop of a worker: takes a turn, computes the gradient of its mini-batch, and hands it to the exchange."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from trainer.coordination.local_steps import ONE_STEP, LocalCopy, LocalPlan
from trainer.coordination.orders import StepMeasurements, join_measurements
from trainer.data.batches import Batches, MiniBatch
from trainer.watchdog import kick, mark_started
from trainer.worker.clients.base import Client, MustRejoin, Turn
from trainer.worker.gossip import WorkerGossip
from trainer.worker.step import Step, step_seed


class MiniBatchSource(Protocol):
    """The mini-batches of a worker, as Prefetch and TableBatches have them."""

    def get(self, clock: int) -> MiniBatch:
        """Return the mini-batch at a clock."""
        ...


class TableBatches:
    """Mini-batches that are drawn by the loss table of the newest parameters, so that none is made ahead.

    Args:
        batches: makes them.
        step: has the parameters.
    """

    def __init__(self, batches: Batches, step: Step) -> None:
        self.batches = batches
        self.step = step

    def get(self, clock: int) -> MiniBatch:
        return self.batches.make(clock, self.step.read_table())


def train(
    client: Client,
    mini_batches: MiniBatchSource,
    step: Step,
    seed: int,
    worker: int,
    ends_of_passes: Callable[[int, int], int] = lambda first, end: 0,
    gossip: WorkerGossip | None = None,
    plan: Callable[[int], LocalPlan] = lambda clock: ONE_STEP,
) -> None:
    """Compute gradients until the client has no more turns.

    Args:
        client: of the run's exchange; ``step`` computes in its vectors.
        mini_batches: by clock.
        step: computes gradients.
        seed: of the run, for dropout.
        worker: number of the worker.
        ends_of_passes: see Batches; for mini-batches that the worker has missed (default: none are).
        gossip: exchanges examples with other workers (default: no exchange).
        plan: plan(clock) are the mini-batches until the next push (default: one).
    """

    def compute(turn: Turn) -> tuple[StepMeasurements, bool]:
        """Compute the gradient of a mini-batch; return the report and whether the step was cancelled."""
        start = time.monotonic()
        if gossip:
            gossip.begin(turn)
        batch, draw, read_s = mini_batches.get(turn.clock)
        outcome = step(batch, step_seed(seed, worker, turn.clock), partial(client.poll_cancelled, turn), draw)
        seconds = time.monotonic() - start
        rows = draw.seen()
        # Later passes would seem to lack rows if the log did not know of the ends that this worker missed.
        if rows and turn.missed_from is not None:
            rows = rows.with_missed(ends_of_passes(turn.missed_from, turn.clock))
        if outcome and gossip:
            gossip.end(draw, step.outcomes)
        if outcome is None:  # cancelled between two micro-batches: no example counts
            return StepMeasurements(0, 0.0, 0, seconds, read_s, rows), True
        row_losses = draw.row_losses(step.row_outcomes)
        return StepMeasurements(len(batch.labels), *outcome, seconds, read_s, rows, row_losses), False

    mark_started()  # from now on others wait for this worker
    turn = client.join()
    while turn:
        kick()
        steps = plan(turn.clock)
        if len(steps.rates) == 1:
            report, is_cancelled = compute(turn)
        else:
            copy = LocalCopy(client.pulled, step.flat.num_parameters, steps.statistics, step.owned_entries)
            report = _compute_locally(client, turn, steps, copy, compute)
            is_cancelled = False
        turn = _next(client, turn, report, is_cancelled=is_cancelled)


def _compute_locally(
    client: Client,
    turn: Turn,
    plan: LocalPlan,
    copy: LocalCopy,
    compute: Callable[[Turn], tuple[StepMeasurements, bool]],
) -> StepMeasurements:
    """Compute several mini-batches on a copy of the parameters, and leave the sum of their gradients in ``pushed``.

    Args:
        client: has the vectors.
        turn: the first mini-batch.
        plan: all mini-batches.
        copy: of the parameters.
        compute: computes the gradient of one mini-batch at ``pulled``, whose statistics it may change.

    Returns the measurements of all of them together.
    """
    reports = []
    for number, rate in enumerate(plan.rates):
        client.pulled[:] = copy.values
        # A pool of examples comes with a push, and is used from the first step after it on.
        present = replace(turn, clock=turn.clock + number, pool=None, missed_from=None) if number else turn
        reports.append(compute(present)[0])
        copy.add(client.pushed, rate)
    client.pushed[:] = copy.total
    return join_measurements(reports)


def _next(client: Client, turn: Turn, report: StepMeasurements, *, is_cancelled: bool) -> Turn | None:
    """Hand in a gradient, or report a cancelled step, and return the next turn; None if there are no more.

    Joins again if the worker is no member any more."""
    try:
        return client.give_up(turn, report) if is_cancelled else client.exchange(turn, report)
    except MustRejoin:
        return client.join()
