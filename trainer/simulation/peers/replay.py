"""Replay of a run whose workers keep models of their own: all models, round by round, from the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pipeline.core.errors import DataError
from trainer.checkpoints.replica_file import mean_of
from trainer.checkpoints.slice_file import Float32s
from trainer.checkpoints.state import RunState
from trainer.config import Config, RunFacts
from trainer.coordination.parameter_slice import ParameterSlice
from trainer.exchange.mixing import mix_parameters
from trainer.exchange.neighbours import NeighbourExchange
from trainer.leader.peer_checkpoints import PeerTimes
from trainer.rules import build_replica, carry_losses, replica_rate, weighted_batch
from trainer.simulation.compute import Compute
from trainer.simulation.peers.history import PeerHistory


class PeerReplay:
    """The models of all workers at the beginning of a round.

    Args:
        configs_by_version: (first version that it applies to, configuration) of the run, ascending.
        build: returns the facts of a run and the computation of its gradients, for the configuration of a start.
        history: of the run.

    Attributes:
        models: by worker; a lost worker has none.
    """

    def __init__(
        self,
        configs_by_version: Sequence[tuple[int, Config]],
        build: Callable[[Config], tuple[RunFacts, Compute]],
        history: PeerHistory,
    ) -> None:
        self.later = list(configs_by_version)
        self.config = configs_by_version[0][1]
        self.build = build
        self.facts, self.compute = build(self.config)
        self.history = history
        self.models: dict[int, ParameterSlice] = {}
        self.round = 0
        momentum = np.zeros(self.facts.num_parameters, np.float32)
        self._first = build_replica(self.config, self.facts, self.compute.start().copy(), momentum)

    @property
    def exchange(self) -> NeighbourExchange:
        assert isinstance(self.config.exchange, NeighbourExchange), "other exchanges have other replays"
        return self.config.exchange

    def step(self) -> None:
        """Compute a round. Raises DataError if the log lacks gradients."""
        while self.later and self.later[0][0] <= self.round + 1:
            cohorts = self.config.cohorts
            self.config = self.later.pop(0)[1]
            if self.config.cohorts != cohorts:
                self.facts, self.compute = self.build(self.config)
            self.compute.set_threads(self.config.processes.threads)
        history = self.history
        # Lost workers, too, whose models others use in this round or a later one.
        workers = sorted({*history.rounds[self.round], *history.unlogged.get(self.round, ())})
        links = history.links(self.round)
        # A worker may have sent its model and not completed the round.
        needed = sorted({*workers, *(other for worker in workers for other, _ in links.get(worker, ()))})
        self._begin(needed)
        for worker in needed:
            if worker not in self.models:
                raise DataError(
                    f"the log lacks what worker {worker} did before round {self.round}: it was killed before its last"
                    " gradients were logged"
                )
        is_gradient_first = self.exchange.order == "grad-then-avg"
        models: dict[int, Float32s] = {}
        for worker in needed:
            if is_gradient_first:
                self._descend(worker, self.models[worker].values.copy())
            models[worker] = self.models[worker].values
        mixed: dict[int, Float32s] = {}
        for worker in workers:
            others = [(weight, models[other]) for other, weight in links.get(worker, ())]
            mixed[worker] = mix_parameters(self.models[worker].values, others, self.facts.num_parameters)
        for worker in workers:
            if is_gradient_first:
                self.models[worker].values = mixed[worker]
            else:
                self._descend(worker, mixed[worker])
        self.models = {worker: self.models[worker] for worker in workers}
        self.round += 1
        self._admit()

    def mean(self, state: RunState) -> Float32s:
        """Return the mean of the models of a checkpoint at the present round, float32 [P + Q]. Raises DataError."""
        workers = sorted(PeerTimes.from_state(state).begun)
        if not workers:
            return self._first.values
        if not set(workers) <= set(self.models):
            raise DataError("the log lacks gradients of workers that the newest checkpoint has")
        mean: Float32s = mean_of([self.models[worker].values for worker in workers]).astype(np.float32)
        return mean

    def _begin(self, workers: Sequence[int]) -> None:
        """Begin a round. In the first one of a generation, workers that its checkpoint lacks begin with the mean.

        In the first one of a cohort all workers do."""
        if self.round not in self.history.starts and self.round:
            return
        stored = self.history.starts.get(self.round)
        if stored is not None:
            self.models = {worker: model for worker, model in self.models.items() if worker in stored}
        present = [self.models[worker] for worker in sorted(self.models)] or [self._first]
        values: Float32s = mean_of([each.values for each in present]).astype(np.float32)
        momentum: Float32s = mean_of([each.momentum for each in present]).astype(np.float32)
        # Other workers than those in the checkpoint.
        if self.config.cohorts.begins_at(self.round):
            models = {worker: model.values for worker, model in self.models.items()}
            values = carry_losses(self.config, self.facts, values, models)
            self.models = {}
        for worker in workers:
            if worker not in self.models:
                self.models[worker] = build_replica(self.config, self.facts, values.copy(), momentum.copy())

    def _admit(self) -> None:
        """Give newcomers of the present round their models."""
        for worker, source in self.history.newcomers.get(self.round, ()):
            if source in self.models:
                values = self.models[source].values.copy()
                momentum = np.zeros(self.facts.num_parameters, np.float32)
                self.models[worker] = build_replica(self.config, self.facts, values, momentum)

    def _descend(self, worker: int, values: Float32s) -> None:
        """Subtract the gradient of a worker's model from other values, which become its model."""
        model = self.models[worker]
        result = self.compute.step(worker, self.round, [model.values])
        usual = weighted_batch(self.config, self.facts)
        weight = result.examples / usual if usual else 1.0
        model.values = values
        model.apply([result.vector], replica_rate(self.config, self.facts, self.round), [weight])
