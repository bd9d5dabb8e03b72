"""Work that would keep a server from answering, done beside it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Work(Protocol):
    """Does one piece of work after the other, in their order, and then calls done(outcome) in its owner's thread."""

    def submit(self, work: Callable[[], T], done: Callable[[T], None]) -> None: ...


class AtOnce:
    """Work is done where it is submitted: for virtual time, where it takes none."""

    def submit(self, work: Callable[[], T], done: Callable[[T], None]) -> None:
        done(work())


class Background:
    """Work is done by a thread. Its owner calls ``collect`` when ``fileno`` can be read."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]]] = SimpleQueue()
        self._done: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._bell, self._rings = os.pipe()
        threading.Thread(target=self._work, name="background", daemon=True).start()

    def submit(self, work: Callable[[], T], done: Callable[[T], None]) -> None:
        self._waiting.put((work, done))

    def fileno(self) -> int:
        return self._bell

    def collect(self) -> None:
        """Call what is due; blocks where nothing is. Raises what a piece of work raised."""
        for _ in os.read(self._bell, 64):
            self._done.get()()

    def _work(self) -> None:
        while True:
            work, done = self._waiting.get()
            try:
                outcome = work()
            except BaseException as error:
                self._done.put(_raising(error))
            else:
                self._done.put(_handing_over(done, outcome))
            os.write(self._rings, b".")


def _handing_over(done: Callable[[T], None], outcome: T) -> Callable[[], None]:
    return lambda: done(outcome)


def _raising(error: BaseException) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call
