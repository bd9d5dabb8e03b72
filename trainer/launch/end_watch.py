"""The end of a run, as a host recognises it by the checkpoints when server 0 no longer answers."""

from __future__ import annotations

from trainer.checkpoints.decisions import has_converged, stop_of
from trainer.checkpoints.read import newest_state
from trainer.checkpoints.state import RunState
from trainer.config import Config, RunFacts
from trainer.exchange.neighbours import NeighbourExchange
from trainer.home.folders import Folders

FAR_LOOK_S = 15.0  # between two looks into a remote home


class EndWatch:
    """Looks for the end of a run in its home. config, facts, folders: the run."""

    def __init__(self, config: Config, facts: RunFacts, folders: Folders) -> None:
        self.config = config
        self.facts = facts
        self.folders = folders
        self._looked_at = 0.0

    def has_ended(self, now: float) -> bool:
        """Return whether the newest checkpoint is the end of the run, so that server 0 may have exited.

        Always False between two looks into a remote home. now: monotonic seconds."""
        if not self.folders.is_local and now - self._looked_at < FAR_LOOK_S:
            return False
        self._looked_at = now
        root = self.folders.checkpoints
        state = newest_state(root)
        if state is None:
            return False
        stop = stop_of(root, self.config)
        ends_early = stop is not None and stop.version == state.version and state.final
        return ends_early or is_end(state, self.config, self.facts)


def is_end(state: RunState, config: Config, facts: RunFacts) -> bool:
    """Return whether a checkpoint is the end of the run at its present length.

    After a resume with a larger --epochs the final checkpoint of the shorter run is only the start of the longer
    one."""
    if not state.final:
        return False
    if has_converged(state, config, facts.rows):
        return True
    steps = config.steps_per_worker(facts.rows)
    if isinstance(config.exchange, NeighbourExchange):  # the others went on while a worker was lost
        return state.version >= steps
    if config.run.stop == "local":
        return min(state.clocks.values()) >= steps
    return state.accepted >= config.cohorts.present.total(steps, facts.num_workers)
