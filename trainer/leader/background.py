"""Background work of a server, which must answer its peers meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class CallQueue(Protocol):
    """Executes calls in order, and then calls done(result) in the owner's thread."""

    def submit(self, work: Callable[[], T], on_done: Callable[[T], None]) -> None: ...


class AtOnce:
    """Executes calls immediately: for virtual time, in which they take no time."""

    def submit(self, work: Callable[[], T], on_done: Callable[[T], None]) -> None:
        on_done(work())


class Background:
    """Executes calls in a thread. The owner calls ``collect`` when ``fileno`` is readable."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]]] = SimpleQueue()
        self._results: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._bell, self._rings = os.pipe()
        threading.Thread(target=self._work, name="background", daemon=True).start()

    def submit(self, work: Callable[[], T], on_done: Callable[[T], None]) -> None:
        self._waiting.put((work, on_done))

    def post(self, call: Callable[[], None]) -> None:
        """Have the owner make a call in ``collect``. Any thread may post one."""
        self._results.put(call)
        os.write(self._rings, b".")

    def fileno(self) -> int:
        return self._bell

    def collect(self) -> None:
        """Call ``done`` of the calls that have ended; blocks if there are none. Raises the exception of a call."""
        for _ in os.read(self._bell, 64):
            self._results.get()()

    def _work(self) -> None:
        """Execute the calls one after the other, and ring for the owner after each. Runs in the thread, for ever."""
        while True:
            work, on_done = self._waiting.get()
            try:
                outcome = work()
            except BaseException as error:
                self.post(partial(_raise, error))
            else:
                self.post(partial(on_done, outcome))


def _raise(error: BaseException) -> None:
    raise error
