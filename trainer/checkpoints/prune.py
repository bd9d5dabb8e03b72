"""Deleting checkpoints. What cannot be deleted now (a file system that hosts share may refuse it) is left to a later try."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from trainer.checkpoints.generations import read_generations, write_generations
from trainer.checkpoints.read import evaluation_of, is_sound, newest, read_state, states_and_names, versions
from trainer.checkpoints.state import STATE, Evaluated, State, folder_of, rank
from trainer.home.place import Place, delete_tree

logger = logging.getLogger(__name__)

WAITING = 50  # checkpoints that wait for the evaluator; a longer queue loses its oldest


def prune(root: Place, keep: int = 2, waiting: int = WAITING) -> list[int]:
    """Delete what is older than the newest sound checkpoint, except the newest ``keep`` sound ones, the best evaluated one
    up to each of these, and the newest ``waiting`` whole ones that wait for the evaluator.

    Returns the versions that were deleted though they waited. One process at a time may do it. Raises OSError where the
    folder cannot be read. O(checkpoints)."""
    found = states_and_names(root)
    states = [state for state, _ in found]
    sound = [state for state, names in found if is_sound(root, state, names)]
    if not sound:
        return []
    newest, recent = sound[-1].version, sound[-keep:]
    evaluated = {state.version: evaluation_of(root, state, names) for state, names in found}
    wait = [state.version for state in states if state.is_for_evaluation and not evaluated[state.version]]
    measured = {
        version: mark for version, mark in evaluated.items() if mark and (mark.accuracy, mark.loss) != (None, None)
    }
    kept = {state.version for state in recent} | set(wait[-waiting:]) | _best(measured, recent)
    old = [version for version in versions(root) if version < newest and version not in kept]
    deleted = [version for version in old if _remove(folder_of(root, version))]
    return [version for version in deleted if version in wait]


def go_back(root: Place, at_least: int) -> tuple[int, int] | None:
    """(version, generation) that the run goes on with: the newest sound checkpoint, and a new generation, of at least that
    number, for which all beyond that version is void. None without a sound checkpoint.

    Raises OSError where the folder cannot be read, or what is void could be neither deleted nor written down."""
    version = newest(root, verify=True)
    if version is None:
        return None
    past = read_generations(root)
    generation = max(at_least, read_state(root, version).generation + 1, past.latest + 1)
    discard_after(root, version)
    try:
        write_generations(root, past.begin(generation, version))
    except OSError:
        if versions(root)[-1] > version:
            raise
    return version, generation


def discard_after(root: Place, version: int) -> None:
    """Delete every checkpoint, finished or not, beyond a version that the run goes back to. Raises OSError where the
    folder cannot be read."""
    for later in versions(root):
        if later > version:
            _remove(folder_of(root, later))


def _best(measured: dict[int, Evaluated], recent: Iterable[State]) -> set[int]:
    """Return the best version, the earliest of equals, up to each of ``recent``: if the run goes back to that one, its
    model is the best again."""
    ranks = {version: rank(mark.accuracy, mark.loss) for version, mark in measured.items()}
    upto = [[version for version in ranks if version <= state.version] for state in recent]
    return {max(found, key=lambda version: (ranks[version], -version)) for found in upto if found}


def _remove(folder: Place) -> bool:
    """The state goes first: without it the rest is neither whole nor waiting, wherever a kill or an error leaves it.
    Returns whether the checkpoint is no more, which files that could not be deleted do not change."""
    try:
        (folder / STATE).unlink(missing_ok=True)
    except OSError:
        return False
    try:
        delete_tree(folder)
    except OSError as error:
        logger.warning(f"{folder} is not deleted yet: {error}")
    return True
