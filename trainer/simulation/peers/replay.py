"""Replay of a run whose workers keep models of their own: all models, round by round, from the log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pipeline.core.errors import DataError
from trainer.checkpoints.replica_file import mean_of
from trainer.checkpoints.state import RunState
from trainer.config import Config, RunFacts
from trainer.coordination.parameter_slice import ParameterSlice
from trainer.exchange.mixing import Neighbours, TopologyPlan, links_by_worker, mix
from trainer.exchange.neighbours import NeighbourExchange
from trainer.leader.peer_checkpoints import PeerTimes
from trainer.rules import build_replica, replica_rate, weighted_batch
from trainer.runlog.kinds import GenerationEvent, LinkEvent, LogEvent, NewcomerEvent
from trainer.simulation.compute import Compute, Floats


class PeerReplay:
    """The models of all workers at the beginning of a round.

    Args:
        spans: configurations of the run, by the first version that each applies to.
        facts: the facts of the run.
        plan: of the links.
        compute: computes the gradients.
        events: of the log, those that count.

    Attributes:
        models: by worker; a lost worker has none.
    """

    def __init__(
        self,
        spans: Sequence[tuple[int, Config]],
        facts: RunFacts,
        plan: TopologyPlan,
        compute: Compute,
        events: Iterable[LogEvent],
    ) -> None:
        self.later = list(spans)
        self.config = spans[0][1]
        self.facts = facts
        self.plan = plan
        self.compute = compute
        self.models: dict[int, ParameterSlice] = {}
        self.round = 0
        self._unused: set[tuple[int, int]] = set()  # (worker, neighbour) without an exchange
        self._starts: set[int] = {0}
        self._newcomers: dict[int, dict[int, int]] = {}
        self._links: dict[int, list[LinkEvent]] = {}
        for event in events:
            if isinstance(event, GenerationEvent):
                self._starts.add(event.version)
            elif isinstance(event, NewcomerEvent):
                self._newcomers.setdefault(event.round, {})[event.worker] = event.source
            elif isinstance(event, LinkEvent):
                self._links.setdefault(event.round, []).append(event)
        momentum = np.zeros(facts.num_parameters, np.float32)
        self._first = build_replica(self.config, facts, compute.start().copy(), momentum)

    @property
    def exchange(self) -> NeighbourExchange:
        assert isinstance(self.config.exchange, NeighbourExchange), "other exchanges have other replays"
        return self.config.exchange

    def step(self, workers: Sequence[int]) -> None:
        """Compute a round. workers: those that completed it. Raises DataError if the log lacks gradients."""
        while self.later and self.later[0][0] <= self.round + 1:
            self.config = self.later.pop(0)[1]
            self.compute.set_threads(self.config.processes.threads)
        self._begin(workers)
        neighbours = links_by_worker(self.plan.edges(self.round))
        is_gradient_first = self.exchange.order == "grad-then-avg"
        models: dict[int, Floats] = {}
        # A lost worker that has not completed the round may have sent its model, too.
        for worker in self._senders(workers, neighbours):
            if worker not in self.models:
                raise DataError(
                    f"the log lacks what worker {worker} did before round {self.round}: it was killed before its last"
                    " gradients were logged"
                )
            if is_gradient_first:
                self._descend(worker, self.models[worker].values.copy())
            models[worker] = self.models[worker].values
        for worker in workers:
            if is_gradient_first and worker not in models:
                self._descend(worker, self.models[worker].values.copy())
        mixed = {worker: self._mix(worker, neighbours, models) for worker in workers}
        for worker in workers:
            if is_gradient_first:
                self.models[worker].values = mixed[worker]
            else:
                self._descend(worker, mixed[worker])
        self.models = {worker: self.models[worker] for worker in workers}
        self.round += 1
        self._admit()

    def mean(self, state: RunState) -> Floats:
        """Return the mean of the models of a checkpoint at the present round, float32 [P + Q]. Raises DataError."""
        workers = sorted(PeerTimes.from_state(state).begun)
        if not workers:
            return self._first.values
        if not set(workers) <= set(self.models):
            raise DataError("the log lacks gradients of workers that the newest checkpoint has")
        mean: Floats = mean_of([self.models[worker].values for worker in workers]).astype(np.float32)
        return mean

    def _begin(self, workers: Sequence[int]) -> None:
        """Begin a round: a generation resets all links, and gives the mean to workers without a model."""
        if self.round in self._starts:
            self._unused = set()
            present = [self.models[worker] for worker in sorted(self.models)] or [self._first]
            for worker in workers:
                if worker not in self.models:
                    values = mean_of([each.values for each in present]).astype(np.float32)
                    momentum = mean_of([each.momentum for each in present]).astype(np.float32)
                    self.models[worker] = build_replica(self.config, self.facts, values, momentum)
        for event in self._links.get(self.round, ()):
            change = self._unused.discard if event.used else self._unused.add
            change((event.worker, event.neighbour))

    def _admit(self) -> None:
        """Give newcomers of the present round their models."""
        for worker, source in self._newcomers.get(self.round, {}).items():
            self._unused = {link for link in self._unused if link[0] != worker}
            if source in self.models:
                values = self.models[source].values.copy()
                momentum = np.zeros(self.facts.num_parameters, np.float32)
                self.models[worker] = build_replica(self.config, self.facts, values, momentum)

    def _senders(self, workers: Sequence[int], neighbours: Neighbours) -> list[int]:
        """Return the workers whose models others use in the present round."""
        links = ((worker, other) for worker in workers for other, _ in neighbours.get(worker, ()))
        return sorted({other for worker, other in links if (worker, other) not in self._unused})

    def _mix(self, worker: int, neighbours: Neighbours, models: dict[int, Floats]) -> Floats:
        """Return a worker's parameters averaged with its neighbours', and its own statistics."""
        own: Any = self.models[worker].values
        parameters = self.facts.num_parameters
        links = [link for link in neighbours.get(worker, ()) if (worker, link[0]) not in self._unused]
        mixed: Floats = own.copy()
        mix(own[:parameters], [(weight, models[other][:parameters]) for other, weight in links], out=mixed[:parameters])
        return mixed

    def _descend(self, worker: int, values: Floats) -> None:
        """Subtract the gradient of a worker's model from other values, which become its model."""
        model = self.models[worker]
        result = self.compute.step(worker, self.round, [model.values])
        usual = weighted_batch(self.config, self.facts) if self.exchange.weigh_by == "examples" else None
        weight = result.examples / usual if usual else 1.0
        model.values = values
        model.apply([result.vector], replica_rate(self.config, self.facts, self.round), [weight])
