"""The rule of Sync-Switch that ends synchronous training when a worker is a straggler. Pure.

The authors of Sync-Switch have an online trigger for stragglers as well as a fraction of the steps. The rule here is our
own, and need not find the same stragglers: a worker is a straggler if the median time of its last steps is at least
``factor`` times an ordinary worker's. Medians are used because a single long step is no reason to switch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median, median_low
from typing import Any, NamedTuple

from trainer.coordination.orders import StepMeasurements

DECIMALS = 6  # of step_s in pushes.csv, so that the log has the very times that decide
ROUNDING = 1e-9  # relative: 3 * 0.1 is more than 0.3 in floating point


class StragglerRule(NamedTuple):
    """A rule that ends a stage. factor: a straggler's time in ordinary times; window: steps of each worker that it reads."""

    factor: float
    window: int


class Straggler(NamedTuple):
    """A worker that is much slower than the others. ratio: its median step time divided by the ordinary one."""

    worker: int
    ratio: float


def find_straggler(step_s: Sequence[Sequence[float]], factor: float) -> Straggler | None:
    """Return the slowest worker if it is a straggler, else None; of equally slow workers the first.

    The ordinary time is the lower median of all workers' medians, which is the faster one's for two workers.

    Args:
        step_s: the last step times of each worker, at least one, in seconds.
        factor: the least ratio of a straggler's median to the ordinary time, above 1.
    """
    medians = [median(times) for times in step_s]
    ordinary = median_low(medians)
    slowest = max(range(len(medians)), key=medians.__getitem__)
    if not ordinary > 0 or medians[slowest] * (1 + ROUNDING) < factor * ordinary:
        return None
    return Straggler(slowest, medians[slowest] / ordinary)


class StragglerWatch:
    """The last step times of every worker in a stage that a straggler ends. Does nothing without a rule.

    O(1) per gradient; O(N * window) per look.

    Args:
        rule: the rule; None if no straggler ends the stage.
        num_workers: N.
        state: the times and the straggler in plain JSON, empty at the start of a stage. Every checkpoint has them, so that
            a resumed run decides as one that was never interrupted, and only once.
    """

    def __init__(self, rule: StragglerRule | None, num_workers: int, state: dict[str, Any]) -> None:
        self.rule = rule
        self.state = state
        if rule and "step_s" not in state:
            state["step_s"] = [[] for _ in range(num_workers)]

    def add(self, gradients: Iterable[tuple[int, StepMeasurements]]) -> None:
        """Note the step times of the gradients of an update, each with its worker."""
        if not self.rule:
            return
        for worker, measured in gradients:
            times = self.state["step_s"][worker]
            times.append(round(measured.seconds, DECIMALS))
            del times[: -self.rule.window]

    def look(self) -> bool:
        """Return whether a worker is a straggler by now, and keep which one in ``state``.

        No worker is one before each has made as many steps as the rule reads."""
        if not self.rule:
            return False
        step_s = self.state["step_s"]
        if min(map(len, step_s)) < self.rule.window:
            return False
        straggler = find_straggler(step_s, self.rule.factor)
        if straggler:
            self.state["straggler"] = straggler._asdict()
        return straggler is not None


def reason_of(state: dict[str, Any], window: int) -> str | None:
    """Return in words which straggler a checkpoint's state has, or None if there is none. window: of the rule."""
    if "straggler" not in state:
        return None
    straggler = Straggler(**state["straggler"])
    steps = "the last step" if window == 1 else f"{window} steps"
    return f"worker {straggler.worker} was a straggler: {straggler.ratio:.3g} times the median over {steps}"
