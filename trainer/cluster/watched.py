"""The base class of launchers whose cluster does not restart lost parts itself."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Generic, TypeVar

from trainer.cluster.attempts import Attempts
from trainer.cluster.launcher import LaunchArguments

LOOK_S = 0.1
H = TypeVar("H")  # the handle of a running part


class WatchingLauncher(ABC, Generic[H]):
    """A launcher with a thread that watches all parts and restarts lost ones."""

    def __init__(self) -> None:
        self.running: dict[int, H] = {}  # by part, ended ones too
        self._arguments: dict[int, LaunchArguments] = {}  # by part
        self._attempts = Attempts()
        self._due: dict[int, float] = {}  # when each lost part is restarted (monotonic seconds)
        self._failure: str | None = None
        self._is_unreachable = False  # whether the cluster's client has failed, so that nothing is known of the parts
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None

    @abstractmethod
    def begin(self, arguments: LaunchArguments, attempt: int) -> H:
        """Start a part and return at once."""

    @abstractmethod
    def outcome(self, handle: H) -> str | None:
        """Return None while a part runs, "" if it has ended by itself, otherwise why it was lost."""

    @abstractmethod
    def end(self, handle: H) -> None:
        """Kill a part; a no-op if it has ended."""

    def start(self, arguments: Sequence[LaunchArguments]) -> None:
        """Start all parts, and the thread that watches them."""
        self._attempts = Attempts()
        self._due = {}
        self._failure = None
        self._is_unreachable = False
        self._stopping.clear()
        self._arguments = {each.part.index: each for each in arguments}
        for index in self._arguments:
            self._begin(index)
        self._watcher = threading.Thread(target=self._watch, name="launcher", daemon=True)
        self._watcher.start()

    def store(self) -> str:
        """Return no settings: hosts have their own."""
        return ""

    def failure(self) -> str | None:
        return self._failure

    def is_over(self) -> bool:
        return self._is_unreachable or (
            not self._due and all(self.outcome(handle) is not None for handle in list(self.running.values()))
        )

    def stop(self) -> None:
        """End the thread, then kill all parts."""
        self._stopping.set()
        if self._watcher:
            self._watcher.join()
            self._watcher = None
        for handle in self.running.values():
            with suppress(Exception) if self._is_unreachable else nullcontext():  # keep the first error
                self.end(handle)
        self.running = {}

    def _begin(self, index: int) -> None:
        attempt = self._attempts.begin(index, time.monotonic())
        self.running[index] = self.begin(self._arguments[index], attempt)

    def _watch(self) -> None:
        """Look after the parts until ``stop``. If the cluster cannot be reached any more, note that as the failure."""
        try:
            while not self._stopping.wait(LOOK_S):
                self._look()
        except Exception as error:  # the cluster's client failed
            self._is_unreachable = True
            self._failure = f"hosts cannot be started or watched any more: {type(error).__name__}: {error}"

    def _look(self) -> None:
        """Schedule the restart of parts that were lost, and restart those that are due."""
        for index, handle in list(self.running.items()):
            cause = self.outcome(handle)
            if cause and index not in self._due:
                self._lost(index, cause)
        for index in [index for index, at in self._due.items() if at <= time.monotonic()]:
            self._begin(index)
            del self._due[index]

    def _lost(self, index: int, cause: str) -> None:
        """Schedule the restart of a lost part, or give up after too many short attempts. cause: why it was lost."""
        due = self._attempts.lost(index, time.monotonic())
        if due is None:
            self._failure = f"host {index} ends as soon as it is started: {cause}"
            self._stopping.set()
        else:
            self._due[index] = due
