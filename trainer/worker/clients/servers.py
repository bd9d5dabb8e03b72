"""The client of the parameter servers: pushes gradients to all servers, and waits for new parameters."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq

from pipeline.core.errors import JobError
from trainer.config import Config, RunFacts, slice_bounds
from trainer.coordination.orders import StepMeasurements
from trainer.gossip.rounds import Examples, Pool
from trainer.home.folders import Folders
from trainer.transport.agreement import Agreement
from trainer.transport.bodies.examples import pack_examples, unpack_examples
from trainer.transport.bodies.json_object import unpack_json
from trainer.transport.bodies.reports import pack_report
from trainer.transport.malformed import MalformedMessageError
from trainer.transport.messages.gossip import GossipOffer, GossipPool
from trainer.transport.messages.heads import pack, unpack, unpack_at
from trainer.transport.messages.servers import (
    Cancel,
    ChangeStage,
    GiveUp,
    Heartbeat,
    Join,
    Parameters,
    Push,
    Rejoin,
    Stop,
)
from trainer.transport.messages.supervisors import Refusal
from trainer.transport.pipes import MessagePipe, PipeWriter, open_pipe, open_pipes, pipe_key
from trainer.transport.shared_memory import share_memory
from trainer.transport.sockets import Secret, Watch, connect, dealer, offer
from trainer.watchdog import kick
from trainer.worker.clients.base import MustRejoin, StageSwitch, Turn, Vector

RESEND_S = 1.0
HEARTBEAT_S = 1.0

logger = logging.getLogger(__name__)


def open_client(
    config: Config, facts: RunFacts, worker: int, addresses: Sequence[str], secret: Secret, folders: Folders
) -> ServerClient:
    """Return the client of a worker. addresses: of the servers; folders: unused, as servers keep the model."""
    use_memory = config.processes.same_host == "memory"
    return ServerClient(
        Agreement.from_config(config, facts), facts, worker, list(addresses), secret, use_memory=use_memory
    )


class ServerClient:
    """A worker's connection to all servers; implements trainer.worker.clients.base.Client.

    Its vectors are in memory that it shares with the servers of its host, if there are any.

    Args:
        agreement: the values that all hosts of the run have in common.
        facts: the facts of the run.
        worker: number of the worker.
        addresses: of the servers, by their numbers.
        secret: the token of the run.
        use_memory: whether to offer shared memory to the servers.
    """

    def __init__(
        self,
        agreement: Agreement,
        facts: RunFacts,
        worker: int,
        addresses: list[str],
        secret: Secret,
        *,
        use_memory: bool,
    ) -> None:
        self.agreement = agreement
        self.worker = worker
        self.addresses = addresses
        self.bounds = slice_bounds(facts.elements, len(addresses))
        self.memory = share_memory(facts.elements) if use_memory else None
        self.pushed: Vector = self.memory.pushed if self.memory else np.zeros(facts.elements, np.float32)
        self.pulled: Vector = self.memory.pulled if self.memory else np.zeros(facts.elements, np.float32)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets = [dealer(self.context, address, secret) for address in addresses]
        # Before the sockets connect, or the first events of a connection may be missed.
        self.watches = [Watch(socket) for socket in self.sockets]
        for socket, address in zip(self.sockets, addresses, strict=True):
            socket.connect(address)
        # Of each server one, because answers do not say whose they are.
        self.pipes = open_pipes(len(addresses) if self.memory else 0)
        self.writers: list[PipeWriter | None] = [None] * len(addresses)
        self._poller = zmq.Poller()
        for source in [*self.sockets, *(watch.monitor for watch in self.watches), *self.pipes]:
            self._poller.register(source, zmq.POLLIN)
        self.session = 0
        self.in_memory = [False] * len(addresses)
        self._takes_part = False
        self._pool: Pool | None = None  # the examples of others, until the parameters of their step are here
        self._outdated = threading.Event()
        self._closing = threading.Event()
        # Last, because the thread reads the fields above.
        self._beats = threading.Thread(target=self._beat, args=(secret,), name="heartbeat", daemon=True)
        self._beats.start()

    def join(self) -> Turn | None:
        """Join the run; blocks until all servers have answered."""
        while True:
            self.session = max(self.session + 1, time.time_ns())
            self._takes_part = False
            self._outdated.clear()
            self.in_memory = [False] * len(self.sockets)
            # The first answer of each server brings the handle of its pipe.
            self.writers = [None] * len(self.sockets)
            self._pool = None
            try:
                turn = self._wait(self._send_join)
            except MustRejoin:
                continue
            self._takes_part = True
            return turn

    def exchange(self, turn: Turn, report: StepMeasurements) -> Turn | None:
        measured = pack_report(report)
        for index, socket in enumerate(self.sockets):
            begin, end = self.bounds[index]
            # A server on another host cannot open the shared memory, so each server has its own transport.
            in_memory = self.in_memory[index]
            head = pack(Push(self.worker, self.session, turn.generation, turn.clock, in_memory))
            writer = self.writers[index]
            if in_memory and writer and writer.offer(head + measured):
                continue
            if in_memory:
                is_sent = offer(socket, head, measured, b"")
            else:
                is_sent = offer(socket, head, measured, self.pushed[begin:end].data.cast("B"), copy=False)
            if not is_sent:
                raise MustRejoin
        return self._wait(None)

    def offer_examples(self, epoch: int, examples: Examples) -> None:
        """Send examples for all other workers to server 0, without waiting; a refused message is as good as lost.

        epoch: of this worker, by whose losses they were selected."""
        offer(self.sockets[0], pack(GossipOffer(self.worker, self.session, epoch)), pack_examples(examples))

    def poll_cancelled(self, turn: Turn) -> bool:
        """Return whether server 0 has cancelled the step of this turn, or ended the worker's session.

        Called between two micro-batches, so it reads only the messages that have arrived, and never waits. No answer is
        due while the worker computes, so all other messages are dropped."""
        while self.sockets[0].poll(0):
            message = unpack(self.sockets[0].recv_multipart(copy=False)[0].buffer)
            match message:
                case Rejoin(session=self.session):
                    # The message is consumed here; this event lets ``give_up`` raise MustRejoin.
                    self._outdated.set()
                    return True
                case Cancel(session=self.session, clock=turn.clock):
                    return True
        return False

    def give_up(self, turn: Turn, report: StepMeasurements) -> Turn | None:
        head = pack(GiveUp(self.worker, self.session, turn.clock))
        if self._outdated.is_set() or not offer(self.sockets[0], head, pack_report(report)):
            raise MustRejoin
        return self._wait(None)

    def close(self) -> None:
        self._closing.set()
        self._beats.join()
        self.context.destroy(linger=0)  # also closes the sockets of the monitors

    def _send_join(self) -> None:
        handles: dict[str, Any] = self.memory.handle() if self.memory else {}
        handles |= {pipe_key(index): pipe.handle() for index, pipe in enumerate(self.pipes)}
        body = self.agreement.introduction(**handles)
        for socket in self.sockets:
            offer(socket, pack(Join(self.worker, self.session)), body)

    def _wait(self, resend: Callable[[], None] | None) -> Turn | None:
        """Wait until all servers have answered, and return the next turn; None if nothing is left to do.

        resend: sends the request, now and every RESEND_S seconds; None if it is sent already and must not be repeated.
        In that case MustRejoin is raised if a connection broke or the session ended, since an answer may be lost.
        Raises UsageError if this host does not belong to the run."""
        answers: dict[int, Parameters | Stop] = {}
        due = 0.0
        while len(answers) < len(self.sockets):
            kick()
            if resend and time.monotonic() >= due:
                resend()
                due = time.monotonic() + RESEND_S
            ready = dict(self._poller.poll(200))
            for index, pipe in enumerate(self.pipes):
                if pipe.fileno() in ready and (answer := self._read(pipe)):
                    answers[index] = answer
            for index, socket in enumerate(self.sockets):
                if socket in ready and (answer := self._receive(index)):
                    answers[index] = answer
            # An answer may be lost with a broken connection, and servers see the next connection as another peer.
            connections_broken = [watch.has_broken() for watch in self.watches if watch.monitor in ready]
            if not resend and (any(connections_broken) or self._outdated.is_set()):
                raise MustRejoin
        return self._turn(list(answers.values()))

    def _read(self, pipe: MessagePipe) -> Parameters | Stop | None:
        """Return the answer to the current request in a server's pipe; None if there are only earlier ones."""
        answer: Parameters | None = None
        data = pipe.read()
        at = 0
        while at < len(data):
            message, at = unpack_at(data, at)
            if isinstance(message, Parameters) and message.session == self.session:
                answer = message
        return answer

    def _receive(self, index: int) -> Parameters | Stop | None:
        """Receive one message of a server. Copies parameters into ``pulled``, unless they are in shared memory.

        Returns the answer to the current request; None for other messages, such as answers to an earlier session.
        Raises UsageError if server 0 refuses this host, MustRejoin if the session has ended, StageSwitch if the run is
        in a stage without parameter servers."""
        head, body = self.sockets[index].recv_multipart(copy=False)
        match message := unpack(head.buffer):
            case Refusal(session=self.session):
                raise self.agreement.refused(body.buffer)
            case Rejoin(session=self.session):
                self.session = max(self.session, message.later_session)
                raise MustRejoin
            case Parameters(session=self.session):
                self.in_memory[index] = message.in_memory
                if not message.in_memory:
                    self._copy(index, body.buffer)
                elif len(body):
                    self.writers[index] = open_pipe(unpack_json(body.buffer))
                return message
            case GossipPool(session=self.session):
                examples = unpack_examples(body.buffer)
                own = message.own_begin, message.own_end
                self._pool = Pool(message.round, message.clock, message.first, examples, *own)
            case Stop(session=self.session):
                return message
            case ChangeStage():
                raise StageSwitch(message.stage)
        return None  # also the cancellation of a step that is pushed by now

    def _copy(self, index: int, body: memoryview) -> None:
        """Copy a server's part of the parameters into ``pulled``. Raises JobError if its size is not this run's."""
        begin, end = self.bounds[index]
        if len(body) != 4 * (end - begin):
            raise JobError(f"{self.addresses[index]} answers with {len(body)} bytes: another run's server")
        self.pulled[begin:end] = np.frombuffer(body, np.float32)

    def _turn(self, answers: list[Parameters | Stop]) -> Turn | None:
        """Return the turn on which all answers agree, None if it is Stop. Raises MustRejoin if they differ."""
        turns = {(answer.clock, answer.version, answer.generation) for answer in answers}
        if len(turns) > 1:
            raise MustRejoin  # the servers rolled back between two answers
        if any(isinstance(answer, Stop) for answer in answers):
            return None
        pool = self._pool
        self._pool = None
        return Turn(*turns.pop(), pool=pool)

    def _beat(self, secret: Secret) -> None:
        """Send heartbeats from a separate thread, because a step may take longer than the servers' timeout.

        A heartbeat can overtake the join request, and is then answered with Rejoin like one of a stranger. Each heartbeat
        therefore says whether this session has joined, and the answer repeats it: only a Rejoin of a joined session means
        that the worker was lost."""
        socket = connect(self.context, self.addresses[0], secret)
        while not self._closing.wait(HEARTBEAT_S):
            offer(socket, pack(Heartbeat(self.worker, self.session, self._takes_part)), b"")
            while socket.poll(0):
                try:
                    message = unpack(socket.recv_multipart()[0])
                except MalformedMessageError as error:
                    logger.warning(f"dropped a malformed message: {error}")
                    continue
                if isinstance(message, Rejoin) and message.session == self.session and message.joined:
                    self._outdated.set()
        socket.close()
