"""The events of a long run in bounded memory: ``train`` events, about one per second, are thinned during reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from trainer.home.place import Place
from trainer.runlog.read import Event, Surviving, iter_events

MOST = 4096  # ``train`` events that are kept
MOST_WORKERS = 512  # ``train`` events that keep their entries of workers, which take 50 KB for 140 workers
INCIDENTS = ("restart", "rollback", "warning")


class NumberedEvent(NamedTuple):
    """A ``train`` event with its number among all of them. is_pinned: whether it is kept regardless of its number."""

    number: int
    event: Event
    is_pinned: bool = False


class Stride:
    """A selection of at most ``most`` numbers of a growing series: every 1st, 2nd, 4th, ... of them.

    The newest most/8 numbers are all kept, because a roll-back returns to one of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.every = 1

    def keeps(self, number: int, newest: int) -> bool:
        return number % self.every == 0 or newest - number < self.most // 8

    def widen(self, numbers: list[int], newest: int) -> None:
        """Double the stride until at most 3/4 of ``most`` of these numbers are kept, to leave room for more."""
        while sum(self.keeps(number, newest) for number in numbers) > 3 * self.most // 4:
            self.every *= 2


class ThinnedLog(Surviving):
    """``Surviving`` with at most about ``most`` ``train`` events: the first, the newest, and evenly spaced others.

    The last one before each incident is kept too, because it shows the state of training then. At most ``most_workers``
    of them keep their entries of workers. Other kinds of events are not changed."""

    def __init__(self, most: int = MOST, most_workers: int = MOST_WORKERS) -> None:
        super().__init__()
        self._number = -1
        self._trains: dict[int, NumberedEvent] = {}  # by id() of the event
        self._events = Stride(most)
        self._workers = Stride(most_workers)
        self._with_workers = 0

    def add(self, event: Event) -> None:
        """Add the next event of the log.

        A ``train`` event may cause earlier ones to be thinned; an incident keeps the last ``train`` event before it."""
        super().add(event)
        if event["event"] == "train" and self.events and self.events[-1] is event:
            self._number += 1
            self._trains[id(event)] = NumberedEvent(self._number, event)
            self._with_workers += 1
            if len(self._trains) > self._events.most:
                self._thin()
            if self._with_workers > self._workers.most:
                self._thin_workers()
        elif event["event"] in INCIDENTS:
            self._pin_last()

    def _thin(self) -> None:
        """Drop ``train`` events that are neither pinned nor kept by a stride, which is widened if necessary."""
        self._forget_void()
        numbers = [train.number for train in self._trains.values()]
        self._events.widen(numbers, self._number)
        self._keep(lambda train: train.is_pinned or self._events.keeps(train.number, self._number))

    def _thin_workers(self) -> None:
        """Empty the entries of workers in ``train`` events that the stride for them does not keep."""
        self._forget_void()
        having = [train for train in self._trains.values() if train.event.get("workers")]
        self._workers.widen([train.number for train in having], self._number)
        for train in having:
            if not self._workers.keeps(train.number, self._number):
                train.event["workers"] = []
        self._with_workers = sum(bool(train.event.get("workers")) for train in having)

    def _forget_void(self) -> None:
        """Drop ``train`` events that a roll-back in ``Surviving`` has removed."""
        live = {id(event) for event in self.events}
        self._trains = {key: train for key, train in self._trains.items() if key in live}

    def _keep(self, is_kept: Callable[[NumberedEvent], bool]) -> None:
        dropped = {key for key, train in self._trains.items() if not is_kept(train)}
        self.events = [event for event in self.events if id(event) not in dropped]
        self._trains = {key: train for key, train in self._trains.items() if key not in dropped}

    def _pin_last(self) -> None:
        """Keep the last ``train`` event permanently."""
        last = next((event for event in reversed(self.events) if event["event"] == "train"), None)
        if last is not None:
            self._trains[id(last)] = self._trains[id(last)]._replace(is_pinned=True)


def thinned(events: Iterable[Event], most: int = MOST) -> list[Event]:
    """Return the events that count, with ``train`` events thinned to ``most``. Modifies the given events."""
    found = ThinnedLog(most)
    for event in events:
        found.add(event)
    return found.events


def thinned_log(path: Place) -> list[Event]:
    """Return the ``thinned`` events of a metrics.jsonl, never with all in memory; none for an absent file."""
    return thinned(iter_events(path))
