"""The history of a run among neighbours as its log has it: who began with which model, and who used whose.

A worker that is killed takes with it the report of its last rounds, though its neighbours may have used its models of
them. These rounds can be computed again: workers send nothing that depends on a lost link or on a first model before
the log has it, so such a round used the same links as the last one in the log."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from pipeline.core.errors import DataError
from trainer.exchange.mixing import Neighbours, TopologyPlan, links_by_worker
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.peers import LinkEvent, NewcomerEvent
from trainer.runlog.kinds.run import GenerationEvent

Links = frozenset[tuple[int, int]]


class PeerHistory:
    """The history of a run up to its newest checkpoint.

    Args:
        plans: of the links, each with its first round, ascending.
        events: of the log, those that count.
        rounds: by round, the workers whose gradients the log has.
        final: the workers whose models the newest checkpoint has.

    Attributes:
        starts: by round with which a generation begins, the workers whose models its checkpoint has; None in logs of
            earlier versions, which do not say so.
        newcomers: by round, the workers that begin with it, each with the worker whose model it got, as logged.
        unlogged: by round, workers whose gradients a later round needs although the log lacks them.
    """

    def __init__(
        self,
        plans: Sequence[tuple[int, TopologyPlan]],
        events: Iterable[LogEvent],
        rounds: Sequence[Sequence[int]],
        final: Iterable[int],
    ) -> None:
        self.plans = plans
        self.rounds = rounds
        self.starts: dict[int, list[int] | None] = {}
        self.newcomers: dict[int, list[tuple[int, int]]] = {}
        changes: dict[int, list[LinkEvent]] = {}
        for event in events:
            if isinstance(event, GenerationEvent):
                self.starts[event.version] = event.models
            elif isinstance(event, NewcomerEvent):
                self.newcomers.setdefault(event.round, []).append((event.worker, event.source))
            elif isinstance(event, LinkEvent):
                changes.setdefault(event.round, []).append(event)
        self._unused = self._unused_links(changes)
        self._changed = sorted(self._unused)
        # Without lost workers there is nothing to look for.
        is_whole = all(len(workers) == self._plan(round).num_workers for round, workers in enumerate(rounds))
        self.unlogged: Mapping[int, frozenset[int]] = {}
        if not is_whole and None not in self.starts.values():
            self.unlogged = self._find_unlogged(final)

    def links(self, round: int) -> Neighbours:
        """Return the neighbours whose models each worker uses in a round, if it takes part, with their weights."""
        neighbours = links_by_worker(self._plan(round).edges(round))
        at = bisect_right(self._changed, round)
        unused = self._unused[self._changed[at - 1]] if at else frozenset()
        if not unused:
            return neighbours
        return {
            worker: tuple(link for link in links if (worker, link[0]) not in unused)
            for worker, links in neighbours.items()
        }

    def _plan(self, round: int) -> TopologyPlan:
        return self.plans[bisect_right(self.plans, round, key=lambda each: each[0]) - 1][1]

    def _unused_links(self, changes: Mapping[int, Sequence[LinkEvent]]) -> dict[int, Links]:
        """Return the links (worker, neighbour) that a worker does not use, by the round from which they apply."""
        unused: Links = frozenset()
        result: dict[int, Links] = {}
        for round in sorted({*changes, *self.newcomers, *self.starts}):
            # A new membership begins with all links.
            newcomers = {worker for worker, _ in self.newcomers.get(round, ())}
            unused = (
                frozenset() if round in self.starts else frozenset(link for link in unused if link[0] not in newcomers)
            )
            for event in changes.get(round, ()):
                link = frozenset({(event.worker, event.neighbour)})
                unused = unused - link if event.used else unused | link
            result[round] = unused
        return result

    def _find_unlogged(self, final: Iterable[int]) -> dict[int, frozenset[int]]:
        """Return ``unlogged``. Raises DataError if the log lacks a gradient of a worker that was not lost."""
        result: dict[int, frozenset[int]] = {}
        needed = set(final)  # workers whose models at the end of the round are needed
        # Backwards, because the use of a model in a later round is the reason why an earlier one is needed.
        for round in reversed(range(len(self.rounds))):
            logged = set(self.rounds[round])
            newcomers = self.newcomers.get(round + 1, [])
            models = self.starts.get(round + 1)
            if models is not None:
                needed = set(models)
            for worker, source in reversed(newcomers):
                if worker in needed:
                    needed.discard(worker)
                    needed.add(source)
            missing = frozenset(needed - logged)
            if missing:
                result[round] = missing
            computed = logged | missing
            links = self.links(round)
            needed = computed | {other for worker in computed for other, _ in links.get(worker, ())}
            for worker in missing:
                is_absent = round + 1 == len(self.rounds) or worker not in self.rounds[round + 1]
                has_begun_again = models is not None or worker in dict(newcomers)
                if not (is_absent or has_begun_again):
                    raise DataError(f"the log lacks what worker {worker} did before round {round + 1}: it is damaged")
        return result
