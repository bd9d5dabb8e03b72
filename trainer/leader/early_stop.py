"""The leader's part in early stopping: it looks for the decision of the evaluator, and waits for the last evaluations."""

from __future__ import annotations

import math
from pathlib import Path

from trainer.checkpoints.decisions import StopDecision, stop_of
from trainer.checkpoints.read import unevaluated
from trainer.checkpoints.state import RunState
from trainer.config import Config
from trainer.home.place import Place
from trainer.runlog.events import log_event


class EvaluationWatch:
    """Looks at the evaluations of a run that may end early. A run without --patience has nothing to look for.

    Args:
        config: the run.
        root: folder of checkpoints.
        look_s: least seconds between two looks at the folder.
    """

    def __init__(self, config: Config, root: Place, look_s: float) -> None:
        self.config = config
        self.root = root
        self.look_s = look_s
        self._looked_at = self._counted_at = -math.inf
        self._obeyed: StopDecision | None = None
        self._are_complete = config.run.patience is None

    def begin(self, stop: StopDecision | None) -> None:
        """Note that a generation begins. stop: the decision with which it ends the run, None if there is none."""
        self._obeyed = stop
        self._are_complete = self.config.run.patience is None

    def stops_early(self, now: float) -> bool:
        """Return whether the evaluator has made a decision that is not obeyed yet. now: the caller's clock in seconds."""
        if self.config.run.patience is None or now - self._looked_at < self.look_s:
            return False
        self._looked_at = now
        return stop_of(self.root, self.config) not in (None, self._obeyed)

    def are_complete(self, now: float) -> bool:
        """Return whether no evaluation is missing that could end the run earlier; always True without --patience.

        Costs a listing of the checkpoints until it is True. now: the caller's clock in seconds."""
        if self._are_complete or now - self._counted_at < self.look_s:
            return self._are_complete
        self._counted_at = now
        # Before the decision is read, because an evaluation is marked after the decision that follows from it.
        waiting = [state for state in unevaluated(self.root) if not state.final]
        self._are_complete = not waiting and stop_of(self.root, self.config) in (None, self._obeyed)
        return self._are_complete


def log_early_stop(log: Path, stop: StopDecision, state: RunState) -> None:
    """Log that the evaluations end the run.

    log: folder of the log; stop: the decision; state: of the checkpoint with which the run ends."""
    about = {"version": stop.version, "epoch": stop.epoch, "seconds": state.seconds, "patience": stop.patience}
    best = {"best_epoch": stop.best_epoch, "best_loss": stop.best_loss}
    log_event(log, "early_stop", **about, min_delta=stop.min_delta, **best)
