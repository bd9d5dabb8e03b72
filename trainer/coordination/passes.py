"""Which rows a run has trained: the fingerprint of every pass of all workers over the set, from accepted gradients alone."""

from __future__ import annotations

from typing import Any, NamedTuple

WORD = 1 << 64


class Seen(NamedTuple):
    """The rows of a mini-batch by their hashes, modulo 2^64: the sum over all of them, and over those that begin a pass
    which the mini-batch leaves unfinished, where it ends ``passes`` of them (0 of most, more than 1 of a tiny shard)."""

    fingerprint: int
    begun: int
    passes: int


class Whole(NamedTuple):
    """Passes that every worker has ended, ``first`` to ``last``, counted from 1, with the sum of what they trained."""

    first: int
    last: int
    fingerprint: int


class Passes:
    """held: what there is to remember, in plain JSON: every checkpoint has it, so that a gradient that was taken back is not
    counted. O(1) a gradient; O(workers + passes that the fastest worker is ahead by) in all."""

    def __init__(self, num_workers: int, held: dict[str, Any]) -> None:
        self.num_workers, self.held = num_workers, held
        self.whole: list[Whole] = []  # until somebody takes them
        for name, empty in (("sums", {}), ("ended", {}), ("at", {}), ("last", [0, 0])):
            held.setdefault(name, empty)

    def use(self, worker: int, seen: Seen) -> None:
        """A gradient of a worker goes into an update."""
        name, held = str(worker), self.held
        total = held["sums"][name] = (held["sums"].get(name, 0) + seen.fingerprint) % WORD
        if not seen.passes:
            return
        ended = held["ended"][name] = held["ended"].get(name, 0) + seen.passes
        sum_, count = held["at"].get(str(ended), (0, 0))
        held["at"][str(ended)] = [(sum_ + total - seen.begun) % WORD, count + 1]
        if count + 1 == self.num_workers:
            self._end(ended)

    def miss(self, worker: int, seen: Seen) -> None:
        """A gradient of a worker was refused: its rows are trained in a later pass only."""
        self.use(worker, Seen(0, 0, seen.passes))

    def _end(self, number: int) -> None:
        before, sum_before = self.held["last"]
        sum_ = self.held["at"][str(number)][0]
        self.whole.append(Whole(before + 1, number, (sum_ - sum_before) % WORD))
        self.held["last"] = [number, sum_]
        self.held["at"] = {at: entry for at, entry in self.held["at"].items() if int(at) > number}

    def take(self) -> list[Whole]:
        """The passes that have become whole since the last call."""
        taken, self.whole = self.whole, []
        return taken
