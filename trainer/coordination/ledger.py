"""Which gradients wait for their turn, and which are in the sum of the next update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from trainer.coordination.orders import Measured
from trainer.protocols.base import Gradient

Entry = tuple[Gradient, Measured]


class Ledger:
    """Gradients that every server holds, each known by its worker and clock. One is used once it is in the sum: from then
    on the fate of its worker does not matter, and the worker may push the next. O(1) a gradient.

    in_worker_order: they are summed in the order of workers, not of their arrival."""

    def __init__(self, num_workers: int, *, in_worker_order: bool) -> None:
        self.num_workers, self.in_worker_order = num_workers, in_worker_order
        self.waiting: dict[int, Entry] = {}  # by worker, in the order of their arrival
        self.summed: list[Entry] = []
        self._contributors: Counter[int] = Counter()
        self._turn = 0

    def arrive(self, gradient: Gradient, measured: Measured) -> None:
        self.waiting[gradient.worker] = gradient, measured

    def withdraw(self, worker: int) -> None:
        """Drop what a worker pushed and what has not been summed."""
        self.waiting.pop(worker, None)

    def take(self, is_passed: Callable[[int], bool]) -> Entry | None:
        """The gradient whose turn it is. is_passed: whether a worker will push none for the next update."""
        if not self.in_worker_order:
            return self.waiting.pop(next(iter(self.waiting))) if self.waiting else None
        while self._turn < self.num_workers:
            entry = self.waiting.pop(self._turn, None)
            if entry:
                return entry
            if not (self.contributes(self._turn) or is_passed(self._turn)):
                return None
            self._turn += 1
        return None

    def add(self, entry: Entry) -> None:
        """A gradient goes into the sum of the next update."""
        self.summed.append(entry)
        self._contributors[entry[0].worker] += 1

    def examples(self) -> list[int]:
        """Of the gradients in the sum, in their order."""
        return [measured.examples for _, measured in self.summed]

    def contributes(self, worker: int) -> bool:
        return worker in self._contributors

    def close(self) -> list[Entry]:
        """The gradients of the update that is being made; the next one has none yet."""
        summed, self.summed = self.summed, []
        self._contributors.clear()
        self._turn = 0
        return summed
