"""The events to come in virtual time, and the lives of workers, by which events become void. Pure."""

from __future__ import annotations

import heapq
from typing import Any

from trainer.simulation.peers.events import PeerEvent, PeerEventKind


class PeerQueue:
    """Events in the order of their times. Each of them costs O(log of their number)."""

    def __init__(self, num_workers: int) -> None:
        self._events: list[PeerEvent] = []
        self._lives = [0] * (num_workers + 1)  # by worker; the last one is the leader's, whose number is -1

    def __len__(self) -> int:
        return len(self._events)

    def put(self, time: float, worker: int, kind: PeerEventKind, **details: Any) -> None:
        """Queue an event of the present lives. details: other fields of PeerEvent."""
        lives = self._lives_of(worker, details.get("sender", -1))
        heapq.heappush(self._events, PeerEvent(time, worker, kind, lives=lives, **details))

    def pop(self) -> PeerEvent:
        """Remove and return the next event."""
        return heapq.heappop(self._events)

    def end_life(self, worker: int) -> None:
        """Make all events of a worker and of its messages void, because it has died or been rolled back."""
        self._lives[worker] += 1

    def is_void(self, event: PeerEvent) -> bool:
        return event.lives != self._lives_of(event.worker, event.sender)

    def _lives_of(self, worker: int, sender: int) -> tuple[int, int]:
        return self._lives[worker], self._lives[sender]
