"""The gradients that wait to be summed, and those in the sum of the next update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from trainer.coordination.orders import Record, StepMeasurements
from trainer.protocols.base import Gradient

Entry = tuple[Gradient, StepMeasurements]


class GradientLedger:
    """Gradients that every server holds, identified by worker and clock. O(1) per gradient.

    A gradient counts as used once it is in the sum of the next update: then a crash of its worker does not remove it
    any more, and the worker may push the next one.

    Attributes:
        in_worker_order: sum gradients in the order of workers instead of their arrival.
        waiting: gradients that are not in the sum yet, by worker, in the order of their arrival.
        summed: gradients in the sum.
    """

    def __init__(self, num_workers: int, *, in_worker_order: bool) -> None:
        self.num_workers = num_workers
        self.in_worker_order = in_worker_order
        self.waiting: dict[int, Entry] = {}  # by worker, which has at most one that is not in the sum
        self.summed: list[Entry] = []
        self._contributors: Counter[int] = Counter()  # gradients in the sum by worker
        self._turn = 0  # in the order of workers: the worker whose gradient comes next

    def arrive(self, gradient: Gradient, measured: StepMeasurements) -> None:
        self.waiting[gradient.worker] = gradient, measured

    def withdraw(self, worker: int) -> None:
        """Drop the gradient of a worker if it is not summed yet."""
        self.waiting.pop(worker, None)

    def take(self, is_passed: Callable[[int], bool]) -> Entry | None:
        """Remove and return the next waiting gradient to sum, or None if there is none yet.

        In the order of workers the next one is of the first worker that neither contributes to the sum nor is passed
        over. is_passed: returns whether a worker is passed over, because it will push no more."""
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
        """Add a gradient to the sum of the next update."""
        self.summed.append(entry)
        self._contributors[entry[0].worker] += 1

    def examples(self) -> list[int]:
        """Return the number of examples of each gradient in the sum, in order."""
        return [measured.examples for _, measured in self.summed]

    def contributes(self, worker: int) -> bool:
        return worker in self._contributors

    def close(self) -> list[Entry]:
        """Return the gradients of the update that is made now, and start an empty sum."""
        summed = self.summed
        self.summed = []
        self._contributors.clear()
        self._turn = 0
        return summed


def make_record(entry: Entry, version: int, *, accepted: bool) -> Record:
    """Return the log entry of a gradient.

    Its staleness is the number of updates between its worker's pull and the update that applies it or, if it is
    refused, the present. For an accepted gradient ``version`` already counts the update that applies it."""
    (worker, clock, pulled), measured = entry
    return Record(version, worker, clock, pulled, version - accepted - pulled, measured, accepted)
