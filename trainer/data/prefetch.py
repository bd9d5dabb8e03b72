"""Items that are made by clock in a thread, ahead of their use."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Makes the next items in one thread while the caller uses the current one.

    Clocks may be requested in any order; after a jump, as in a roll-back, nothing is made ahead yet.

    Args:
        make: returns the item at a clock; called in the thread.
        depth: number of items to make ahead.
    """

    def __init__(self, make: Callable[[int], T], *, depth: int = 2) -> None:
        self.make = make
        self.depth = depth
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._ahead: dict[int, Future[T]] = {}

    def get(self, clock: int) -> T:
        """Return the item at a clock. Raises the errors of ``make``, and RuntimeError after ``close``."""
        clocks = range(clock, clock + self.depth + 1)
        # Items outside the next clocks, as after a roll-back, would never be used.
        for other in self._ahead.keys() - set(clocks):
            self._ahead.pop(other).cancel()
        for number in clocks:
            if number not in self._ahead:
                self._ahead[number] = self._thread.submit(self.make, number)
        return self._ahead.pop(clock).result()

    def drop_ahead(self) -> None:
        """Drop all items that were made ahead, because ``make`` returns others now.

        An item in the making is finished and dropped too."""
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()

    def close(self) -> None:
        """End the thread. An item in the making is finished and dropped."""
        self._ahead.clear()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
