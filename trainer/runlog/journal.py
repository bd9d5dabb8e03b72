"""The log that server 0 writes: every push, a summary about every second, and every epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer.coordination.budget import Budget
from trainer.coordination.orders import Record, StepMeasurements
from trainer.coordination.passes import WORD, Passes, Whole
from trainer.runlog.events import log_event, log_pushes
from trainer.runlog.example_ledger import ExampleLedger

EVERY_S = 1.0


class ClockedMember(Protocol):
    """A worker in the progress of a run. clock: number of its steps."""

    clock: int


class Progress(Protocol):
    """The progress of a run, as its log reads it (see Coordinator and PeerProgress).

    Attributes:
        budget: the length of the run and its position.
        rate: rate(epoch) is the learning rate divided by the number of workers.
        passes: the passes over the rows.
        epoch_means: mean loss and accuracy of the last epoch that ended.
        records: used and refused gradients that the log does not have yet; the log takes them over.
    """

    rate: Callable[[float], float]
    passes: Passes
    epoch_means: dict[str, float | None]
    records: list[Record]

    @property
    def budget(self) -> Budget: ...

    @property
    def started(self) -> bool: ...

    @property
    def finished(self) -> bool: ...

    @property
    def num_workers(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def members(self) -> Sequence[ClockedMember]: ...


class Journal:
    """The writer of one generation's log.

    Args:
        root: the folder of metrics.jsonl and pushes.csv.
        coordinator: the progress of the run, whose records are logged.
        generation: the number of this generation.
        seconds_before: training time before this generation, from its checkpoint.
        fingerprint: fingerprint of the set's rows, if known.
        classifies: whether there is an accuracy; otherwise it is logged as null.
        ledger: takes over the examples of the records, if the run keeps them.
    """

    def __init__(
        self,
        root: Path,
        coordinator: Progress,
        generation: int,
        seconds_before: float,
        fingerprint: int | None = None,
        *,
        classifies: bool = True,
        ledger: ExampleLedger | None = None,
    ) -> None:
        self.root = root
        self.ledger = ledger
        self.coordinator = coordinator
        self.generation = generation
        self.fingerprint = fingerprint
        self.classifies = classifies
        self.summary: dict[str, Any] = {}
        self._before = seconds_before
        self._flushed = 0.0
        self._start: float | None = None
        self._end: float | None = None
        # Of pushes.csv and of the next ``train`` event, which are written at different times.
        self._unwritten: list[tuple[float, Record]] = []
        self._recent: list[Record] = []

    def seconds(self, now: float) -> float:
        """Return the training time of the run so far in seconds.

        It is the sum over the starts of the run, each from its first step to its last update."""
        if self._start is None and self.coordinator.started:
            self._start = self._flushed = now
        if self._end is None and self.coordinator.finished:
            self._end = now
        return self._before + ((self._end or now) - self._start if self._start is not None else 0.0)

    def note(self, boundary: int | None, now: float) -> None:
        """Take over the coordinator's records of pushes, and log the passes and the epoch that they complete.

        boundary: the epoch that they complete, or None."""
        seconds = self.seconds(now)
        records = self.coordinator.records
        self.coordinator.records = []
        if self.ledger:
            self.ledger.add(records, self.coordinator.budget.epoch)
            # The records stay in memory for a second or more, and their examples need not.
            records = [record._replace(measured=record.measured._replace(row_losses=None)) for record in records]
        if not records and boundary is None:
            return
        # With the time of the update: the rows are written later, many at once.
        self._unwritten += [(seconds, record) for record in records]
        self._recent += records
        version = self.coordinator.version
        for whole in self.coordinator.passes.take():
            self._log_pass(whole, version, seconds)
        if boundary is not None:
            means = self.coordinator.epoch_means
            # The count of correct predictions is 0 for real targets, and must not be logged as a measured accuracy.
            means = means if self.classifies else means | {"accuracy": None}
            log_event(self.root, "epoch", epoch=boundary, version=version, seconds=seconds, **means)

    def _log_pass(self, whole: Whole, version: int, seconds: float) -> None:
        """Log the fingerprint of the trained rows and the expected one: equal if each pass trained every row once."""
        passes = whole.last - whole.first + 1
        expected = None if self.fingerprint is None else f"{passes * self.fingerprint % WORD:016x}"
        fingerprint = f"{whole.fingerprint:016x}"
        place = {"first": whole.first, "last": whole.last, "version": version, "seconds": seconds}
        log_event(self.root, "pass", **place, fingerprint=fingerprint, expected=expected)

    def write_pushes(self) -> None:
        """Write the pushes taken over so far. A write per push would make up a fifth of the cost of a small push."""
        pushes = self._unwritten
        self._unwritten = []
        if pushes:
            log_pushes(self.root, self.generation, pushes)

    def flush(self, now: float) -> None:
        """Write the pushes taken over so far and, about once a second and at the end, an event that summarises them."""
        self.write_pushes()
        # The process may end before another second has passed, and its counter of images would lack the last ones.
        is_end = self._end is not None and self._flushed <= self._end
        if now - self._flushed < EVERY_S and not is_end:
            return
        trained = min(now, self._end or now) - self._flushed
        self._flushed = now
        recent = self._recent
        self._recent = []
        if recent:
            self.summary = self._summarise(recent, trained, now)
            log_event(self.root, "train", **self.summary)

    def _summarise(self, recent: list[Record], trained: float, now: float) -> dict[str, Any]:
        """Return the values of a ``train`` event. They describe accepted pushes, except for ``workers``: all pushes.

        If ``trained`` is too short to measure a speed, as in the last interval of a run, the previous speed is
        repeated.

        Args:
            recent: the pushes since the previous event.
            trained: training time of these pushes in seconds.
            now: the current time.
        """
        coordinator = self.coordinator
        accepted = [record for record in recent if record.accepted]
        speed = self.summary.get("images_per_s") if trained < EVERY_S / 2 else None
        staleness = [record.staleness for record in accepted]
        return self._means(accepted) | {
            "seconds": round(self.seconds(now), 3),
            "version": coordinator.version,
            "accepted": coordinator.budget.position.accepted,
            "epoch": round(coordinator.budget.epoch, 4),
            # The coordinator's rate is per gradient, the logged rate is comparable with --learning-rate.
            "learning_rate": coordinator.rate(coordinator.budget.epoch) * coordinator.num_workers,
            "images_per_s": speed or sum(record.measured.examples for record in accepted) / max(trained, 1e-3),
            "staleness_mean": sum(staleness) / len(staleness) if staleness else None,
            "staleness_max": max(staleness, default=None),
            "workers": self._workers(recent),
        }

    def _workers(self, recent: list[Record]) -> list[Mapping[str, float]]:
        """Return an entry per worker that pushed recently: its clock, images and mean seconds per step."""
        steps: dict[int, list[StepMeasurements]] = {}
        for record in recent:
            steps.setdefault(record.worker, []).append(record.measured)
        return [
            {
                "index": index,
                "clock": self.coordinator.members[index].clock,
                "images": sum(step.examples for step in steps[index]),
                "step_s": round(sum(step.seconds for step in steps[index]) / len(steps[index]), 4),
            }
            for index in sorted(steps)
        ]

    def _means(self, records: list[Record]) -> dict[str, Any]:
        """Return mean loss and accuracy over the examples of pushes; None without examples."""
        examples = sum(record.measured.examples for record in records)
        if not examples:
            return {"loss": None, "accuracy": None}
        return {
            "loss": sum(record.measured.loss * record.measured.examples for record in records) / examples,
            "accuracy": sum(record.measured.correct for record in records) / examples if self.classifies else None,
        }
