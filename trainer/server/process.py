"""A server's process: one thread serves a socket for all peers, another one writes checkpoints.

Servers other than server 0 also have a connection to server 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import zmq

from trainer.checkpoints.write import WriteOutcome
from trainer.config import Config, RunFacts, slice_bounds
from trainer.coordination.orders import Order, StepMeasurements
from trainer.gossip.rounds import EMPTY, Pool
from trainer.leader.background import Background
from trainer.leader.leader import Follower, Leader
from trainer.leader.status import with_log
from trainer.server.endpoint import Endpoint
from trainer.server.slice_server import SliceServer
from trainer.transport.agreement import Agreement
from trainer.transport.bodies.examples import most_examples_bytes, pack_examples, unpack_examples
from trainer.transport.bodies.json_object import pack_json, unpack_json
from trainer.transport.bodies.reports import most_report_bytes, unpack_report, unpack_report_at
from trainer.transport.malformed import MalformedMessageError
from trainer.transport.messages.gossip import GossipOffer, GossipPool
from trainer.transport.messages.heads import Message, pack, unpack_at, unpack_frames
from trainer.transport.messages.peers import PeerBeat, PeerJoin
from trainer.transport.messages.servers import (
    ChangeStage,
    Execute,
    GiveUp,
    GradientReceipt,
    Heartbeat,
    Hello,
    Join,
    JoinReceipt,
    Load,
    LoadReceipt,
    Push,
    Rejoin,
    WriteReceipt,
)
from trainer.transport.messages.supervisors import AskStatus, End, EndReply, Refusal, StatusReply, WorkerLoss
from trainer.transport.pipes import MessagePipe, open_pipes
from trainer.transport.sockets import connect, offer, serve
from trainer.transport.status import RunStatus
from trainer.watchdog import kick

logger = logging.getLogger(__name__)

INTRODUCED = (Join, Hello, AskStatus, WorkerLoss, End)  # their body is an introduction
TICK_S = 0.2
HELLO_S = 1.0
LINGER_MS = 500  # for the last answers of a server that hands over to another one
Frames = list[memoryview]


class Server:
    """A server of parameters: one thread polls its sockets, another one writes checkpoints.

    Server 0 also runs the leader, which decides on orders. The other servers report to server 0 which join requests and
    gradients they have, and execute the orders that server 0 sends.

    Args:
        config, facts: the run.
        endpoint: the place of this server.
    Raises:
        UsageError: the address is taken.
    """

    def __init__(self, config: Config, facts: RunFacts, endpoint: Endpoint) -> None:
        index = self.index = endpoint.index
        self.folders = endpoint.folders
        self.session = time.time_ns()
        self.agreement = Agreement.from_config(config, facts)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        begin, end = slice_bounds(facts.elements, config.processes.servers)[index]
        # The slice in float32, the report of a step, or the examples of a worker.
        body_bytes = max(4 * (end - begin), most_report_bytes(config.reported_rows(facts.rows)))
        body_bytes = max(body_bytes, most_examples_bytes(config.data.gossip))
        self.socket = serve(self.context, endpoint.address, endpoint.secret, body_bytes, endpoint.listener)
        self.to_leader = connect(self.context, endpoint.addresses[0], endpoint.secret) if index else None
        self.background = Background()
        # A pipe could overtake the examples, which must arrive before the parameters that are computed with them.
        pipes = open_pipes(0 if config.data.gossip else 1)
        self.pipe = pipes[0] if pipes else None
        self.slice_server = SliceServer(
            config, facts, index, self.folders.checkpoints, self.send, self.background, self._wrote, self.pipe
        )
        self._unsent_receipts: list[WriteReceipt] = []  # for server 0, in order
        self._packed = EMPTY, pack_examples(EMPTY)  # the newest examples of a pool, and the body with them
        self.leader = None if index else self._make_leader()
        self.malformed = 0

    def _make_leader(self) -> Leader:
        """Return the leader, which sends its orders through this server."""
        config = self.slice_server.config
        facts = self.slice_server.facts
        leader = Leader(
            config,
            facts,
            self.folders,
            self.send_order,
            self.send_load,
            self.slice_server.parameters,
            work=self.background,
            send_pool=self._send_pool,
        )
        # Of a run whose next stage has other servers, these take over.
        leader.module = __name__
        return leader

    def run(self) -> str:
        """Serve until the process is ended: handle messages and finished background work, and tick from time to time.

        Returns, with the module of the next server, only if the run enters a stage with other servers.
        Raises UsageError if server 0 refuses this host, RuntimeError if an order was lost, DataError for a damaged
        checkpoint, and JobError if there is no complete one."""
        poller = zmq.Poller()
        sockets = [socket for socket in (self.socket, self.to_leader) if socket]
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        poller.register(self.background, zmq.POLLIN)
        if self.pipe:
            poller.register(self.pipe, zmq.POLLIN)
        # With a single server there is no follower whose hello would start the run.
        if self.leader:
            self.leader.begin_generation()
        due = 0.0
        while not (self.leader and self.leader.has_handed_over):
            kick()
            for ready, _ in poller.poll(int(TICK_S * 1000)):
                if isinstance(ready, zmq.Socket):
                    self._drain(ready)
                elif self.pipe and ready == self.pipe.fileno():
                    self._empty(self.pipe)
                else:
                    self.background.collect()
            # By the clock, because under load ``poll`` returns at once and there would be a tick per message.
            now = time.monotonic()
            if now >= due:
                due = now + (TICK_S if self.leader else HELLO_S)
                self._tick(now)
        return self.leader.stage.config.exchange.server

    def close(self) -> None:
        """Stop listening, so that another server can take the address."""
        self.socket.close(LINGER_MS)

    def send(self, identity: bytes, message: Message, body: bytes | None) -> None:
        self.socket.send_multipart([identity, pack(message), body or b""], copy=False)

    def send_order(self, followers: Sequence[Follower], order: Order) -> None:
        """Send an order to the followers, then execute it here, so that all servers work at the same time."""
        if followers:
            body = pack_json(order.to_json())
            message = Execute(self.slice_server.generation)
            for follower in followers:
                self.send(follower.identity, message, body)
        self.slice_server.execute(order)

    def _send_pool(self, worker: int, session: int, pool: Pool) -> None:
        """Send a worker the examples of others; dropped if it has joined again meanwhile, and gets them then."""
        peer = self.slice_server.peers.get(worker)
        if peer and peer.session == session:
            # One body for the pools of a round: with one per worker, server 0 would copy its images once per worker.
            if self._packed[0] is not pool.examples:
                self._packed = pool.examples, pack_examples(pool.examples)
            own = pool.own_begin, pool.own_end
            message = GossipPool(worker, session, pool.round, pool.clock, pool.first, *own)
            self.send(peer.identity, message, self._packed[1])

    def send_load(self, followers: Sequence[Follower], generation: int, version: int, stage: int) -> None:
        """Have the given followers and this server load a checkpoint, and start a generation with it."""
        for follower in followers:
            self.send(follower.identity, Load(generation, version, stage), None)
        self.slice_server.load(generation, version, stage)
        assert self.leader
        self.leader.loaded(0, generation, time.monotonic())

    def _tick(self, now: float) -> None:
        """Do the periodic work: the leader's tick on server 0, an introduction and unsent receipts on other servers.

        The introduction is repeated because a restarted server 0 knows no other server."""
        if self.leader:
            self.leader.tick(now)
        else:
            self._tell_leader(Hello(self.index, self.session), self.agreement.introduction())
            self._send_receipts()

    def _tell_leader(self, message: Message, body: bytes = b"") -> bool:
        """Send a message to server 0. Returns False if server 0 does not read its messages."""
        assert self.to_leader
        return offer(self.to_leader, pack(message), body)

    def _wrote(self, generation: int, sequence: int, outcome: WriteOutcome) -> None:
        """Report that this server's slice of a checkpoint is written, or was not: to the leader here, or to server 0.

        sequence: number of the order that asked for the checkpoint."""
        if self.slice_server.trouble:
            logger.warning(self.slice_server.trouble)
        if self.leader:
            self.leader.wrote(0, generation, sequence, outcome)
        else:
            self._unsent_receipts.append(WriteReceipt(self.index, generation, sequence, int(outcome)))
            self._send_receipts()

    def _send_receipts(self) -> None:
        """Send the unsent receipts in order, and keep the rest if server 0 does not read."""
        while self._unsent_receipts and self._tell_leader(self._unsent_receipts[0]):
            self._unsent_receipts.pop(0)

    def _drain(self, socket: zmq.Socket[bytes], most: int = 64) -> None:
        """Handle up to ``most`` waiting messages of a socket; the limit lets ``run`` do its other work in between.

        Malformed messages are counted, logged and dropped."""
        for _ in range(most):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                self._receive([frame.buffer for frame in frames], from_leader=socket is self.to_leader)
            except MalformedMessageError as error:
                self._drop(error)

    def _empty(self, pipe: MessagePipe) -> None:
        """Handle all pushes in the pipe. After a malformed one nobody can tell where the next one begins.

        All workers must then join again, because their pushes may be in the rest."""
        data = pipe.read()
        at = 0
        try:
            while at < len(data):
                message, at = unpack_at(data, at)
                report, at = unpack_report_at(data, at)
                if not isinstance(message, Push):
                    raise MalformedMessageError(f"{type(message).__name__} in a pipe")
                # A worker that is no peer any more was told so by its socket.
                if peer := self.slice_server.peers.get(message.worker):
                    self._push(peer.identity, message, report, memoryview(b""))
        except MalformedMessageError as error:
            self._drop(error)
            for worker, peer in self.slice_server.peers.items():
                self.send(peer.identity, Rejoin(worker, peer.session), None)

    def _drop(self, error: MalformedMessageError) -> None:
        self.malformed += 1
        logger.warning(f"dropped a malformed message: {error}")

    def _receive(self, frames: Frames, *, from_leader: bool) -> None:
        """Parse one message and pass it on. Raises MalformedMessageError.

        frames: the head and the bodies; the identity of the sender comes first, except in messages of server 0."""
        message, bodies = unpack_frames(frames if from_leader else frames[1:])
        if from_leader:
            self._follow(message, bodies[0])
        else:
            self._serve(bytes(frames[0]), message, bodies[0], bodies[-1])

    def _serve(self, identity: bytes, message: Message, first: memoryview, last: memoryview) -> None:
        """Handle a message of a worker, another server or a supervisor.

        Args:
            identity: the sender's connection, to which replies go.
            message: the head.
            first, last: the first and the last body. A Push and a PeerJoin have two; otherwise both are the same.
        Raises:
            MalformedMessageError: the message is invalid, or only server 0 may get it.
        """
        # Before anything else: a host of another configuration would train another model.
        if isinstance(message, INTRODUCED) and not self._is_introduced(identity, message, first):
            return
        now = time.monotonic()
        match message:
            case Join():
                self.slice_server.join(identity, message, first)
                if self.leader:
                    self.leader.joined(0, message.worker, message.session, now)
                else:
                    receipt = JoinReceipt(self.index, self.slice_server.generation, message.worker, message.session)
                    self._tell_leader(receipt)
            case Push():
                self._push(identity, message, unpack_report(first), last)
            case _ if self.leader:
                self._lead(self.leader, identity, message, first, now)
            case _:
                raise MalformedMessageError(f"{type(message).__name__} to server {self.index}")

    def _is_introduced(self, identity: bytes, message: Message, body: memoryview) -> bool:
        """Return whether the introduction in ``body`` comes from a host that agrees about the run.

        If not, server 0 replies with a refusal. Another server only ignores the message, because its own host may be
        the one that differs. Raises MalformedMessageError if ``body`` is no introduction."""
        if self.agreement.admits(unpack_json(body)):
            return True
        if self.leader:
            self.send(identity, Refusal(getattr(message, "session", 0)), self.agreement.refusal())
        return False

    def _push(self, identity: bytes, message: Push, report: StepMeasurements, gradient: memoryview) -> None:
        """Store a gradient, and report it: to the leader here, or to server 0 in a receipt.

        If the leader did not expect the gradient, the worker is told to join again. Raises MalformedMessageError.

        Args:
            identity: the worker's connection.
            message: the head.
            report: the worker's measurements of its step, which only the leader uses.
            gradient: the second body.
        """
        if not self.slice_server.push(identity, message, gradient):
            return
        worker = message.worker
        session = message.session
        if not self.leader:
            generation = self.slice_server.generation
            self._tell_leader(GradientReceipt(self.index, generation, worker, session, message.clock))
        elif not self.leader.pushed(0, worker, session, message.clock, time.monotonic(), report):
            self.send(identity, Rejoin(worker, session), None)

    def _lead(self, leader: Leader, identity: bytes, message: Message, body: memoryview, now: float) -> None:
        """Handle a message that only server 0 may get. Raises MalformedMessageError.

        body: the first body of the message."""
        match message:
            case Hello():
                leader.hello(identity, self._server(message.server), message.session)
            case LoadReceipt():
                leader.loaded(self._server(message.server), message.generation, now)
            case JoinReceipt() | GradientReceipt():
                self._held(leader, message, now)
            case WriteReceipt():
                if message.outcome not in set(WriteOutcome):
                    raise MalformedMessageError(str(message))
                outcome = WriteOutcome(message.outcome)
                leader.wrote(self._server(message.server), message.generation, message.order, outcome)
            # A worker that is no member, or whose step is not the current one, is told to join again.
            case Heartbeat():
                if not leader.alive(self._worker(message.worker), message.session, now):
                    self.send(identity, Rejoin(message.worker, message.session, joined=message.joined), None)
            case GiveUp():
                worker = self._worker(message.worker)
                if not leader.gave_up(worker, message.session, message.clock, now, unpack_report(body)):
                    self.send(identity, Rejoin(worker, message.session), None)
            case GossipOffer():
                worker = self._worker(message.worker)
                leader.offered(worker, message.session, message.epoch, now, unpack_examples(body))
            case AskStatus():
                self.send(identity, StatusReply(), pack_json(self._status(leader, now).to_json()))
            case WorkerLoss():
                leader.lost(self._worker(message.worker), now)
            case End():
                self.send(identity, EndReply(), pack_json(self._status(leader, now).to_json()))
                leader.end(now)
            case PeerJoin() | PeerBeat():  # of a worker in the previous stage, without parameter servers
                self.send(identity, ChangeStage(leader.stage.number), None)
            case _:
                raise MalformedMessageError(f"{type(message).__name__} to server 0")

    def _held(self, leader: Leader, message: JoinReceipt | GradientReceipt, now: float) -> None:
        """Tell the leader that another server has a join request or a gradient; ignore earlier generations.

        Raises MalformedMessageError."""
        server = self._server(message.server)
        worker = self._worker(message.worker)
        if message.generation != self.slice_server.generation:
            return
        if isinstance(message, JoinReceipt):
            leader.joined(server, worker, message.session, now)
        else:
            leader.pushed(server, worker, message.session, message.clock, now)

    def _status(self, leader: Leader, now: float) -> RunStatus:
        """Return the leader's status, with the malformed messages and the reason for a missing checkpoint or log."""
        trouble = self.slice_server.trouble or leader.trouble(now)
        status = replace(leader.status(now), malformed=self.malformed, trouble=trouble)
        return with_log(status, self.folders.work)

    def _worker(self, index: int) -> int:
        """Return a worker's index. Raises MalformedMessageError if there is no such worker."""
        if index >= self.slice_server.facts.num_workers:
            raise MalformedMessageError(f"worker {index}")
        return index

    def _server(self, index: int) -> int:
        """Return the index of a server other than 0. Raises MalformedMessageError if there is none."""
        if not 0 < index < self.slice_server.config.processes.servers:
            raise MalformedMessageError(f"server {index}")
        return index

    def _follow(self, message: Message, body: memoryview) -> None:
        """Handle a message of server 0. Raises UsageError if server 0 refused this host, whose configuration differs.

        Orders of earlier generations are ignored."""
        match message:
            case Refusal():
                raise self.agreement.refused(body)
            case Load():
                if message.stage >= len(self.slice_server.stages):
                    raise MalformedMessageError(f"stage {message.stage}")
                self.slice_server.load(message.generation, message.version, message.stage)
                self._tell_leader(LoadReceipt(self.index, message.generation))
            case Execute(generation=self.slice_server.generation):
                self.slice_server.execute(_order(body))


def _order(body: memoryview) -> Order:
    """Parse an order. Raises MalformedMessageError."""
    try:
        return Order.from_json(unpack_json(body))
    except (TypeError, KeyError):
        raise MalformedMessageError("an order") from None


open_server = Server  # for trainer.server.stages


def main(config: Config, facts: RunFacts, endpoint: Endpoint) -> None:
    """Run one server; never returns. See ``Server`` for the arguments.

    Raises UsageError if the address is taken, or the host of server 0 has another configuration."""
    Server(config, facts, endpoint).run()
