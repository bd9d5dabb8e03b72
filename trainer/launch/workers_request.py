"""The request of another number of workers for a run in progress: a file in the run's folder.

``sharding workers`` writes it. The process that leads the run stops at a checkpoint and resumes with that number. The
resumed start deletes the file once it has found that it can train; otherwise it writes into the file why it cannot."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.core.json_values import build, parse_object
from trainer.home.place import Place, write_whole
from trainer.run_files import WORKERS

LOOK_S = 0.5
FAR_LOOK_S = 5.0  # in a store, where each look is a request


@dataclass(frozen=True)
class WorkersRequest:
    """The content of the file.

    Attributes:
        workers: the number of workers.
        refusal: why the run does not change to this number; "" before an answer.
    """

    workers: int
    refusal: str = ""


def write_request(home: Place, request: WorkersRequest) -> None:
    write_whole(home / WORKERS, json.dumps(asdict(request)).encode())


def read_request(home: Place) -> WorkersRequest | None:
    """Return the request in a run's folder; None if there is none, or a damaged one. Raises OSError."""
    try:
        return build(WorkersRequest, parse_object((home / WORKERS).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


class Requests:
    """The requests for a run, as the process sees them that leads it.

    Args:
        home: the run's folder.
        obstacle: why no request can be met; "" if requests can.
        now: a clock in seconds.

    Attributes:
        accepted_request: the request for which the run stops; None before there is one.
    """

    def __init__(self, home: Place, obstacle: str = "", now: Callable[[], float] = time.monotonic) -> None:
        self.home = home
        self.obstacle = obstacle
        self.accepted_request: WorkersRequest | None = None
        self._now = now
        self._next_look = 0.0

    def is_waiting(self) -> bool:
        """Return whether the run should stop at a checkpoint for a request. Cheap: most calls do not look."""
        if self.accepted_request is None and self._now() >= self._next_look:
            self._next_look = self._now() + (LOOK_S if isinstance(self.home, Path) else FAR_LOOK_S)
            with suppress(OSError):  # the next look may succeed
                request = read_request(self.home)
                if request and not request.refusal and self.obstacle:
                    self.refuse(request, self.obstacle)
                elif request and not request.refusal:
                    self.accepted_request = request
        return self.accepted_request is not None

    def take(self) -> WorkersRequest | None:
        """Return and forget the request for which the run has stopped."""
        request = self.accepted_request
        self.accepted_request = None
        return request

    def unanswered(self, workers: int | None) -> WorkersRequest | None:
        """Return the request for a number of workers that a start has neither met nor refused; None without one."""
        with suppress(OSError):
            request = read_request(self.home)
            return request if request and request.workers == workers and not request.refusal else None
        return None

    def refuse(self, request: WorkersRequest, reason: str) -> None:
        """Tell the command why the run does not change its workers."""
        with suppress(OSError):  # the command finds out from the number of workers
            write_request(self.home, replace(request, refusal=reason))
