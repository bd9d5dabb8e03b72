"""The decision to end a run early, in a file beside the checkpoints.

The evaluator writes it before it marks the checkpoint as evaluated. The leader then rolls back to that checkpoint, which
becomes the final one, so that the result does not depend on how far training has gone on meanwhile. The decision is void
if a roll-back has made the checkpoint void, and for a run that was resumed with another --patience or --min-delta, or with
other workers after that checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from pipeline.core.json_values import build, parse
from trainer.checkpoints.generations import read_generations
from trainer.checkpoints.read import whole_state
from trainer.config import Config, RunSpec
from trainer.home.place import Place, write_whole

STOP = "stop.json"


@dataclass(frozen=True)
class StopDecision:
    """A decision to end a run after an epoch.

    Attributes:
        version, generation: the checkpoint at the end of the epoch.
        epoch: its number, from 1.
        patience, min_delta: the options by which it was made.
        best_epoch: the epoch of the last improvement; None if no loss was finite.
        best_loss: the loss of the evaluation rows after that epoch, without the L2 term.
    """

    version: int
    generation: int
    epoch: int
    patience: int
    min_delta: float
    best_epoch: int | None
    best_loss: float | None

    def is_by(self, run: RunSpec) -> bool:
        """Return whether the decision was made by the options of a run."""
        return (self.patience, self.min_delta) == (run.patience, run.min_delta)


def read_stop(root: Place) -> StopDecision | None:
    """Return the decision of a run if its checkpoint is there and counts, else None. A damaged file counts as none.

    Raises OSError if a file cannot be read."""
    try:
        decision = build(StopDecision, parse((root / STOP).read_bytes()))
    except (FileNotFoundError, ValueError):
        return None
    # The checkpoint itself may be of a later generation, which began at this version and has written it as final.
    counts = read_generations(root).includes(decision.generation, decision.version)
    return decision if counts and whole_state(root, decision.version) else None


def stop_of(root: Place, config: Config) -> StopDecision | None:
    """Return the decision that ends a run with its present options and workers, else None. Raises OSError."""
    if config.run.patience is None:
        return None
    decision = read_stop(root)
    # The rows of the present workers are those that were left at the checkpoint with which they began.
    is_earlier = decision and decision.version < config.cohorts.present.version
    return decision if decision and decision.is_by(config.run) and not is_earlier else None


def delete_void_stop(root: Place, config: Config) -> None:
    """Delete a decision that does not end a run now, so that it ends no later start either. Raises OSError."""
    if stop_of(root, config) is None:
        (root / STOP).unlink(missing_ok=True)


def write_stop(root: Place, decision: StopDecision) -> None:
    """Write the decision of a run. Raises OSError."""
    write_whole(root / STOP, (json.dumps(asdict(decision), allow_nan=False) + "\n").encode())
