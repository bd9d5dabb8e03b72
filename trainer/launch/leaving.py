"""The exit of a host from an interrupted run: it waits until the last checkpoint is complete, if that is possible."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from trainer.checkpoints.read import whole
from trainer.config import RunFacts
from trainer.home.place import Place, StorePlace, entries
from trainer.launch.control import Control
from trainer.transport.messages.supervisors import End

# seconds between two looks into a local, and into a remote folder
LOOK_S = 0.1
FAR_LOOK_S = 2.0
QUIET_S = 10.0  # after so long without a write, plus a slow disk's time for all of it, no more writes are expected
SLOW_DISK_BYTES_PER_S = 10e6
FOLLOW_S = 25.0  # schedulers kill 30 s after their SIGTERM


class Patience:
    """A timeout that restarts whenever a value changes. Pure."""

    def __init__(self, seconds: float, now: float) -> None:
        self.seconds = seconds
        self.changed = now
        self._last_state: Any = None

    def is_over(self, state: Any, now: float) -> bool:
        """Return whether ``state`` has not changed for longer than ``seconds``. now: time of the call (seconds)."""
        if state != self._last_state:
            self._last_state = state
            self.changed = now
        return now - self.changed > self.seconds


def patience(facts: RunFacts) -> Patience:
    """Return the patience for a checkpoint of a run, whose size is its values and momentum in float32."""
    size = 4 * (facts.elements + facts.num_parameters)
    return Patience(QUIET_S + size / SLOW_DISK_BYTES_PER_S, time.monotonic())


def wait_for_checkpoint(control: Control, root: Place, facts: RunFacts) -> None:
    """Announce the end of the run, at which all servers write a checkpoint, and wait until it is complete.

    For server 0's host. Stops waiting if the files below ``root``, the folder of checkpoints, have not changed for as
    long as a slow disk takes for one; see ``patience``."""
    control.tell(End())
    waits = patience(facts)
    while not _is_written(control, root) and not waits.is_over(sizes(root), time.monotonic()):
        _pause(control, root)


def wait_for_leader(control: Control, root: Place, facts: RunFacts) -> None:
    """Have all servers write a checkpoint now, and stay until server 0 is gone. For other hosts with servers.

    Server 0's host may have been interrupted too; without the slices of this host its last checkpoint would stay
    incomplete."""
    control.tell(End())
    waits = patience(facts)
    end = time.monotonic() + FOLLOW_S
    while time.monotonic() < end and not control.is_gone() and not waits.is_over(sizes(root), time.monotonic()):
        _pause(control, root)


def _pause(control: Control, root: Place) -> None:
    """Wait until the next look at the checkpoints, and meanwhile read server 0's replies. root: their folder."""
    end = time.monotonic() + (FAR_LOOK_S if isinstance(root, StorePlace) else LOOK_S)
    while time.monotonic() < end:
        time.sleep(LOOK_S)
        control.ask()


def _is_written(control: Control, root: Place) -> bool:
    """Return whether the checkpoint that End requested is complete, or server 0 had nothing to write.

    It has at least the version in the reply to End; an older status may have a lower one."""
    last = control.at_end
    return last is not None and (not last.ready or any(version >= last.version for version in whole(root)))


def sizes(root: Place) -> Sequence[tuple[str, int]]:
    """Return the path and size of every file below a folder, drafts too."""
    entries_and_sizes: list[tuple[str, int]] = []
    for entry in entries(root):
        with suppress(OSError):  # it is being deleted
            entries_and_sizes += sizes(root / entry.name) if entry.is_dir else [(entry.path, entry.bytes)]
    return sorted(entries_and_sizes)
