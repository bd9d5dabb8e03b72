"""The request of another number of workers for a run in progress: a file in the run's folder.

``sharding workers`` writes it; a run that hosts leave has a request without a file. The process that leads the run stops
at a checkpoint and resumes with that number. The resumed start deletes the file once it has found that it can train;
otherwise it writes into the file why it cannot."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.core.json_values import build, parse_object
from trainer.home.place import Place, write_whole
from trainer.run_files import WORKERS

LOOK_S = 0.5
FAR_LOOK_S = 5.0  # in a store, where each look is an operation


@dataclass(frozen=True)
class WorkersRequest:
    """The content of the file.

    Attributes:
        id: names the request; "" for one without a file.
        workers: the number of workers, at least 1.
        refusal: why the run does not change to this number; "" before an answer.
    """

    id: str
    workers: int
    refusal: str = ""


def write_request(home: Place, request: WorkersRequest) -> None:
    write_whole(home / WORKERS, json.dumps(asdict(request)).encode())


def read_request(home: Place) -> WorkersRequest | None:
    """Return the request in a run's folder; None if there is none, or a damaged one. Raises OSError."""
    try:
        request = build(WorkersRequest, parse_object((home / WORKERS).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    return request if request.workers >= 1 else None


def delete_request(home: Place, request: WorkersRequest) -> None:
    """Delete a request from a run's folder, unless another one is there. Raises OSError."""
    present = read_request(home)
    if present and present.id == request.id:
        (home / WORKERS).unlink(missing_ok=True)


class Requests:
    """The requests for a run, as the process sees them that leads it.

    A store is read in a thread, because a store that does not answer must not delay the caller.

    Args:
        home: the run's folder.
        obstacle: why no request can be met; "" if requests can.
        now: a clock in seconds.

    Attributes:
        tried: the request that the present start tries to meet; None if it does not, or has met it.
        departed_hosts: hosts of a cluster that have left the run.
    """

    def __init__(self, home: Place, obstacle: str = "", now: Callable[[], float] = time.monotonic) -> None:
        self.home = home
        self.obstacle = obstacle
        self.tried: WorkersRequest | None = None
        self.departed_hosts = 0
        self._now = now
        self._next_look = 0.0
        self._waiting: WorkersRequest | None = None
        self._handled_ids: set[str] = set()  # requests for which the run has stopped, or that it has refused
        self._thread: threading.Thread | None = None

    def is_waiting(self) -> bool:
        """Return whether the run should stop at a checkpoint for a request. Cheap: most calls do not look."""
        if self._waiting is None and self._now() >= self._next_look:
            is_local = isinstance(self.home, Path)
            self._next_look = self._now() + (LOOK_S if is_local else FAR_LOOK_S)
            if is_local:
                self._look()
            elif self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._look, name="workers request", daemon=True)
                self._thread.start()
        return self._waiting is not None

    def submit(self, workers: int) -> None:
        """Have the run stop for a number of workers that no file asks for. It takes precedence over a file."""
        self._waiting = WorkersRequest("", workers)

    def _look(self) -> None:
        with suppress(OSError):  # the next look may succeed
            request = read_request(self.home)
            if request is None or request.refusal or request.id in self._handled_ids:
                return
            if self.obstacle:
                self._refuse(request, self.obstacle)
            elif self._waiting is None:  # a thread may have read the file before the run was told to change
                self._waiting = request

    def take(self) -> WorkersRequest | None:
        """Return the request for which the run has stopped, which the next start tries; None if it was withdrawn."""
        request = self._waiting
        self._waiting = None
        if request is None:
            return None
        self._handled_ids.add(request.id)
        with suppress(OSError):  # then it counts as present
            present = read_request(self.home) if request.id else request
            if present is None or present.id != request.id:
                return None
        self.tried = request
        return request

    def refuse(self, reason: str) -> None:
        """Write why the present start cannot meet the request that it has tried."""
        if self.tried:
            self._refuse(self.tried, reason)
        self.tried = None

    def _refuse(self, request: WorkersRequest, reason: str) -> None:
        self._handled_ids.add(request.id)
        if not request.id:
            return
        with suppress(OSError):  # the command finds out from the number of workers
            write_request(self.home, replace(request, refusal=reason))

    def meet(self) -> None:
        """Note that this start trains: it has met the request that it has tried.

        Deletes its file, and files of commands that earlier starts have not answered. A fresh refusal stays for the
        command that reads it."""
        self.tried = None
        with suppress(OSError):
            present = read_request(self.home)
            if present and not (present.refusal and present.id in self._handled_ids):
                (self.home / WORKERS).unlink(missing_ok=True)
