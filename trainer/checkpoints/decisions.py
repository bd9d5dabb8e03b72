"""The decisions of the evaluator, in files beside the checkpoints: to switch to the next stage, and to end a run early.

The evaluator writes a decision before it marks the checkpoint as evaluated. The leader then continues from that
checkpoint in the next stage, or rolls back to it as the final one, so that the result does not depend on how far training
has come meanwhile. A decision is void if a roll-back has made its checkpoint void. A decision to end the run is also void
if the run was resumed with another --patience or --min-delta, or with other workers from that checkpoint on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TypeVar

from pipeline.core.json_values import build, parse
from trainer.checkpoints.generations import read_generations
from trainer.checkpoints.read import whole_state
from trainer.checkpoints.state import RunState
from trainer.config import Config, RunSpec
from trainer.home.place import Place, write_whole

SWITCH = "switch.json"
STOP = "stop.json"


@dataclass(frozen=True)
class EpochDecision:
    """A decision after an epoch.

    Attributes:
        version, generation: the checkpoint at the end of the epoch.
        epoch: its number, from 1.
    """

    version: int
    generation: int
    epoch: int


@dataclass(frozen=True)
class SwitchDecision(EpochDecision):
    """A decision to switch. change: mean relative change of the loss, in percent."""

    change: float


@dataclass(frozen=True)
class StopDecision(EpochDecision):
    """A decision to end a run.

    Attributes:
        patience, min_delta: the options by which it was made.
        best_epoch: the epoch of the last improvement; None if no loss was finite.
        best_loss: the loss of the evaluation rows after that epoch, without the L2 term.
    """

    patience: int
    min_delta: float
    best_epoch: int | None
    best_loss: float | None

    def is_by(self, run: RunSpec) -> bool:
        """Return whether the decision was made by the options of a run."""
        return (self.patience, self.min_delta) == (run.patience, run.min_delta)


D = TypeVar("D", bound=EpochDecision)


def read_switch(root: Place) -> SwitchDecision | None:
    """Return the decision to switch. See ``_read``."""
    return _read(root, SWITCH, SwitchDecision, is_exact=True)


def read_stop(root: Place) -> StopDecision | None:
    """Return the decision to end a run. See ``_read``.

    Its checkpoint may be of a later generation, which began at this version and has written it as final."""
    return _read(root, STOP, StopDecision, is_exact=False)


def _read(root: Place, name: str, kind: type[D], *, is_exact: bool) -> D | None:
    """Return a decision if its checkpoint is there and counts, else None. A damaged file counts as none.

    Raises OSError if a file cannot be read.

    Args:
        root: folder of checkpoints.
        name, kind: of the decision.
        is_exact: whether the checkpoint must be of the decision's generation.
    """
    try:
        decision = build(kind, parse((root / name).read_bytes()))
    except (FileNotFoundError, ValueError):
        return None
    generations = read_generations(root)
    if not generations.includes(decision.generation, decision.version):
        return None
    state = whole_state(root, decision.version, generations)
    return decision if state and (not is_exact or state.generation == decision.generation) else None


def stop_of(root: Place, config: Config) -> StopDecision | None:
    """Return the decision that ends a run with its present options and workers, else None. Raises OSError."""
    if config.run.patience is None:
        return None
    decision = read_stop(root)
    if decision is None or not decision.is_by(config.run):
        return None
    # The checkpoint with which the present workers began has the clocks of the workers before them. A run that ended there
    # could not be resumed.
    return decision if decision.version > config.cohorts.present.version else None


def has_converged(state: RunState, config: Config, rows: int) -> bool:
    """Return whether the tolerance has ended a run of this length with a checkpoint.

    Other workers that begin with the checkpoint have not converged, and a longer run trains on.

    state: of the checkpoint; config: the run; rows: its distinct training examples."""
    return state.converged_steps == config.steps_per_worker(rows) and not config.cohorts.begins_at(state.version)


def write_decision(root: Place, decision: SwitchDecision | StopDecision) -> None:
    """Write the decision of a run. Raises OSError."""
    name = SWITCH if isinstance(decision, SwitchDecision) else STOP
    write_whole(root / name, (json.dumps(asdict(decision), allow_nan=False) + "\n").encode())


def delete_switch(root: Place) -> None:
    """Delete the decision to switch, if there is one. Raises OSError."""
    (root / SWITCH).unlink(missing_ok=True)


def delete_stop(root: Place) -> None:
    """Delete the decision to end the run, if there is one. Raises OSError."""
    (root / STOP).unlink(missing_ok=True)


def delete_void_stop(root: Place, config: Config) -> None:
    """Delete a decision that does not end a run now, so that it ends no later start either. Raises OSError."""
    if stop_of(root, config) is None:
        delete_stop(root)
