"""The exchange of examples among virtual workers that keep models of their own."""

from __future__ import annotations

from trainer.config import Config
from trainer.coordination.orders import ExampleOffer
from trainer.coordination.peer_progress import PeerProgress
from trainer.gossip.rounds import EMPTY, Pool
from trainer.home.folders import Folders
from trainer.leader.peer_gossip import PeerGossip
from trainer.runlog.example_ledger import recorded_losses
from trainer.simulation.compute import Compute


class PeerExamples:
    """The examples that workers give and get in a generation. A run without --gossip has none.

    Args:
        config, folders: the run.
        compute: selects examples, and trains on the examples of others.
        progress: of the generation, at the checkpoint with which it begins.
    """

    def __init__(self, config: Config, folders: Folders, compute: Compute, progress: PeerProgress) -> None:
        self.compute = compute
        self.progress = progress
        self._gossip: PeerGossip | None = None
        self._offers: dict[int, ExampleOffer] = {}  # that workers give in their present rounds
        self._ahead: set[int] = set()  # workers that wait until slower ones have made more rounds
        if not config.data.gossip:
            return
        self._gossip = PeerGossip(folders.work, progress.budget.position.gossip, progress.num_workers)
        # As workers do when they begin with the checkpoint.
        version = progress.version
        for worker in range(progress.num_workers):
            for pool in (Pool(0, version, version, EMPTY), *self._gossip.schedule.pools(worker)):
                compute.adopt(worker, pool)
        if config.reads_losses and config.run.example_ledger:
            compute.restore_losses(list(recorded_losses(folders.home, version)))

    def hold_back(self, worker: int, round: int) -> bool:
        """Return whether a worker may not begin a round yet, and if so note that it waits: ``count`` releases it."""
        if not self._gossip or round < self._gossip.most_rounds(self.progress.version):
            return False
        self._ahead.add(worker)
        return True

    def give(self, worker: int, round: int) -> None:
        """Have a worker give examples to all others, if it selects any before a round."""
        self._offers.pop(worker, None)
        if self._gossip and (gift := self.compute.selection(worker, round)):
            self._offers[worker] = ExampleOffer(gift.epoch, tuple(gift.examples.ids.tolist()))
            self._gossip.keep(worker, gift.epoch, gift.examples)

    def take_offer(self, worker: int) -> ExampleOffer | None:
        """Remove and return the examples that a worker gives in its present round."""
        return self._offers.pop(worker, None)

    def count(self) -> list[int]:
        """Count the examples of the last complete round, and return the workers that no longer have to wait."""
        if not self._gossip:
            return []
        if self._gossip.count(self.progress):
            for worker in range(self.progress.num_workers):
                self.compute.adopt(worker, self._gossip.schedule.pools(worker)[-1])
        most = self._gossip.most_rounds(self.progress.version)
        released = [worker for worker in sorted(self._ahead) if self.progress.members[worker].clock < most]
        self._ahead.difference_update(released)
        return released

    def forget(self, worker: int) -> None:
        """Note that a worker has died, which no longer waits."""
        self._ahead.discard(worker)
