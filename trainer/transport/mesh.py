"""The connections among workers that exchange without servers: a ROUTER per worker, and a DEALER to every other worker.

Workers of one host also share memory. A worker writes only memory of its own: its gradient, and the sum of its range.
Each has a mark, the number of the view and the version of the parameters, which the worker clears before it writes. A
reader checks the mark before and after it reads, so that after a suspension it cannot use data of another round."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from pipeline.core.errors import JobError, UsageError
from trainer.transport.addresses import PRIVATE, bracketed, interface_towards
from trainer.transport.messages.heads import Body, Message, pack, unpack_frames
from trainer.transport.shared_memory import SharedVectors, open_memory, share_memory
from trainer.transport.sockets import Secret, Watch, dealer, offer, serve

Vector = npt.NDArray[np.float32]
logger = logging.getLogger(__name__)

UNREACHABLE_S = 30.0  # without a connection, after which another worker counts as unreachable
# Connections to another worker's process that broke, without a complete round in between.
MANY_LOSSES = 3  # after which the worker logs a warning
MOST_LOSSES = 5  # after which it ends, and is started again as often as --max-restarts allows
MARK = 4  # floats with the mark of a vector: two 64-bit numbers


def padded(elements: int) -> int:
    """Return the length of a shared vector with its mark, which must begin at a multiple of 8 bytes."""
    return elements + elements % 2 + MARK


class MarkedMemory:
    """The two vectors of a worker in shared memory, with their marks.

    Attributes:
        gradient: float32 [elements].
        range_sums: float32 [elements], of which the worker uses its own range.
    """

    def __init__(self, vectors: SharedVectors, elements: int) -> None:
        self.gradient = vectors.pushed[:elements]
        self.range_sums = vectors.pulled[:elements]
        self._gradient_mark = vectors.pushed[-MARK:].view(np.int64)
        self._sum_mark = vectors.pulled[-MARK:].view(np.int64)

    def offer_piece(self, number: int, version: int) -> None:
        self._gradient_mark[:] = (number, version)

    def offer_sum(self, number: int, version: int) -> None:
        self._sum_mark[:] = (number, version)

    def piece(self, number: int, version: int, begin: int, end: int) -> Vector | None:
        """Return a range of the gradient, or None if it is not the gradient of this view and version."""
        return self.gradient[begin:end] if tuple(self._gradient_mark) == (number, version) else None

    def range_sum(self, number: int, version: int, begin: int, end: int) -> Vector | None:
        """Return a range of the sum, or None if it is not the sum of this view and version."""
        return self.range_sums[begin:end] if tuple(self._sum_mark) == (number, version) else None


class Mesh:
    """A worker's connections to the other workers of its view; implements trainer.worker.replica_links.Links.

    Args:
        context: of the sockets.
        worker: number of the worker.
        leader: address of server 0.
        secret: the token of the run.
        elements: length of the flat vector.
        use_memory: whether to share memory with workers of this host.
        body_bytes: length of the largest body, if it is longer than the flat vector.

    Attributes:
        inbox: the ROUTER, which receives what other workers send.
        memory: the memory of this worker, or None.
        address: the address of ``inbox``, to which other workers connect.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        worker: int,
        leader: str,
        secret: Secret,
        elements: int,
        *,
        use_memory: bool,
        body_bytes: int = 0,
    ) -> None:
        self.context = context
        self.worker = worker
        self.secret = secret
        self.elements = elements
        self._own = share_memory(padded(elements)) if use_memory else None
        self.memory = MarkedMemory(self._own, elements) if self._own else None
        self.inbox = serve(context, _own_address(leader), secret, max(4 * elements, body_bytes))
        endpoint = self.inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = endpoint if endpoint.startswith("tcp") else endpoint.rstrip("\0")
        self.host = _host()
        self._sockets: dict[int, tuple[int, zmq.Socket[bytes], Watch]] = {}  # by worker, with its process
        self._addresses: dict[int, str] = {}
        self._warned: set[int] = set()  # workers of whose broken connections a warning has been logged
        self._has_lost = False  # whether the memory of a member could not be opened
        self._memories: dict[int, tuple[int, MarkedMemory | None]] = {}

    def introduction(self) -> dict[str, Any]:
        """Return what other workers need to reach this one, for the join request."""
        return {
            "address": self.address,
            "host": self.host if self._own else "",
            "memory": self._own.handle() if self._own else {},
        }

    def connect(self, members: Sequence[Mapping[str, Any] | None]) -> None:
        """Connect to the members of a view, and drop the connections to processes that they have replaced.

        Raises MalformedMessageError for an invalid handle to memory.

        members: by worker; None for a worker to which no connection is needed."""
        for worker, member in enumerate(members):
            if worker == self.worker:
                continue
            existing = self._sockets.get(worker)
            if existing and member and existing[0] == member["process"]:
                continue
            if existing:
                existing[2].close()
                existing[1].close(linger=0)
                del self._sockets[worker]
            if not member:
                continue
            process = member["process"]
            socket = dealer(self.context, member["address"], self.secret)
            watch = Watch(socket)
            socket.connect(member["address"])
            self._sockets[worker] = (process, socket, watch)
            self._addresses[worker] = member["address"]
            # Both workers decide from the same data whether they share memory, so that no message about it is needed.
            shares = bool(member["host"]) and member["host"] == self.host and self.memory is not None
            opened = open_memory(member["memory"], padded(self.elements)) if shares else None
            # Usually because the worker has just died. If it lives, its first message says so (see ``memory_of``).
            self._has_lost |= shares and opened is None
            self._memories[worker] = (process, MarkedMemory(opened, self.elements) if opened else None)

    def send(self, worker: int, message: Message, *bodies: Body) -> None:
        """Send a message. It may be lost if the connection breaks, which ``has_broken`` reports."""
        offer(self._sockets[worker][1], pack(message), *bodies, copy=False)

    def receive(self) -> Iterator[tuple[Message, tuple[Body, ...]]]:
        """Yield the messages that have arrived. Raises MalformedMessageError."""
        while True:
            try:
                frames = self.inbox.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield unpack_frames([frame.buffer for frame in frames[1:]])

    def shares_memory(self, worker: int) -> bool:
        return self._memories[worker][1] is not None

    def memory_of(self, worker: int) -> MarkedMemory:
        """Return the memory of a member that says that it shares it. Raises UsageError if it could not be opened."""
        memory = self.memory if worker == self.worker else self._memories[worker][1]
        if not memory:
            raise UsageError(f"the memory of worker {worker} cannot be opened on this host: give --same-host socket")
        return memory

    def offer_piece(self, number: int, version: int) -> None:
        if self.memory:
            self.memory.offer_piece(number, version)

    def offer_sum(self, number: int, version: int) -> None:
        if self.memory:
            self.memory.offer_sum(number, version)

    def has_broken(self) -> bool:
        """Return whether a connection to a member broke since the last call, or its memory could not be opened."""
        has_lost = self._has_lost
        self._has_lost = False
        # A list, not a generator: every watch must read its events.
        return has_lost | any([watch.has_broken() for _, _, watch in self._sockets.values()])

    def note_round(self) -> None:
        """Note that this worker has completed a round: connections that broke before no longer count."""
        for _, _, watch in self._sockets.values():
            watch.losses = 0
        self._warned = set()

    def check_reachable(self) -> None:
        """Raise JobError if a member has had no connection for UNREACHABLE_S seconds, at the last call of ``has_broken``.

        Also if its connection broke MOST_LOSSES times without a complete round. Otherwise the run would wait for ever if a
        firewall separates two hosts, or lets only small messages pass."""
        due = time.monotonic() - UNREACHABLE_S
        for worker, (_, _, watch) in self._sockets.items():
            if watch.losses >= MANY_LOSSES:
                self._check_losses(worker, watch.losses)
            if watch.down_since is not None and watch.down_since < due:
                raise JobError(
                    f"cannot reach worker {worker} at {self._addresses[worker]} for {UNREACHABLE_S:g} s: let workers reach"
                    " each other at any port, or use --exchange parameter-server"
                )

    def _check_losses(self, worker: int, losses: int) -> None:
        """Log a warning about a connection that breaks again and again, once. Raises JobError after MOST_LOSSES."""
        text = (
            f"the connection from worker {self.worker} to worker {worker} at {self._addresses[worker]} broke {losses} times"
            " without a complete step in between"
        )
        if losses >= MOST_LOSSES:
            raise JobError(
                f"{text}: the network may drop large packets; set the same MTU on all hosts, or use --exchange"
                " parameter-server"
            )
        if worker not in self._warned:
            self._warned.add(worker)
            logger.warning(text)


def _own_address(leader: str) -> str:
    """Return the address at which this worker listens: private if server 0's is, or else on the network to it."""
    if PRIVATE.fullmatch(leader):
        return f"ipc://@trainer-worker-{secrets.token_hex(8)}"
    return f"tcp://{bracketed(interface_towards(leader)[1])}:0"


def _host() -> str:
    """Return a text that is equal for processes of one boot, user and PID namespace, which can share memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"
    except OSError:
        return ""
