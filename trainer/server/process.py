"""A server's process: one socket that everybody talks to, for servers but 0 one to server 0, and one thread, beside which
another writes checkpoints."""

from __future__ import annotations

import logging
import socket as sockets
import time
from collections.abc import Sequence
from typing import Any

import zmq

from trainer.checkpoints.write import WriteOutcome
from trainer.config import Config, Facts, slice_bounds
from trainer.coordination.orders import Measured, Order
from trainer.coordination.passes import Seen
from trainer.home.folders import Folders
from trainer.leader.background import Background
from trainer.leader.leader import Follower, Leader
from trainer.server.slice_server import SliceServer
from trainer.transport.agreement import Agreement
from trainer.transport.messages import Header, Malformed, Op, pack_json, unpack, unpack_json
from trainer.transport.sockets import Secret, connect, offer, serve
from trainer.watchdog import kick

logger = logging.getLogger(__name__)

INTRODUCED = (Op.JOIN, Op.HELLO, Op.STATUS, Op.LOST, Op.END)
TICK_S = 0.2
HELLO_S = 1.0
Frames = list[memoryview]


class Server:
    def __init__(
        self,
        config: Config,
        facts: Facts,
        index: int,
        addresses: Sequence[str],
        secret: Secret,
        held: sockets.socket | None,
        folders: Folders,
    ) -> None:
        self.folders = folders
        self.index = index
        self.session = time.time_ns()
        self.agreement = Agreement.of(config, facts)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        begin, end = slice_bounds(facts.elements, config.processes.servers)[index]
        self.socket = serve(self.context, addresses[index], secret, 4 * (end - begin), held)
        self.to_leader = connect(self.context, addresses[0], secret) if index else None
        self.background = Background()
        self.slice_server = SliceServer(
            config, facts, index, self.folders.checkpoints, self.send, self.background, self._wrote
        )
        self._untold: list[Header] = []  # to server 0, which did not read
        self.leader = None if index else self._make_leader()
        self.malformed = 0

    def _make_leader(self) -> Leader:
        config = self.slice_server.config
        facts = self.slice_server.facts
        return Leader(
            config,
            facts,
            self.folders,
            self.send_order,
            self.send_load,
            self.slice_server.parameters,
            work=self.background,
        )

    def run(self) -> None:
        """Serve until the process is ended."""
        poller = zmq.Poller()
        mine = [socket for socket in (self.socket, self.to_leader) if socket]
        for socket in mine:
            poller.register(socket, zmq.POLLIN)
        poller.register(self.background, zmq.POLLIN)
        if self.leader:
            self.leader.gather()
        due = 0.0
        while True:
            kick()
            for ready, _ in poller.poll(int(TICK_S * 1000)):
                if isinstance(ready, zmq.Socket):
                    self._drain(ready)
                else:
                    self.background.collect()
            now = time.monotonic()
            if now >= due:
                due = now + (TICK_S if self.leader else HELLO_S)
                self._tick(now)

    def send(self, identity: bytes, header: Header, body: bytes | None) -> None:
        self.socket.send_multipart([identity, header.pack(), body or b""], copy=False)

    def send_order(self, followers: Sequence[Follower], order: Order) -> None:
        """Others first: they work while this server does its own part."""
        if followers:
            body = pack_json(order.to_json())
            header = Header(Op.ORDER, 0, 0, self.session, self.slice_server.generation)
            for follower in followers:
                self.send(follower.identity, header, body)
        self.slice_server.execute(order)

    def send_load(self, followers: Sequence[Follower], generation: int, version: int) -> None:
        for follower in followers:
            self.send(follower.identity, Header(Op.LOAD, 0, 0, self.session, generation, 0, version), None)
        self.slice_server.load(generation, version)
        assert self.leader
        self.leader.loaded(0, generation, time.monotonic())

    def _tick(self, now: float) -> None:
        if self.leader:
            self.leader.tick(now)
        else:
            hello = Header(Op.HELLO, 0, self.index, self.session, self.slice_server.generation)
            self._tell_leader(hello, self.agreement.introduction())
            self._tell_what_is_written()

    def _tell_leader(self, header: Header, body: bytes = b"") -> bool:
        """False if server 0 does not read."""
        assert self.to_leader
        return offer(self.to_leader, header.pack(), body)

    def _wrote(self, generation: int, sequence: int, outcome: WriteOutcome) -> None:
        """This server's part of a checkpoint is written, or is not; the order's number travels in ``clock``."""
        if self.slice_server.trouble:
            logger.warning(self.slice_server.trouble)
        if self.leader:
            self.leader.wrote(0, generation, sequence, outcome)
        else:
            self._untold.append(Header(Op.WRITTEN, int(outcome), self.index, self.session, generation, sequence))
            self._tell_what_is_written()

    def _tell_what_is_written(self) -> None:
        while self._untold and self._tell_leader(self._untold[0]):
            self._untold.pop(0)

    def _drain(self, socket: zmq.Socket[bytes], most: int = 64) -> None:
        for _ in range(most):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                self._receive([frame.buffer for frame in frames], from_leader=socket is self.to_leader)
            except Malformed as error:
                self.malformed += 1
                logger.warning(f"dropped a malformed message: {error}")

    def _receive(self, frames: Frames, *, from_leader: bool) -> None:
        if len(frames) != (2 if from_leader else 3):
            raise Malformed(f"{len(frames)} frames")
        header = unpack(frames[-2])
        body = frames[-1]
        if from_leader:
            self._follow(header, body)
        elif header.op in INTRODUCED and not self._is_introduced(bytes(frames[0]), header, body):
            return
        elif header.op in (Op.JOIN, Op.PUSH):
            self._serve_worker(bytes(frames[0]), header, body)
        elif self.leader:
            self._lead(self.leader, bytes(frames[0]), header)
        else:
            raise Malformed(f"{header.op.name} to server {self.index}")

    def _is_introduced(self, identity: bytes, header: Header, body: memoryview) -> bool:
        """Whether a peer is of a host that agrees about the run. Server 0 tells one that is not, and nothing else comes of
        it; another server, which may itself be the one that differs, only does not listen."""
        if self.agreement.admits(unpack_json(body)):
            return True
        if self.leader:
            self.send(identity, Header(Op.REFUSED, 0, header.index, header.session), self.agreement.refusal())
        return False

    def _serve_worker(self, identity: bytes, header: Header, body: memoryview) -> None:
        now = time.monotonic()
        if header.op is Op.JOIN:
            self.slice_server.join(identity, header, body)
            if self.leader:
                self.leader.joined(0, header.index, header.session, now)
            else:
                self._tell_leader(self._held(header))
        elif self.slice_server.push(identity, header, body):
            if self.leader:
                if not self.leader.pushed(0, header.index, header.session, header.clock, now, _measured(header)):
                    self._send_back(identity, header)
            else:
                self._tell_leader(self._held(header))

    def _held(self, header: Header) -> Header:
        """This server holds a worker's join or gradient; the worker's number travels in ``examples``."""
        generation = self.slice_server.generation
        kind = int(header.op)
        return Header(Op.HELD, kind, self.index, header.session, generation, header.clock, examples=header.index)

    def _send_back(self, identity: bytes, header: Header) -> None:
        generation = self.slice_server.generation
        self.send(identity, Header(Op.REJOIN, 0, header.index, header.session, generation, header.clock), None)

    def _lead(self, leader: Leader, identity: bytes, header: Header) -> None:
        """Server 0's part: other servers, heartbeats, supervisors. Raises Malformed."""
        handlers = {
            Op.HELLO: self._on_hello,
            Op.LOADED: self._on_loaded,
            Op.HELD: self._on_held,
            Op.WRITTEN: self._on_written,
            Op.HEARTBEAT: self._on_heartbeat,
            Op.GIVE_UP: self._on_give_up,
            Op.STATUS: self._on_status,
            Op.LOST: self._on_lost,
            Op.END: self._on_end,
        }
        if header.op not in handlers:
            raise Malformed(f"{header.op.name} to server 0")
        handlers[header.op](leader, identity, header, time.monotonic())

    def _on_hello(self, leader: Leader, identity: bytes, header: Header, now: float) -> None:
        leader.hello(identity, self._server(header.index), header.session)

    def _on_loaded(self, leader: Leader, identity: bytes, header: Header, now: float) -> None:
        leader.loaded(self._server(header.index), header.generation, now)

    def _on_held(self, leader: Leader, identity: bytes, header: Header, now: float) -> None:
        server = self._server(header.index)
        worker = self._worker(header.examples)
        if header.generation != self.slice_server.generation:
            return
        if header.flags == Op.JOIN:
            leader.joined(server, worker, header.session, now)
        else:
            leader.pushed(server, worker, header.session, header.clock, now)

    def _on_written(self, leader: Leader, identity: bytes, header: Header, now: float) -> None:
        if header.flags not in set(WriteOutcome):
            raise Malformed(f"outcome {header.flags} of a checkpoint")
        leader.wrote(self._server(header.index), header.generation, header.clock, WriteOutcome(header.flags))

    def _on_heartbeat(self, leader: Leader, identity: bytes, header: Header, now: float) -> None:
        if not leader.alive(self._worker(header.index), header.session, now):
            self._send_back(identity, header)

    def _on_give_up(self, leader: Leader, identity: bytes, header: Header, now: float) -> None:
        if not leader.gave_up(self._worker(header.index), header.session, header.clock, now, _measured(header)):
            self._send_back(identity, header)

    def _on_status(self, leader: Leader, identity: bytes, header: Header, now: float) -> None:
        self.send(identity, Header(Op.INFO), pack_json(self._status(leader, now)))

    def _on_lost(self, leader: Leader, identity: bytes, header: Header, now: float) -> None:
        leader.lost(self._worker(header.index), now)

    def _on_end(self, leader: Leader, identity: bytes, header: Header, now: float) -> None:
        self.send(identity, Header(Op.END), pack_json(self._status(leader, now)))
        leader.end(now)

    def _status(self, leader: Leader, now: float) -> dict[str, Any]:
        trouble = self.slice_server.trouble or leader.trouble(now)
        return leader.status(now) | {"malformed": self.malformed, "trouble": trouble}

    def _worker(self, index: int) -> int:
        if not 0 <= index < self.slice_server.facts.num_workers:
            raise Malformed(f"worker {index}")
        return index

    def _server(self, index: int) -> int:
        if not 0 < index < self.slice_server.config.processes.servers:
            raise Malformed(f"server {index}")
        return index

    def _follow(self, header: Header, body: memoryview) -> None:
        """Raises UsageError where server 0 is of another configuration."""
        if header.op is Op.REFUSED:
            raise self.agreement.refused(body)
        if header.op is Op.LOAD:
            self.slice_server.load(header.generation, header.version)
            self._tell_leader(Header(Op.LOADED, 0, self.index, self.session, header.generation))
        elif header.op is Op.ORDER and header.generation == self.slice_server.generation:
            self.slice_server.execute(_order(body))


def _measured(header: Header) -> Measured:
    seen = Seen(header.fingerprint, header.begun, header.passes) if header.passes >= 0 else None
    return Measured(header.examples, header.loss, header.correct, header.seconds, header.read_s, seen)


def _order(body: memoryview) -> Order:
    """Raises Malformed."""
    try:
        return Order.from_json(unpack_json(body))
    except (TypeError, KeyError):
        raise Malformed("an order") from None


def main(
    config: Config,
    facts: Facts,
    index: int,
    addresses: Sequence[str],
    secret: Secret,
    held: sockets.socket | None,
    folders: Folders,
) -> None:
    """Run one server; never returns.

    Raises UsageError if the address is taken, or the host of server 0 has another configuration.

    Args:
        config, facts: the run.
        index: number of the server.
        addresses: of all servers.
        secret: authenticates connections.
        held: the socket of its address, if the supervisor holds it.
        folders: the run's folders on this host.
    """
    Server(config, facts, index, addresses, secret, held, folders).run()
