"""The data plane of a server: holds its slice and the pushed gradients, executes orders, and answers workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.checkpoints.read import read_slice_range, read_state
from trainer.checkpoints.slice_file import Float32s
from trainer.checkpoints.state import folder_of
from trainer.checkpoints.write import WriteOutcome, write_slice
from trainer.config import Config, RunFacts, slice_bounds
from trainer.coordination.orders import Order, Reply
from trainer.coordination.parameter_slice import ParameterSlice
from trainer.home.place import Place
from trainer.leader.background import AtOnce, CallQueue
from trainer.rules import build_slice, enter_cohort, enter_stage
from trainer.transport.bodies.json_object import pack_json, unpack_json
from trainer.transport.malformed import MalformedMessageError
from trainer.transport.messages.heads import Message, pack
from trainer.transport.messages.servers import Cancel, Join, Parameters, Push, Rejoin, Stop
from trainer.transport.pipes import MessagePipe, PipeWriter, open_pipe, pipe_key
from trainer.transport.shared_memory import SharedVectors, open_memory

Send = Callable[[bytes, Message, "bytes | None"], None]


# wrote(generation, sequence of the order, outcome)
Wrote = Callable[[int, int, WriteOutcome], None]


@dataclass
class Peer:
    """A server's state of one worker.

    Attributes:
        identity: of its connection.
        session: number of its session, which grows with every join of the worker.
        memory: the vectors that it shares with this host, or None.
        answers: its pipe for answers of this server, or None.
        has_handle: whether it was sent the handle of this server's pipe, for its pushes.
        pushed: clock and this server's part of its gradient that no order has used yet, or None.
    """

    identity: bytes
    session: int
    memory: SharedVectors | None
    answers: PipeWriter | None
    has_handle: bool = False
    pushed: tuple[int, npt.NDArray[np.float32]] | None = None


class SliceServer:
    """Executes the orders of the coordinator on one slice.

    Args:
        config, facts: the run.
        index: number of this server.
        root: folder of checkpoints.
        send: send(identity, message, body) answers a peer.
        work: writes checkpoints in the background.
        wrote: called in the caller's thread with the result of every slice.
        pipe: where workers of this host leave their pushes; None to use sockets for all messages.
    """

    def __init__(
        self,
        config: Config,
        facts: RunFacts,
        index: int,
        root: Place,
        send: Send,
        work: CallQueue | None = None,
        wrote: Wrote = lambda generation, sequence, outcome: None,
        pipe: MessagePipe | None = None,
    ) -> None:
        self.config = config
        self.facts = facts
        self.index = index
        self.root = root
        self.send = send
        self.work = work or AtOnce()
        self.wrote = wrote
        self._pipe_handle = pack_json(pipe.handle()) if pipe else None
        self.stages = config.stage_configs()
        self.stage = 0
        self.begin, self.end = slice_bounds(facts.elements, config.processes.servers)[index]
        self.slice = self._slice(np.empty(0, np.float32), np.empty(0, np.float32))  # until a checkpoint is loaded
        self.peers: dict[int, Peer] = {}
        self.generation = 0
        self.sequence = 0
        self.trouble: str | None = None  # why the last checkpoint was not written
        self._answer: tuple[int, bytes] | None = None

    def _slice(self, values: Float32s, momentum: Float32s, updates: int = 0) -> ParameterSlice:
        return build_slice(self.stages[self.stage], self.facts.num_workers, values, momentum, updates)

    def load(self, generation: int, version: int, stage: int) -> None:
        """Load a checkpoint and start a generation; workers of the previous one must join again. Raises DataError.

        stage: number of the stage in which the run continues."""
        values, momentum = read_slice_range(self.root, version, self.begin, self.end)
        made_by = read_state(self.root, version).stage
        self.stage = stage
        # The checkpoint has the momentum of the workers and the stage that made it, and may be loaded again after a crash.
        values, momentum = enter_cohort(self.stages[made_by], self.facts.num_workers, version, values, momentum)
        if made_by != stage:
            rules = self.stages[made_by], self.stages[stage]
            values, momentum = enter_stage(self.config, *rules, self.facts.num_workers, values, momentum)
        self.slice = self._slice(values, momentum, version)
        self.generation = generation
        self.sequence = 0
        self._answer = None
        for worker, peer in self.peers.items():
            self.send(peer.identity, Rejoin(worker, peer.session), None)
        self.peers = {}

    def join(self, identity: bytes, message: Join, body: memoryview) -> None:
        """Handle a worker's join request, with or without a handle to its shared memory.

        Raises MalformedMessageError."""
        worker = message.worker
        if worker >= self.facts.num_workers:
            raise MalformedMessageError(f"worker {worker}")
        peer = self.peers.get(worker)
        if peer and message.session < peer.session:  # started on a host whose clock is behind
            answer = Rejoin(worker, message.session, later_session=peer.session, joined=False)
            return self.send(identity, answer, None)
        if peer and message.session == peer.session:
            # An answer to the first request goes to a connection that broke. A new session gets one of its own.
            if peer.identity != identity:
                self.send(identity, Rejoin(worker, message.session), None)
            return None
        handle = unpack_json(body)
        memory = open_memory(handle, self.facts.elements) if "pid" in handle else None
        answers = handle.get(pipe_key(self.index)) if memory and self._pipe_handle else None
        writer = open_pipe(answers) if answers is not None else None
        # A gradient of the earlier session stays: if all servers have it, an order that uses it may be under way.
        pushed = peer.pushed if peer else None
        self.peers[worker] = Peer(identity, message.session, memory, writer, pushed=pushed)
        return None

    def push(self, identity: bytes, message: Push, body: memoryview) -> bool:
        """Store a worker's gradient. Raises MalformedMessageError.

        Returns False, and tells the worker to join again, if it belongs to another session or generation."""
        peer = self.peers.get(message.worker)
        # A gradient from before a roll-back or a rejoin belongs to a step that is void.
        if not peer or peer.session != message.session or self.generation != message.generation:
            self.send(identity, Rejoin(message.worker, message.session), None)
            return False
        if message.in_memory:
            if not peer.memory:
                raise MalformedMessageError("a gradient in memory that was never opened")
            # No copy: the worker changes its vector only after all answers, and an order uses gradients before it
            # answers.
            peer.pushed = message.clock, peer.memory.pushed[self.begin : self.end]
        else:
            if len(body) != 4 * (self.end - self.begin):
                raise MalformedMessageError(f"a gradient of {len(body)} bytes")
            peer.pushed = message.clock, np.frombuffer(body, np.float32)
        return True

    def execute(self, order: Order) -> None:
        """Execute the next order: use its gradients, write the slice if requested, then send the answers to workers.

        Raises RuntimeError if an order was lost; the server must be restarted then."""
        # A server that skips an order would hold another version than the others, and no later order would reveal it.
        if order.sequence != self.sequence + 1:
            raise RuntimeError(f"server {self.index} has order {order.sequence} after {self.sequence}: one was lost")
        self.sequence = order.sequence
        self._use(order)
        if order.snapshot:
            self._write(order.sequence, order.version)
        for reply in order.unblocked:
            if peer := self._peer(reply):
                self._send_parameters(peer, reply, order.version)
        for reply in order.stop:
            if peer := self._peer(reply):
                stop = Stop(reply.worker, reply.session, self.generation, reply.clock, order.version)
                self.send(peer.identity, stop, None)
        if self.index:  # server 0 cancels steps, so that a worker polls a single socket between two micro-batches
            return
        for reply in order.cancelled:
            if peer := self._peer(reply):
                self.send(peer.identity, Cancel(*reply), None)

    def parameters(self) -> npt.NDArray[np.floating[Any]]:
        """Return a view of the slice's current parameters."""
        return self.slice.values[: self.slice.num_parameters]

    def _use(self, order: Order) -> None:
        """Add the gradients of an order to the sum of the next update, and apply that update if the order says so.

        Each gradient is used in one order only."""
        gradients = []
        for worker, clock, _ in order.shares:
            gradient = self.peers[worker].pushed
            assert gradient, "an order uses only gradients that every server holds"
            assert gradient[0] == clock, "an order names the gradient that this server holds"
            gradients.append(gradient[1])
            self.peers[worker].pushed = None
        weights = [share.weight for share in order.shares]
        if order.learning_rate is None:
            self.slice.accumulate(gradients, weights)
        else:
            self.slice.apply(gradients, order.learning_rate, weights, order.scale)

    def _peer(self, reply: Reply) -> Peer | None:
        """Return the worker of a reply, or None if it has joined again meanwhile and gets a later answer."""
        peer = self.peers.get(reply.worker)
        return peer if peer and peer.session == reply.session else None

    def _send_parameters(self, peer: Peer, reply: Reply, version: int) -> None:
        """Send the parameters of a worker's next step: through shared memory if there is any, else in the message."""
        place = reply.worker, reply.session, self.generation, reply.clock, version
        if not peer.memory:
            return self.send(peer.identity, Parameters(*place, in_memory=False), self._serialised(version))
        np.copyto(peer.memory.pulled[self.begin : self.end], self.slice.values)
        message = Parameters(*place, in_memory=True)
        if not peer.has_handle:
            peer.has_handle = True
            return self.send(peer.identity, message, self._pipe_handle)
        if not (peer.answers and peer.answers.offer(pack(message))):
            self.send(peer.identity, message, None)
        return None

    def _serialised(self, version: int) -> bytes:
        """Return the slice as bytes. They are computed once per version, for all workers that get them."""
        if self._answer is None or self._answer[0] != version:
            self._answer = (version, self.slice.values.tobytes())
        return self._answer[1]

    def _write(self, sequence: int, version: int) -> None:
        """Write a copy of the slice in the background, which later orders do not change."""
        generation = self.generation
        values = self.slice.values.copy()
        momentum = self.slice.momentum.copy()
        self.work.submit(
            partial(self._write_checkpoint, generation, version, values, momentum),
            partial(self._tell, generation, sequence),
        )

    def _tell(self, generation: int, sequence: int, outcome_and_trouble: tuple[WriteOutcome, str | None]) -> None:
        """Note the outcome of a write, and report it to the owner of this slice server."""
        outcome, self.trouble = outcome_and_trouble
        self.wrote(generation, sequence, outcome)

    def _write_checkpoint(
        self, generation: int, version: int, values: Float32s, momentum: Float32s
    ) -> tuple[WriteOutcome, str | None]:
        """Write a slice and return the outcome, with the error message of a failed write, otherwise None.

        Called in the background. After a failure training continues, and older checkpoints are kept.

        Args:
            generation: the generation of the slice; if it is over, nothing is written.
            version: the version of the slice.
            values, momentum: copies of the slice's elements.
        """
        if generation != self.generation:
            return WriteOutcome.FAILED, None  # a roll-back has started another generation
        if not (np.isfinite(values).all() and np.isfinite(momentum).all()):
            return WriteOutcome.NOT_FINITE, None
        folder = folder_of(self.root, version)
        servers = self.config.processes.servers
        total = self.facts.elements
        span = (self.begin, self.end)
        try:
            write_slice(
                folder, self.index, servers, version, *span, total, values, momentum, generation, self.slice.slots
            )
        except OSError as error:
            return WriteOutcome.FAILED, f"the checkpoint of version {version} was not written: {error}"
        return WriteOutcome.WRITTEN, None
