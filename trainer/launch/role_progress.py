"""The progress of a run as a supervisor sees it: by version, by worker and by evaluated checkpoint."""

from __future__ import annotations

from typing import Any

from trainer.checkpoints.read import evaluation_of, whole_states
from trainer.home.place import Place
from trainer.options import Role
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.evaluation import EvaluationEvent
from trainer.runlog.kinds.training import TrainEvent


class RoleProgress:
    """The greatest progress of every role so far, by which its restarts are judged. Never decreases.

    checkpoints: their folder.

    Attributes:
        furthest: the highest version so far.
        evaluation: the last evaluation, as fields of RunStatus.
    """

    def __init__(self, checkpoints: Place) -> None:
        self.checkpoints = checkpoints
        self.furthest = 0
        self.evaluation: dict[str, Any] = {}
        self._clocks: dict[int, int] = {}  # the highest clock of each worker
        self._evaluated_version = -1

    def reach(self, version: int) -> None:
        """Note that the run has, or had before a roll-back, a version."""
        self.furthest = max(self.furthest, version)

    def note(self, event: LogEvent) -> None:
        """Note an event of the log, if it tells of progress."""
        match event:
            case EvaluationEvent():
                self.evaluation = {f"eval_{key}": getattr(event, key) for key in ("accuracy", "loss", "epoch")}
                self._evaluated_version = max(self._evaluated_version, event.version)
            case TrainEvent():
                for worker in event.workers:
                    self._clocks[worker["index"]] = max(worker["clock"], self._clocks.get(worker["index"], -1))

    def measure(self, role: Role) -> int:
        """Return the progress of a role.

        For a worker it is its own clock: the other workers progress without one that always dies, and its shard would
        silently not be trained."""
        if role.kind == "worker":
            return self._clocks.get(role.index, -1)
        return self._newest_evaluated() if role.kind == "evaluator" else self.furthest

    def _newest_evaluated(self) -> int:
        """Return the newest evaluated version, -1 before the first.

        The marks count as well as the events: without evaluation rows the evaluator only marks checkpoints."""
        root = self.checkpoints
        versions = [state.version for state in whole_states(root) if evaluation_of(root, state)]
        self._evaluated_version = max(self._evaluated_version, *versions, -1)
        return self._evaluated_version
