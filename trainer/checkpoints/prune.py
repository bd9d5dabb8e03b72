"""Deleting checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

from trainer.checkpoints.read import is_sound, unevaluated, versions, whole
from trainer.checkpoints.state import STATE, folder_of


def prune(root: Path, keep: int = 2) -> None:
    """Delete what is older than the newest sound checkpoint, except the newest ``keep`` sound ones and whole ones that
    wait for the evaluator. One process at a time may do it. O(checkpoints)."""
    sound = [version for version in whole(root) if is_sound(root, version)]
    kept = {*sound[-keep:], *(state.version for state in unevaluated(root))}
    for version in versions(root):
        if sound and version < sound[-1] and version not in kept:
            _remove(folder_of(root, version))


def discard_after(root: Path, version: int) -> None:
    """Delete every checkpoint, finished or not, beyond a version that the run goes back to."""
    for later in versions(root):
        if later > version:
            _remove(folder_of(root, later))


def _remove(folder: Path) -> None:
    """The state goes first: without it the rest is neither whole nor waiting, wherever a kill leaves it."""
    (folder / STATE).unlink(missing_ok=True)
    shutil.rmtree(folder)
