"""How a host leaves a run that somebody has interrupted: not before the last checkpoint is whole, where that can be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pipeline.core.errors import DataError
from trainer.checkpoints.read import newest, read_state, whole
from trainer.config import Facts
from trainer.home.place import Place, StorePlace, entries
from trainer.launch.control import Control
from trainer.transport.messages import Op

LOOK_S, FAR_LOOK_S = 0.1, 2.0  # between two looks into a local folder, and into another
QUIET_S = 10.0  # nothing was written for so long, beside what a slow disk may take for all of it: nothing more will be
SLOW_DISK_BYTES_PER_S = 10e6
FOLLOW_S = 25.0  # schedulers kill 30 s after their SIGTERM


class Patience:
    """Lasts until nothing has changed for so many seconds. Pure."""

    def __init__(self, seconds: float, now: float) -> None:
        self.seconds, self.changed = seconds, now
        self._seen: Any = None

    def is_over(self, seen: Any, now: float) -> bool:
        if seen != self._seen:
            self._seen, self.changed = seen, now
        return now - self.changed > self.seconds


def patience(facts: Facts) -> Patience:
    """For a checkpoint: the values and the momentum of a run, in float32."""
    size = 4 * (facts.elements + facts.num_parameters)
    return Patience(QUIET_S + size / SLOW_DISK_BYTES_PER_S, time.monotonic())


def wait_for_checkpoint(control: Control, root: Place, facts: Facts) -> None:
    """On server 0's host: have everybody write this moment, and wait while they do."""
    control.tell(Op.END)
    waits = patience(facts)
    while not _is_written(control, root) and not waits.is_over(sizes(root), time.monotonic()):
        _pause(control, root)


def wait_for_leader(control: Control, root: Place, facts: Facts) -> None:
    """On another host with servers: have everybody write this moment, and stay until server 0's host, which may be
    ending as well, is gone. Without that host's parts its last checkpoint would never be whole."""
    control.tell(Op.END)
    waits, end = patience(facts), time.monotonic() + FOLLOW_S
    while time.monotonic() < end and not control.is_gone() and not waits.is_over(sizes(root), time.monotonic()):
        _pause(control, root)


def _pause(control: Control, root: Place) -> None:
    end = time.monotonic() + (FAR_LOOK_S if isinstance(root, StorePlace) else LOOK_S)
    while time.monotonic() < end:
        time.sleep(LOOK_S)
        control.ask()


def _is_written(control: Control, root: Place) -> bool:
    """Whether what server 0 had when it was told of the end is on disk; an older status would not tell."""
    last = control.at_end
    return last is not None and (not last["ready"] or any(version >= last["version"] for version in whole(root)))


def newest_in_words(root: Place) -> str:
    """Where a resume goes on."""
    with suppress(DataError):  # server 0's host goes on, and may have deleted it meanwhile
        version = newest(root)
        if version is not None:
            return f" at version {version} (epoch {read_state(root, version).epoch:.2f})"
    return ""


def sizes(root: Place) -> Sequence[tuple[str, int]]:
    """What is written there by now, drafts too."""
    found: list[tuple[str, int]] = []
    for entry in entries(root):
        with suppress(OSError):  # it is being deleted
            found += sizes(root / entry.name) if entry.is_dir else [(entry.path, entry.bytes)]
    return sorted(found)
