"""Deletion of checkpoints. Files that cannot be deleted now, as on some shared file systems, are tried again later."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from trainer.checkpoints.decisions import StopDecision, delete_stop, delete_switch, read_stop, read_switch
from trainer.checkpoints.generations import read_generations, write_generations
from trainer.checkpoints.read import evaluation_of, is_sound, states_and_listings, versions
from trainer.checkpoints.resumption import state_to_restore
from trainer.checkpoints.state import STATE, EvaluationMark, RunState, folder_of, rank
from trainer.checkpoints.write import mark_final
from trainer.home.place import Place, delete_tree

logger = logging.getLogger(__name__)

WAITING = 50  # most checkpoints that wait for the evaluator; of more the oldest are deleted


def prune(root: Place, keep: int = 2, waiting: int = WAITING, *, by_rule: bool = False) -> list[int]:
    """Delete old checkpoints, and return those of the deleted versions that were not evaluated. O(checkpoints).

    Keeps the newest ``keep`` sound checkpoints (complete and undamaged), the best evaluated one up to each of these, the
    newest ``waiting`` complete ones that wait for the evaluator, and all after the newest sound one. Only one process may
    prune at a time. Raises OSError if the folder cannot be read.

    by_rule: whether a rule may end the stage or the run: keep all that wait, too, and the checkpoint with which it ends."""
    checkpoints = states_and_listings(root)
    states = [state for state, _ in checkpoints]
    sound = [state for state, listing in checkpoints if is_sound(root, state, listing)]
    if not sound:
        return []
    newest = sound[-1].version
    recent = sound[-keep:]
    evaluated = {state.version: evaluation_of(root, state, listing) for state, listing in checkpoints}
    wait = [state.version for state in states if state.is_for_evaluation and not evaluated[state.version]]
    # A mark without figures only says that the evaluator is done with the checkpoint, so it cannot be the best one.
    measured = {
        version: mark for version, mark in evaluated.items() if mark and (mark.accuracy, mark.loss) != (None, None)
    }
    needed = {state.version for state in recent} | set(wait[-waiting:]) | _best(measured, recent)
    if by_rule:  # a rule reads every evaluation, and the run rolls back to the checkpoint that it chooses
        decisions = (read_switch(root), read_stop(root))
        needed.update(wait, (decision.version for decision in decisions if decision))
    # Versions after the newest sound one stay, because servers may still be writing their slices.
    old = [version for version in versions(root) if version < newest and version not in needed]
    deleted = [version for version in old if _remove(folder_of(root, version))]
    return [version for version in deleted if version in wait]


def try_to_prune(root: Place, **options: Any) -> list[int]:
    """Delete old checkpoints as ``prune`` does. An error is only logged, because the next checkpoint tries again."""
    try:
        return prune(root, **options)
    except OSError as error:
        logger.warning(f"old checkpoints are not deleted yet: {error}")
        return []


def roll_back(
    root: Place, at_least: int, *, by_rule: bool = False, stop: StopDecision | None = None
) -> tuple[int, int] | None:
    """Roll back to the newest sound checkpoint and return (version, new generation), or None if there is none.

    Newer checkpoints that are damaged are deleted, and logged if their content is broken.

    Args:
        root: folder of checkpoints.
        at_least: lower bound for the number of the generation.
        by_rule: whether a rule decides about the switch. Once it has, the run rolls back to the checkpoint after which it
            switches, unless one of the next stage is sound.
        stop: the decision to end the run early. The run rolls back to its checkpoint, which becomes final. If that is
            damaged, the decision is deleted.
    Raises:
        OSError: the folder cannot be read, or later checkpoints can be neither deleted nor recorded as void.
    """
    state = state_to_restore(root, by_rule=by_rule, stop=stop, warn=logger.warning)
    if state is None:
        return None
    version = state.version
    # The checkpoint of the decision is damaged. With the decision the run would roll back again and again, or have no
    # more evaluations; without it, the next evaluation decides.
    if by_rule and not state.stage and (switch := read_switch(root)) and switch.version < version:
        delete_switch(root)
    if stop and stop.version != version:
        delete_stop(root)
    past = read_generations(root)
    generation = max(at_least, state.generation + 1, past.latest + 1)
    discard_after(root, version)
    # A checkpoint that cannot be deleted counts until a later generation is on record.
    try:
        write_generations(root, past.begin(generation, version))
    except OSError:
        if versions(root)[-1] > version:
            raise
    if stop and stop.version == version:
        mark_final(root, state, final=True)
    return version, generation


def discard_after(root: Place, version: int) -> None:
    """Delete every checkpoint after a version, complete or not. Raises OSError if the folder cannot be read."""
    for later in versions(root):
        if later > version:
            _remove(folder_of(root, later))


def _best(measured: dict[int, EvaluationMark], recent: Iterable[RunState]) -> set[int]:
    """Return, for each recent checkpoint, the best evaluated version up to it, of equals the earliest.

    These are kept because the run may roll back to any recent checkpoint. Evaluations after it then no longer count,
    and the best one up to it is the best of the run.

    measured: evaluations by version; recent: the recent checkpoints."""
    ranks = {version: rank(mark.accuracy, mark.loss) for version, mark in measured.items()}
    upto = [[version for version in ranks if version <= state.version] for state in recent]
    return {max(candidates, key=lambda version: (ranks[version], -version)) for candidates in upto if candidates}


def _remove(folder: Place) -> bool:
    """Delete a checkpoint and return whether it is void.

    The state is deleted first. Without it the checkpoint is incomplete, even if other files cannot be deleted."""
    try:
        (folder / STATE).unlink(missing_ok=True)
    except OSError:
        return False
    try:
        delete_tree(folder)
    except OSError as error:
        logger.warning(f"{folder} is not deleted yet: {error}")
    return True
