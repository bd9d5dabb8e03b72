"""The decision of a rule that a run switches to its next stage, in a file beside the checkpoints.

The evaluator writes it before it marks the checkpoint as evaluated, and the leader continues from that checkpoint in the
next stage, even if training has gone on meanwhile. The decision is void if a roll-back has made the checkpoint void."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from pipeline.core.json_values import build, parse
from trainer.checkpoints.generations import read_generations
from trainer.checkpoints.read import whole_state
from trainer.home.place import Place, write_whole

SWITCH = "switch.json"


@dataclass(frozen=True)
class SwitchDecision:
    """A decision to switch after an epoch.

    Attributes:
        version, generation: the checkpoint at the end of the epoch.
        epoch: its number, from 1.
        change: mean relative change of the loss, in percent.
    """

    version: int
    generation: int
    epoch: int
    change: float


def read_switch(root: Place) -> SwitchDecision | None:
    """Return the decision of a run if its checkpoint is there and counts, else None. A damaged file counts as none.

    Raises OSError if a file cannot be read."""
    try:
        decision = build(SwitchDecision, parse((root / SWITCH).read_bytes()))
    except (FileNotFoundError, ValueError):
        return None
    if not read_generations(root).includes(decision.generation, decision.version):
        return None
    state = whole_state(root, decision.version)
    return decision if state and state.generation == decision.generation else None


def write_switch(root: Place, decision: SwitchDecision) -> None:
    """Write the decision of a run. Raises OSError."""
    write_whole(root / SWITCH, (json.dumps(asdict(decision), allow_nan=False) + "\n").encode())


def delete_switch(root: Place) -> None:
    """Delete the decision of a run, if there is one. Raises OSError."""
    (root / SWITCH).unlink(missing_ok=True)
