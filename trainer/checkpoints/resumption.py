"""The checkpoint from which a start continues a run. Only reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from trainer.checkpoints.decisions import StopDecision, read_switch, stop_of
from trainer.checkpoints.read import is_sound, newest_state, read_state, versions
from trainer.checkpoints.state import RunState
from trainer.config import Config
from trainer.home.place import Place


class Resumption(NamedTuple):
    """The checkpoints of a run at a start.

    Attributes:
        newest: the state of the newest complete checkpoint, whose slices may be damaged; None without a complete one.
        next: the state with which the run continues; None without a sound checkpoint.
        has_updates: whether there is a checkpoint after version 0, complete or not.
    """

    newest: RunState | None = None
    next: RunState | None = None
    has_updates: bool = False

    @property
    def clock(self) -> int:
        """The first clock that no worker has reached in the newest checkpoint; 0 without one."""
        return max(self.newest.clocks.values(), default=0) if self.newest else 0


def read_resumption(root: Place, config: Config) -> Resumption:
    """Read the checkpoints of a run. Raises DataError for a damaged history of roll-backs, and OSError.

    root: their folder; config: the run that a start asks for, with the cohorts that the run has."""
    newest = newest_state(root)
    has_updates = any(versions(root))
    if newest is None:
        return Resumption(has_updates=has_updates)
    stop = stop_of(root, config)
    return Resumption(
        newest, state_to_restore(root, by_rule=config.exchange.switches_by_rule, stop=stop), has_updates=has_updates
    )


def state_to_restore(
    root: Place, *, by_rule: bool, stop: StopDecision | None, warn: Callable[[str], None] | None = None
) -> RunState | None:
    """Return the state with which a run continues, or None if no checkpoint is sound.

    Raises OSError if the folder cannot be read. by_rule, stop: see trainer.checkpoints.prune.roll_back; warn: called with
    the text of each error in a newer checkpoint (default: not)."""
    state = newest_state(root, verify=True, warn=warn)
    if state is None:
        return None
    # Training has continued while a rule decided. Its updates after the switch, or after the end, are void.
    switch = read_switch(root) if by_rule and not state.stage else None
    for decision in (stop, switch):
        if decision is None:
            continue
        earlier = read_state(root, decision.version)
        if is_sound(root, earlier):
            return earlier
    return state
