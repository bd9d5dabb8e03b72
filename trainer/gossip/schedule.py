"""The steps from which pools are used if workers are in different steps: the same step for all workers. Pure.

A step of the run is complete when all workers that take part have made it. Examples that workers have given with it count
then, in the order of workers. A round that they complete is used from a step on that no worker can have begun, because none
is more than DELAY steps ahead of the first step that is not complete. Who trains on which examples therefore follows from
the seed, as the models do, unless workers are lost."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from trainer.coordination.orders import ExampleOffer
from trainer.gossip.rounds import Examples, GossipRounds, Pool

DELAY = 16  # steps after the one that completes a round, until the first step with its examples


class PoolSchedule:
    """The last two rounds of a run: one that workers use, and one that they may use later.

    Args:
        memory: the state, plain JSON, which is changed in place.

    Attributes:
        rounds: all rounds.
    """

    def __init__(self, memory: dict[str, Any]) -> None:
        self.rounds = GossipRounds(memory)
        # The first step with any pool, the first one with the last round, and the round before.
        self._times: dict[str, Any] = memory.setdefault("schedule", {"first": None, "clock": 0, "before": None})
        before = self._times["before"]
        self._before = GossipRounds({**memory, **before, "open": {}}) if before else None

    def advance(
        self,
        step: int,
        offers: Mapping[int, ExampleOffer | None],
        contents: Mapping[int, Examples],
        members: Set[int],
    ) -> bool:
        """Count the examples that workers have given with a step that is complete. Returns whether a round is complete.

        Args:
            step: its number; each step is counted once, in their order.
            offers: by worker.
            contents: of the offers whose content is known here, by worker.
            members: workers that take part.
        """
        self.rounds.add_offers(dict(sorted(offers.items())), contents)
        # Workers keep the pool before only until the last one begins.
        if self._times["clock"] > step + 1 or not self.rounds.is_complete(members):
            return False
        earlier = self._last()
        self.rounds.complete(members)
        if earlier.number:
            self._before = earlier
            self._times["before"] = {"round": earlier.number, "clock": self._times["clock"], "ids": earlier.ids}
        self._times["clock"] = step + 1 + DELAY
        if self._times["first"] is None:
            self._times["first"] = step + 1 + DELAY
        return True

    def pools(self, worker: int) -> list[Pool]:
        """Return the pools of the last two rounds for a worker, in their order; fewer if there are none."""
        first = self._times["first"]
        if first is None:
            return []
        pools = [self.rounds.pool(worker, self._times["clock"], first)]
        if self._before:
            pools.insert(0, self._before.pool(worker, self._times["before"]["clock"], first))
        return pools

    def begins(self) -> list[tuple[int, int]]:
        """Return the numbers of the last two rounds, each with the first step with its examples."""
        return [(pool.round, pool.clock) for pool in self.pools(0)]

    def _last(self) -> GossipRounds:
        """Return the last complete round, as it stays when the next one is complete."""
        last = GossipRounds({**self.rounds.memory, "open": {}})
        last.recall(self.rounds)
        return last
