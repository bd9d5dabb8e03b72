"""The events of a long run in bounded memory: ``train`` events, about one per second, are thinned during reading."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from trainer.home.place import Place
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.peers import GossipEvent, PoolEvent
from trainer.runlog.kinds.run import RestartEvent, RollbackEvent, WarningEvent
from trainer.runlog.kinds.training import TrainEvent
from trainer.runlog.read import Surviving, iter_events

MOST = 4096  # ``train`` events that are kept
MOST_WORKERS = 512  # ``train`` events that keep their entries of workers, which take 50 KB for 140 workers
INCIDENTS = (RestartEvent, RollbackEvent, WarningEvent)


class NumberedEvent(NamedTuple):
    """A ``train`` event with its number among all of them. is_pinned: whether it is kept regardless of its number."""

    number: int
    event: TrainEvent
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

    The last one before each incident is kept too, because it shows the state of training then. At most MOST_WORKERS
    of them keep their entries of workers. Other kinds of events are not changed."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._number = -1
        self._trains: dict[int, NumberedEvent] = {}  # by id() of the event
        self._events = Stride(most)
        self._workers = Stride(MOST_WORKERS)
        self._with_workers = 0
        self._num_pinned = 0

    def add(self, event: LogEvent) -> None:
        """Add the next event of the log.

        A ``train`` event may cause earlier ones to be thinned. An event in INCIDENTS, such as a roll-back, exempts the
        last ``train`` event before it from thinning."""
        super().add(event)
        # ``Surviving`` does not keep an event that is void already, because a roll-back was logged before it.
        if isinstance(event, TrainEvent) and self.events and self.events[-1] is event:
            self._number += 1
            self._trains[id(event)] = NumberedEvent(self._number, event)
            self._with_workers += 1
            # Pinned events stay in any case: counted here, many of them would thin the rest at each event.
            if len(self._trains) - self._num_pinned > self._events.most:
                self._thin()
            if self._with_workers > self._workers.most:
                self._thin_workers()
        elif isinstance(event, INCIDENTS):
            self._pin_last()

    def _thin(self) -> None:
        """Drop ``train`` events that are neither pinned nor kept by a stride, which is widened if necessary."""
        self._forget_void()
        numbers = [train.number for train in self._trains.values()]
        self._events.widen(numbers, self._number)
        dropped = {
            key
            for key, train in self._trains.items()
            if not (train.is_pinned or self._events.keeps(train.number, self._number))
        }
        self.events = [event for event in self.events if id(event) not in dropped]
        self._trains = {key: train for key, train in self._trains.items() if key not in dropped}

    def _thin_workers(self) -> None:
        """Empty the entries of workers in ``train`` events that the stride for them does not keep."""
        self._forget_void()
        having = {key: train for key, train in self._trains.items() if train.event.workers}
        self._workers.widen([train.number for train in having.values()], self._number)
        emptied = {
            key: replace(train.event, workers=[])
            for key, train in having.items()
            if not self._workers.keeps(train.number, self._number)
        }
        self.events = [emptied.get(id(event), event) for event in self.events]
        # Events are found by their id(), so the copies take the places of the originals in both.
        trains = [train._replace(event=emptied.get(key, train.event)) for key, train in self._trains.items()]
        self._trains = {id(train.event): train for train in trains}
        self._with_workers = len(having) - len(emptied)

    def _forget_void(self) -> None:
        """Drop ``train`` events that a roll-back in ``Surviving`` has removed."""
        live = {id(event) for event in self.events}
        self._trains = {key: train for key, train in self._trains.items() if key in live}
        self._num_pinned = sum(train.is_pinned for train in self._trains.values())

    def _pin_last(self) -> None:
        """Keep the last ``train`` event permanently."""
        last = next((event for event in reversed(self.events) if isinstance(event, TrainEvent)), None)
        if last is not None:
            self._num_pinned += not self._trains[id(last)].is_pinned
            self._trains[id(last)] = self._trains[id(last)]._replace(is_pinned=True)


def thinned(events: Iterable[LogEvent], most: int = MOST) -> list[LogEvent]:
    """Return the events that count, with ``train`` events thinned to ``most``.

    Exchanges of examples, with the ids of each, are left out: only a replay uses them."""
    log = ThinnedLog(most)
    for event in events:
        if not isinstance(event, GossipEvent | PoolEvent):
            log.add(event)
    return log.events


def thinned_log(path: Place) -> list[LogEvent]:
    """Return the ``thinned`` events of a metrics.jsonl, never with all in memory; none for an absent file."""
    return thinned(iter_events(path))
