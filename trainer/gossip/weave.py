"""The order of a worker's own mini-batches and of those with other workers' examples."""

from __future__ import annotations

from typing import Literal, NamedTuple


class WovenStep(NamedTuple):
    """The mini-batch of a step.

    Attributes:
        is_foreign: whether it has other workers' examples.
        number: its number among the mini-batches of its kind, from 0.
    """

    is_foreign: bool
    number: int


def woven_step(clock: int, first: int | None, every: int) -> WovenStep:
    """Return the mini-batch at a clock: a foreign one after every ``every`` own ones, counted across passes.

    The authors' program counts anew in each pass.

    Args:
        clock: number of the worker's step.
        first: clock at which the worker had its first pool, since when own mini-batches count; None if it had none.
        every: F.
    """
    if first is None or clock < first:
        return WovenStep(False, clock)
    rounds = foreign_steps(clock, first, every)
    if (clock - first) % (every + 1) == every:
        return WovenStep(True, rounds)
    return WovenStep(False, clock - rounds)


def foreign_steps(clock: int, first: int | None, every: int) -> int:
    """Return how many foreign mini-batches a worker has made before a clock. See ``woven_step`` for the arguments."""
    return 0 if first is None else max(0, clock - first) // (every + 1)


def selection_epoch(step: WovenStep, epoch_steps: int, signal: Literal["end", "start"]) -> int | None:
    """Return the epoch by whose losses a worker selects examples before a step; None if it selects none.

    Args:
        step: its mini-batch.
        epoch_steps: own mini-batches per epoch.
        signal: ``end`` selects after every epoch but the last, ``start`` before every epoch.
    """
    if step.is_foreign or step.number % epoch_steps:
        return None
    epoch = step.number // epoch_steps
    # Both select before this step, by the losses of all steps so far.
    if signal == "start":
        return epoch
    return epoch - 1 if epoch else None
