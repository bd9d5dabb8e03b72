"""The client of the parameter servers in a worker: joins, pushes gradients, and waits for new parameters."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import zmq

from pipeline.core.errors import JobError
from trainer.config import Facts, slice_bounds
from trainer.coordination.orders import Measured
from trainer.transport.agreement import Agreement
from trainer.transport.messages import IN_MEMORY, Header, Malformed, Op, unpack
from trainer.transport.shared_memory import WorkerMemory
from trainer.transport.sockets import Secret, Watch, connect, dealer, offer
from trainer.watchdog import kick

RESEND_S = 1.0
HEARTBEAT_S = 1.0


class MustRejoin(Exception):
    """The servers have dropped this worker or rolled back, so its current step is void and it must join again."""


@dataclass(frozen=True)
class Turn:
    """The next step: mini-batch ``clock``, with the parameters of ``version``, which are in the client's ``pulled``."""

    clock: int
    version: int
    generation: int


class ServerClient:
    """A worker's connection to all servers.

    The worker fills ``pushed`` before it calls ``push``, and reads ``pulled`` afterwards; during the call both belong to
    the servers.

    Attributes:
        pushed, pulled: float32 [P + Q], parameters, then BatchNorm's statistics; in shared memory where servers have it.
    """

    def __init__(
        self,
        agreement: Agreement,
        facts: Facts,
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
        self.memory = _memory(facts.elements) if use_memory else None
        self.pushed: npt.NDArray[np.float32] = (
            self.memory.pushed if self.memory else np.zeros(facts.elements, np.float32)
        )
        self.pulled: npt.NDArray[np.float32] = (
            self.memory.pulled if self.memory else np.zeros(facts.elements, np.float32)
        )
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets = [dealer(self.context, address, secret) for address in addresses]
        self.watches = [Watch(socket) for socket in self.sockets]
        for socket, address in zip(self.sockets, addresses, strict=True):
            socket.connect(address)
        self.session = 0
        self.in_memory = [False] * len(addresses)
        self._takes_part = False
        self._outdated = threading.Event()
        self._closing = threading.Event()
        self._beats = threading.Thread(target=self._beat, args=(secret,), name="heartbeat", daemon=True)
        self._beats.start()

    def join(self) -> Turn | None:
        """Join the run; blocks until all servers have answered. Returns None if there is nothing left to do.

        Raises UsageError if the token or the configuration is not the run's."""
        while True:
            self.session = max(self.session + 1, time.time_ns())
            self._takes_part = False
            self._outdated.clear()
            self.in_memory = [False] * len(self.sockets)
            try:
                turn = self._wait(self._send_join)
            except MustRejoin:
                continue
            self._takes_part = True
            return turn

    def push(self, turn: Turn, measured: Measured) -> Turn | None:
        """Push the gradient in ``pushed`` and wait for the next turn, or None at the end. Raises MustRejoin."""
        header = self._header(Op.PUSH, turn, measured)
        in_memory = replace(header, flags=IN_MEMORY).pack()
        for index, socket in enumerate(self.sockets):
            begin, end = self.bounds[index]
            if self.in_memory[index]:
                sent = offer(socket, in_memory, b"")
            else:
                sent = offer(socket, header.pack(), self.pushed[begin:end].data.cast("B"), copy=False)
            if not sent:
                raise MustRejoin
        return self._wait(None)

    def is_cancelled(self, turn: Turn) -> bool:
        """Return whether server 0 has cancelled this turn or ended the session. Cheap if there is no message."""
        while self.sockets[0].poll(0):
            header = unpack(self.sockets[0].recv_multipart(copy=False)[0].buffer)
            if header.session == self.session and header.op is Op.REJOIN:
                self._outdated.set()
            if header.session == self.session and (header.op is Op.REJOIN or header.clock == turn.clock):
                return True
        return False

    def give_up(self, turn: Turn, measured: Measured) -> Turn | None:
        """Report that the step of this turn was given up, and wait for the next turn, as ``push`` does."""
        if self._outdated.is_set() or not offer(self.sockets[0], self._header(Op.GIVE_UP, turn, measured).pack(), b""):
            raise MustRejoin
        return self._wait(None)

    def _header(self, op: Op, turn: Turn, measured: Measured) -> Header:
        return Header(
            op,
            0,
            self.worker,
            self.session,
            turn.generation,
            turn.clock,
            turn.version,
            measured.examples,
            measured.correct,
            measured.loss,
            measured.seconds,
            measured.read_s,
            *(measured.seen or ()),
        )

    def close(self) -> None:
        """Close all sockets."""
        self._closing.set()
        self._beats.join()
        self.context.destroy(linger=0)  # also closes the sockets of the monitors

    def _send_join(self) -> None:
        body = self.agreement.introduction(**(self.memory.handle() if self.memory else {}))
        for socket in self.sockets:
            offer(socket, Header(Op.JOIN, 0, self.worker, self.session).pack(), body)

    def _wait(self, resend: Callable[[], None] | None) -> Turn | None:
        poller = zmq.Poller()
        for socket in [*self.sockets, *(watch.monitor for watch in self.watches)]:
            poller.register(socket, zmq.POLLIN)
        answers: dict[int, Header] = {}
        due = 0.0
        while len(answers) < len(self.sockets):
            kick()
            if resend and time.monotonic() >= due:
                resend()
                due = time.monotonic() + RESEND_S
            ready = dict(poller.poll(200))
            for index, socket in enumerate(self.sockets):
                if socket in ready and (header := self._receive(index)):
                    answers[index] = header
            # An answer may be lost with a broken connection, and servers see the next connection as another peer.
            broken = [watch.has_broken() for watch in self.watches]
            if not resend and (any(broken) or self._outdated.is_set()):
                raise MustRejoin
        return self._turn(list(answers.values()))

    def _receive(self, index: int) -> Header | None:
        """Receive a server's answer and copy its elements into ``pulled``; None for an answer to an earlier session."""
        head, body = self.sockets[index].recv_multipart(copy=False)
        header = unpack(head.buffer)
        if header.session != self.session:
            return None
        if header.op is Op.REFUSED:
            raise self.agreement.refused(body.buffer)
        if header.op is Op.CANCEL:  # of a step that is pushed by now
            return None
        if header.op is Op.REJOIN:
            self.session = max(self.session, header.version)
            raise MustRejoin
        if header.op is Op.PARAMETERS:
            self.in_memory[index] = bool(header.flags & IN_MEMORY)
            if not self.in_memory[index]:
                begin, end = self.bounds[index]
                if len(body.buffer) != 4 * (end - begin):
                    raise JobError(
                        f"{self.addresses[index]} answers with {len(body.buffer)} bytes: another run's server"
                    )
                self.pulled[begin:end] = np.frombuffer(body.buffer, np.float32)
        return header

    def _turn(self, answers: list[Header]) -> Turn | None:
        turns = {(header.clock, header.version, header.generation) for header in answers}
        if len(turns) > 1:
            raise MustRejoin  # the servers rolled back between two answers
        if any(header.op is Op.STOP for header in answers):
            return None
        return Turn(*turns.pop())

    def _beat(self, secret: Secret) -> None:
        """Send heartbeats from a separate thread, because a step may take longer than the servers' timeout.

        A heartbeat can overtake the join request, and is then answered with REJOIN like one of a stranger. Each heartbeat
        therefore carries, as its clock, whether this session has joined, and the answer repeats it: only a REJOIN for a
        joined session means that the worker was lost."""
        socket = connect(self.context, self.addresses[0], secret)
        while not self._closing.wait(HEARTBEAT_S):
            offer(socket, Header(Op.HEARTBEAT, 0, self.worker, self.session, clock=int(self._takes_part)).pack(), b"")
            while socket.poll(0):
                try:
                    header = unpack(socket.recv_multipart()[0])
                except Malformed:
                    continue
                if header.op is Op.REJOIN and header.session == self.session and header.clock:
                    self._outdated.set()
        socket.close()


def _memory(elements: int) -> WorkerMemory | None:
    try:
        return WorkerMemory(elements)
    except OSError:
        return None
