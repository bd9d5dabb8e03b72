"""The client of exchanges among neighbours: connects a worker's own model to its neighbours and to server 0."""

from __future__ import annotations

import secrets as random_numbers
import time
from collections.abc import Sequence

import numpy as np
import zmq

from trainer.config import Config, RunFacts
from trainer.coordination.orders import StepMeasurements
from trainer.gossip.rounds import Examples
from trainer.home.folders import Folders
from trainer.transport.agreement import Agreement
from trainer.transport.bodies.examples import pack_examples, unpack_examples
from trainer.transport.mesh import Mesh
from trainer.transport.messages.gossip import GossipPool, PoolRequest
from trainer.transport.messages.heads import Body, Message
from trainer.transport.messages.peers import ModelCopy, PeerBeat, RunEnd
from trainer.transport.sockets import Secret, close
from trainer.watchdog import kick
from trainer.worker.clients.base import MustRejoin, Turn, Vector
from trainer.worker.clients.leader_link import LeaderLink
from trainer.worker.neighbour_replica import NeighbourPhase, NeighbourReplica

RESEND_S = 1.0
RESEND_COPY_S = 10.0  # of a model, which is lost only with a broken connection
# Between two reports of rounds to server 0. Short, so that the log lacks few gradients of a worker that is killed.
REPORT_S = 0.02
WATCH_S = 0.2  # between two looks at the connections


def open_client(
    config: Config, facts: RunFacts, worker: int, addresses: Sequence[str], secret: Secret, folders: Folders
) -> NeighbourClient:
    """Return the client of a worker. addresses: of the servers; only server 0's is used. folders: unused."""
    return NeighbourClient(config, facts, worker, addresses[0], secret)


class NeighbourClient:
    """A worker's part in an exchange among neighbours; implements trainer.worker.clients.base.Client.

    Args:
        config, facts: the run.
        worker: number of the worker.
        leader: address of server 0.
        secret: the token of the run.
    """

    def __init__(self, config: Config, facts: RunFacts, worker: int, leader: str, secret: Secret) -> None:
        self.worker = worker
        self.process = random_numbers.randbits(62)
        self.pushed: Vector = np.zeros(facts.elements, np.float32)
        self.pulled: Vector = np.zeros(facts.elements, np.float32)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Models travel as messages: one in shared memory could not change while a slower neighbour still needs it.
        self.mesh = Mesh(self.context, worker, leader, secret, facts.elements, use_memory=False)
        self.replica = NeighbourReplica(config, facts, worker, self.process, self.pulled, self.pushed, self.mesh)
        self.agreement = Agreement.from_config(config, facts)
        self.link = LeaderLink(self.context, leader, secret, self.agreement, self._beat)
        self._poller = zmq.Poller()
        for source in (self.link.socket, self.mesh.inbox):
            self._poller.register(source, zmq.POLLIN)
        self._has_finished = False
        self._sent_copies: dict[int, float] = {}  # when the model of a version was sent to server 0
        self._reported = (0, -1)  # session and round of the last report
        self._last_request: tuple[PoolRequest | None, float] = (None, 0.0)  # the last request for a pool, and its time
        self._reported_at = self._watched_at = self._heard_at = 0.0

    # --- the interface of the worker's loop ---------------------------------------------------------------------------

    def join(self) -> Turn | None:
        return self._wait(joins=True)

    def exchange(self, turn: Turn, report: StepMeasurements) -> Turn | None:
        replica = self.replica
        if replica.session != turn.generation or replica.phase is not NeighbourPhase.TURN:
            raise MustRejoin
        replica.submit(report)
        following = self._wait(joins=False)
        self.mesh.note_round()
        return following

    def offer_examples(self, epoch: int, examples: Examples) -> None:
        """Send examples for all other workers to server 0, without waiting. They count with the present round.

        epoch: of this worker, by whose losses they were selected."""
        self.link.send(self.replica.give_examples(epoch, examples), pack_examples(examples))

    def poll_cancelled(self, turn: Turn) -> bool:
        """Return False: every gradient is used, so no step is cancelled."""
        return False

    def give_up(self, turn: Turn, report: StepMeasurements) -> Turn | None:
        raise AssertionError("no step is cancelled")

    def close(self) -> None:
        self.link.close()
        close(self.context)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, *, joins: bool) -> Turn | None:
        """Handle messages until the next turn is due, and return it; None at the end.

        joins: whether to ask to join if the worker is no member; otherwise MustRejoin is raised."""
        due = 0.0
        replica = self.replica
        while not self._has_finished:
            kick()
            now = time.monotonic()
            # A worker without neighbours completes its rounds alone, and must still hear server 0.
            if now - self._heard_at >= WATCH_S:
                self._hear(0, now)
            if replica.phase is NeighbourPhase.OUTSIDE and not joins:
                raise MustRejoin
            if replica.phase in (NeighbourPhase.OUTSIDE, NeighbourPhase.COPYING) and now >= due:
                due = now + RESEND_S
                self.link.send(replica.joining(), self.agreement.introduction(**self.mesh.introduction()), b"")
            self._report(now)
            self._ask_for_pool(now)
            if replica.phase is NeighbourPhase.TURN and not replica.must_wait:
                place = replica.round, replica.round, replica.session
                return Turn(*place, replica.missed_from, replica.next_pool())
            self._look_at_connections(now)
            before = replica.number
            self._hear(50, now)
            if replica.number > before:
                due = 0.0
        return None

    def _hear(self, wait_ms: int, now: float) -> None:
        """Handle the messages that arrive within ``wait_ms``."""
        self._heard_at = now
        self._poller.poll(wait_ms)
        for message, bodies in self.mesh.receive():
            self.replica.handle(message, bodies)
        for message, bodies in self.link.receive(self.process):
            self._obey(message, bodies)

    def _obey(self, message: Message, bodies: tuple[Body, ...]) -> None:
        match message:
            case RunEnd():
                self._has_finished = True
            case ModelCopy():
                self.replica.take(message, bodies)
            case GossipPool():
                self.replica.take_pool(message, unpack_examples(bodies[0]))
            case _:
                self.replica.obey(message, bodies[0])

    # --- messages to server 0 -----------------------------------------------------------------------------------------

    def _report(self, now: float) -> None:
        """Send server 0 new models for checkpoints, and the rounds that it does not have.

        Rounds are reported every REPORT_S seconds, and at once if the worker waits or has ended."""
        replica = self.replica
        is_new = (replica.session, replica.round) != self._reported
        is_due = now - self._reported_at >= (REPORT_S if is_new else RESEND_S)
        waits = is_new and (replica.must_wait or replica.phase in (NeighbourPhase.BLOCKED, NeighbourPhase.TRAINED))
        # Models first: server 0 completes a round only with the models that belong to it.
        for version in replica.copies:
            if now - self._sent_copies.get(version, -RESEND_COPY_S) >= RESEND_COPY_S:
                self._sent_copies[version] = now
                self.link.send(*replica.copy_of(version))
        self._sent_copies = {version: at for version, at in self._sent_copies.items() if version in replica.copies}
        if (is_due or waits) and (report := replica.report()):
            self._reported_at = now
            self._reported = (replica.session, replica.round)
            self.link.send(report[0], b"", report[1])

    def _ask_for_pool(self, now: float) -> None:
        """Ask server 0 for examples of others that are missing, again if they were lost."""
        request = self.replica.wanted_pool()
        if request and (request != self._last_request[0] or now - self._last_request[1] >= RESEND_S):
            self._last_request = request, now
            self.link.send(request)

    def _look_at_connections(self, now: float) -> None:
        """Send the last models again after a connection to a neighbour broke. Raises JobError if one is unreachable."""
        if now - self._watched_at < WATCH_S:
            return
        self._watched_at = now
        # Report at once: server 0 can answer over a new connection only after a first message.
        if self.link.watch.has_broken():  # raises UsageError for a wrong token
            self._reported_at = 0.0
            self._sent_copies = {}
        if self.mesh.has_broken():
            self.replica.repeat()
        self.mesh.check_reachable()

    def _beat(self) -> PeerBeat:
        """Return this worker's heartbeat; called by a thread."""
        return PeerBeat(self.worker, self.process, self.replica.number)
