"""The checkpoint with which a leader begins a generation."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.core.errors import DataError
from trainer.checkpoints.decisions import StopDecision, stop_of
from trainer.checkpoints.prune import roll_back
from trainer.config import Config
from trainer.home.folders import Folders
from trainer.runlog.example_ledger import ExampleLedger, begin_ledger


class RestoredVersion(NamedTuple):
    """The beginning of a generation.

    Attributes:
        version: of the checkpoint.
        generation: number of the generation.
        stop: the decision to end the run early with this checkpoint; None if there is none.
        ledger: of the examples of the generation; None without --example-ledger.
    """

    version: int
    generation: int
    stop: StopDecision | None
    ledger: ExampleLedger | None


def restore(config: Config, folders: Folders, at_least: int, *, by_rule: bool = False) -> RestoredVersion:
    """Roll back to the newest sound checkpoint, and begin a generation with it.

    Args:
        config, folders: the run.
        at_least: lower bound for the number of the generation.
        by_rule: whether a rule decides about the switch.
    Raises:
        DataError: there is no sound checkpoint.
        OSError: files cannot be read or written now.
    """
    root = folders.checkpoints
    stop = stop_of(root, config)
    restored = roll_back(root, at_least, by_rule=by_rule, stop=stop)
    if not restored:
        raise DataError(
            f"{root} holds no whole checkpoint, not even the first; choose another --output, or --overwrite"
        )
    version, generation = restored
    # If the checkpoint of the decision is damaged, the run continues from another one.
    if stop and stop.version != version:
        stop = None
    return RestoredVersion(version, generation, stop, begin_ledger(config, folders.home, generation, version))
