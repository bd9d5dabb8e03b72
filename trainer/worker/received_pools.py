"""The examples of others that a worker among neighbours has for its coming rounds. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.gossip.rounds import EMPTY, Pool


class ReceivedPools:
    """The examples of others in one membership, which server 0 announces before it sends them."""

    def __init__(self) -> None:
        self._begins: dict[int, int] = {}  # the first step with the examples of others, by number of their round
        self._pools: dict[int, Pool] = {}  # those that are here
        self._handed_over = -1  # number of the last one that the worker has

    def announce(self, begins: Iterable[tuple[int, int]]) -> None:
        """Note which examples can be needed. begins: numbers of their rounds, each with the first step that uses them."""
        self._begins = dict(begins)
        self._pools = {number: pool for number, pool in self._pools.items() if number in self._begins}

    def take(self, pool: Pool) -> bool:
        """Keep examples of others, and return True; False if they are not announced."""
        if pool.round not in self._begins:
            return False
        self._pools[pool.round] = pool
        return True

    def missing(self, step: int) -> int | None:
        """Return the number of the first examples that will be used from a step on and are not here; None if all are."""
        in_use = self._round_in_use(step)
        return min({number for number in self._begins if number >= in_use} - self._pools.keys(), default=None)

    def is_ready(self, step: int) -> bool:
        """Return whether the examples that a step uses are here."""
        return self._round_in_use(step) in (0, *self._pools)

    def hand_over(self, step: int) -> Pool | None:
        """Return the examples that the worker needs before a step; None if it has them."""
        number = self._round_in_use(step)
        if number == self._handed_over:
            return None
        self._handed_over = number
        # An empty one too, because the worker may still have one of a round that is void.
        return self._pools[number] if number else Pool(0, step, step, EMPTY)

    def _round_in_use(self, step: int) -> int:
        """Return the number of the round whose examples a step uses, 0 for none."""
        return max((number for number, first in self._begins.items() if first <= step), default=0)
