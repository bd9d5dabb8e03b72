"""The exchange of examples among workers that have models of their own, as server 0 keeps it and logs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.coordination.peer_progress import PeerProgress
from trainer.gossip.rounds import Examples
from trainer.gossip.schedule import DELAY, PoolSchedule
from trainer.runlog.events import log_event
from trainer.transport.bodies.examples import pack_examples
from trainer.transport.messages.gossip import GossipPool, PoolRequest


class PeerGossip:
    """The rounds of examples in a generation.

    Args:
        log: folder of the log.
        memory: state of the rounds, which is changed in place.
        num_workers: number of workers.

    Attributes:
        schedule: who uses which examples from which step on.
    """

    def __init__(self, log: Path, memory: dict[str, Any], num_workers: int) -> None:
        self.log = log
        self.num_workers = num_workers
        self.schedule = PoolSchedule(memory)
        self._contents: dict[tuple[int, int], Examples] = {}  # by worker and epoch, until they count
        self._bodies: list[tuple[Examples, bytes]] = []  # the last examples of pools that were sent, and packed

    def keep(self, worker: int, epoch: int, examples: Examples) -> None:
        """Keep the content of examples, which count once their step is complete. epoch: of the worker."""
        self._contents[worker, epoch] = examples

    def count(self, progress: PeerProgress) -> bool:
        """Count the examples that came with the last complete round of the run. Returns whether all workers get new ones.

        The log then has their ids, and the step from which workers use them, which none has begun."""
        step = progress.version - 1
        offers = {worker: measured.offer for worker, measured in progress.completed.items() if measured.offer}
        contents = {
            worker: self._contents[worker, offer.epoch]
            for worker, offer in offers.items()
            if (worker, offer.epoch) in self._contents
        }
        self._contents = {
            (worker, epoch): examples
            for (worker, epoch), examples in self._contents.items()
            if worker not in offers or epoch > offers[worker].epoch
        }
        members = {worker for worker in range(self.num_workers) if progress.takes_part(worker, step)}
        if not self.schedule.advance(step, offers, contents, members):
            return False
        # With the version of the checkpoint that has the round, too.
        rounds = self.schedule.rounds
        log_event(self.log, "gossip", version=progress.version, round=rounds.number, ids=rounds.ids)
        for worker in range(self.num_workers):
            pool = self.schedule.pools(worker)[-1]
            place = {"version": progress.version, "worker": worker, "round": pool.round}
            log_event(self.log, "pool", **place, clock=pool.clock, first=pool.first)
        return True

    def most_rounds(self, version: int) -> int:
        """Return the number of rounds that workers may begin, which a later pool cannot change.

        version: complete rounds of the run."""
        return version + DELAY + 1

    def answers(self, request: PoolRequest) -> list[tuple[GossipPool, bytes]]:
        """Return the messages with the examples of all workers in the last rounds that a worker does not have."""
        worker = request.worker
        answers = []
        for pool in self.schedule.pools(worker):
            if pool.round >= request.round:
                own = pool.own_begin, pool.own_end
                message = GossipPool(worker, request.session, pool.round, pool.clock, pool.first, *own)
                answers.append((message, self._packed(pool.examples)))
        return answers

    def _packed(self, examples: Examples) -> bytes:
        """Return examples as the body of a message, of which one serves all workers."""
        for each, body in self._bodies:
            if each is examples:
                return body
        self._bodies = [*self._bodies[-1:], (examples, pack_examples(examples))]
        return self._bodies[-1][1]
