"""The status of a run, which server 0 reports to supervisors and a supervisor to its overseer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.core.errors import DataError
from pipeline.core.json_values import build


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run at one moment. None for measured values that do not exist yet.

    Attributes:
        ready: whether all servers have loaded one checkpoint. Until then only this, ``finished``, ``diverged``,
            ``trouble`` and ``malformed`` say anything.
        finished: whether the run is over and its last checkpoint complete, so that servers may be ended.
        diverged: why the run has diverged, as text; None if it has not.
        trained: whether the last gradient is applied; the last checkpoint may still be missing.
        trouble: why the newest checkpoint is late or failed, as text; None if it is not.
        malformed: messages that server 0 has discarded because no peer of this version sends them.
        version: updates so far.
        accepted: accepted gradients so far.
        total: accepted gradients of the whole run.
        epoch, epochs: global epochs so far, and in the whole run.
        seconds: training time so far.
        remaining: present workers that have not finished.
        alive: present workers.
        num_workers: workers of the run.
        loss, accuracy: means over the examples of the last second.
        images_per_s: speed in the last second.
        staleness_mean, staleness_max: of the gradients of the last second.
        eval_accuracy, eval_loss, eval_epoch: the newest evaluation, which the supervisor adds.
    """

    ready: bool
    finished: bool
    diverged: str | None
    trained: bool = False
    trouble: str | None = None
    malformed: int = 0
    version: int = 0
    accepted: int = 0
    total: int = 0
    epoch: float = 0.0
    epochs: float = 0.0
    seconds: float = 0.0
    remaining: int = 0
    alive: int = 0
    num_workers: int = 0
    loss: float | None = None
    accuracy: float | None = None
    images_per_s: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    eval_accuracy: float | None = None
    eval_loss: float | None = None
    eval_epoch: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the status as plain JSON. NaN and infinities, of a diverged run, become None."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunStatus:
        """Parse the result of ``to_json``. Raises DataError; see pipeline.core.json_values for unknown keys."""
        try:
            return build(cls, values, ignore_unknown=True)
        except ValueError as fault:
            raise DataError(
                f"server 0 sent a status that is not read here: {fault}; install one version of the program on all hosts"
            ) from None


NOT_READY = RunStatus(ready=False, finished=False, diverged=None)
