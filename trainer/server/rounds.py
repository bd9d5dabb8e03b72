"""The process of server 0 in an exchange without servers: it has no parameters, and leads the workers' rounds."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import zmq

from trainer.config import Config, RunFacts
from trainer.exchange.neighbours import NeighbourExchange
from trainer.leader.background import Background
from trainer.leader.neighbours import NeighbourLeader
from trainer.leader.rounds import RoundsLeader
from trainer.leader.status import with_log
from trainer.leader.worker_messages import FromWorker
from trainer.server.endpoint import Endpoint
from trainer.transport.agreement import Agreement
from trainer.transport.bodies.examples import most_examples_bytes
from trainer.transport.bodies.json_object import pack_json, unpack_json
from trainer.transport.malformed import MalformedMessageError
from trainer.transport.messages.heads import Message, pack, unpack_frames
from trainer.transport.messages.peers import PeerBeat, PeerJoin, Replacement
from trainer.transport.messages.servers import ChangeStage, Heartbeat, Hello, Join
from trainer.transport.messages.supervisors import AskStatus, End, EndReply, Refusal, StatusReply, WorkerLoss
from trainer.transport.sockets import serve
from trainer.transport.status import RunStatus
from trainer.watchdog import kick

logger = logging.getLogger(__name__)

INTRODUCED = (PeerJoin, AskStatus, WorkerLoss, End)  # their body is an introduction
TICK_S = 0.2
LINGER_MS = 500  # for the last answers of a server that hands over to another one
BODY_BYTES = 64 << 20  # of the reports of many rounds


class RoundsServer:
    """Server 0 of an exchange without servers: polls one socket, and writes states of checkpoints in a thread.

    Args:
        config, facts: the run.
        endpoint: the place of server 0; other servers have no part in the exchange.
    Raises:
        UsageError: the address is taken.
    """

    def __init__(self, config: Config, facts: RunFacts, endpoint: Endpoint) -> None:
        self.facts = facts
        self.agreement = Agreement.from_config(config, facts)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        body_bytes = max(BODY_BYTES, 4 * facts.elements, most_examples_bytes(config.data.gossip))
        self.socket = serve(self.context, endpoint.address, endpoint.secret, body_bytes, endpoint.listener)
        self.background = Background()
        self.work = endpoint.folders.work
        self.identities: dict[int, bytes] = {}  # connections of workers, as addresses of messages
        # All workers share the model of the run, or each has one of its own.
        leads = NeighbourLeader if isinstance(config.exchange, NeighbourExchange) else RoundsLeader
        self.leader: RoundsLeader | NeighbourLeader = leads(
            config, facts, endpoint.folders, self.send, lambda: time.time_ns() // 1000, work=self.background
        )
        self.leader.module = __name__
        self.malformed = 0

    def run(self) -> str:
        """Serve until the process is ended. Raises DataError if there is no sound checkpoint.

        Returns, with the module of the next server, only if the run enters a stage with other servers."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.background, zmq.POLLIN)
        self.leader.begin_generation()
        self.leader.regroup(time.monotonic())
        due = 0.0
        while not self.leader.has_handed_over:
            kick()
            for ready, _ in poller.poll(int(TICK_S * 1000)):
                if isinstance(ready, zmq.Socket):
                    self._drain()
                else:
                    self.background.collect()
            # By the clock, because under load ``poll`` returns at once and there would be a tick per message.
            now = time.monotonic()
            if now >= due:
                due = now + TICK_S
                self.leader.tick(now)
        for worker in self.identities:  # a worker that misses it gets it from the next server
            self.send(worker, ChangeStage(self.leader.stage.number), b"")
        return self.leader.stage.config.exchange.server

    def close(self) -> None:
        """Stop listening, so that another server can take the address."""
        self.socket.close(LINGER_MS)

    def send(self, worker: int, message: Message, *bodies: bytes) -> None:
        if worker in self.identities:
            self._answer(self.identities[worker], message, *bodies)

    def _answer(self, identity: bytes, message: Message, *bodies: bytes) -> None:
        self.socket.send_multipart([identity, pack(message), *(bodies or (b"",))], copy=False)

    def _drain(self, most: int = 64) -> None:
        """Handle up to ``most`` waiting messages. Malformed ones are counted, logged and dropped."""
        for _ in range(most):
            try:
                frames = [frame.buffer for frame in self.socket.recv_multipart(zmq.NOBLOCK, copy=False)]
            except zmq.Again:
                return
            try:  # a peer of another version must not end the run
                message, bodies = unpack_frames(frames[1:])
                self._receive(bytes(frames[0]), message, bodies[0], bodies[-1])
            except MalformedMessageError as error:
                self.malformed += 1
                logger.warning(f"dropped a malformed message: {error}")

    def _receive(self, identity: bytes, message: Message, first: memoryview, last: memoryview) -> None:
        """Handle a message of a worker or a supervisor. Raises MalformedMessageError.

        Args:
            identity: the sender's connection, to which the reply goes.
            message: the unpacked head.
            first: the first body; an introduction if the message is of a type in INTRODUCED.
            last: the last body; the same as ``first`` if the message has only one.
        """
        # Before anything else: a host of another configuration would train another model.
        if isinstance(message, INTRODUCED) and not self.agreement.admits(unpack_json(first)):
            return self._answer(identity, Refusal(0), self.agreement.refusal())
        now = time.monotonic()
        match message:
            case _ if isinstance(message, FromWorker):
                self._hear(identity, message, first, last, now)
            case AskStatus():
                self._answer(identity, StatusReply(), pack_json(self._status(now).to_json()))
            case Join() | Heartbeat():  # a worker of another stage, which has servers of parameters
                self._answer(identity, ChangeStage(self.leader.stage.number))
            case Hello():
                pass  # from another server, which has no part in this stage
            case WorkerLoss():
                self.leader.lost(self._worker(message.worker), now)
            case End():
                self._answer(identity, EndReply(), pack_json(self._status(now).to_json()))
                self.leader.end(now)
            case _:
                raise MalformedMessageError(f"{type(message).__name__} to server 0")
        return None

    def _hear(self, identity: bytes, message: FromWorker, first: memoryview, last: memoryview, now: float) -> None:
        """Handle a message of a worker, unless a later process has replaced it. Raises MalformedMessageError."""
        worker = self._worker(message.worker)
        if self.leader.processes.is_replaced(worker, message.process):
            return self._answer(identity, Replacement(message.process))
        if not isinstance(message, PeerBeat):  # heartbeats have a connection of their own
            self.identities[worker] = identity
        if answer := self.leader.hear(message, first, last, now):
            self._answer(identity, *answer)
        return None

    def _status(self, now: float) -> RunStatus:
        """Return the leader's status, with the malformed messages and the reason for a missing checkpoint or log."""
        status = replace(self.leader.status(now), malformed=self.malformed, trouble=self.leader.trouble(now))
        return with_log(status, self.work)

    def _worker(self, index: int) -> int:
        """Return a worker's index. Raises MalformedMessageError if there is no such worker."""
        if index >= self.facts.num_workers:
            raise MalformedMessageError(f"worker {index}")
        return index


open_server = RoundsServer  # for trainer.server.stages


def main(config: Config, facts: RunFacts, endpoint: Endpoint) -> None:
    """Run server 0; never returns. See ``RoundsServer`` for the arguments. Raises UsageError if the address is taken."""
    RoundsServer(config, facts, endpoint).run()
