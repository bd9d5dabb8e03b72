"""The supervisor's connection to server 0."""

from __future__ import annotations

import time
from typing import Any

import zmq

from trainer.transport.agreement import Agreement
from trainer.transport.messages import Header, Op, unpack, unpack_json
from trainer.transport.sockets import Secret, Watch, dealer, offer

STATUS_S = 0.5
GONE_S = 2.0
SILENT_S = 5.0  # without an answer for so long, server 0 is gone for now, or for good


class Control:
    """The supervisor's line to server 0: commands, and the newest status that it answered."""

    def __init__(self, address: str, secret: Secret, agreement: Agreement) -> None:
        self.agreement = agreement
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = dealer(self.context, address, secret)
        self.watch = Watch(self.socket)
        self.socket.connect(address)
        self.status: dict[str, Any] = {"ready": False, "finished": False, "diverged": None}
        self.at_end: dict[str, Any] | None = None  # the status that it was asked to checkpoint, once it knows
        self.heard = time.monotonic()
        self.is_admitted = False  # whether server 0 has ever answered
        self._broken: float | None = None  # since when the connection is, if nothing was heard since
        self._asked = 0.0

    def tell(self, op: Op, index: int = -1) -> None:
        offer(self.socket, Header(op, 0, index).pack(), self.agreement.introduction())

    def ask(self) -> bool:
        """Ask for the status now and then; whether an answer has come since the last call. Raises UsageError if server 0
        does not admit this host, or is of another configuration."""
        if self.watch.has_broken() and self._broken is None:
            self._broken = time.monotonic()
        if time.monotonic() - self._asked >= STATUS_S:
            self._asked = time.monotonic()
            self.tell(Op.STATUS)
        fresh = False
        while self.socket.poll(0):
            head, body = self.socket.recv_multipart()
            op = unpack(head).op
            if op is Op.REFUSED:
                raise self.agreement.refused(body)
            self.status = unpack_json(body)
            if op is Op.END:
                self.at_end = self.status
            self.heard, self._broken = time.monotonic(), None
            fresh = self.is_admitted = True
        return fresh

    def close(self) -> None:
        self.context.destroy(linger=0)  # the watch's socket too

    def is_gone(self) -> bool:
        """Whether server 0 has ended, and has not come back at once. One that writes for long is silent only."""
        return self._broken is not None and time.monotonic() - self._broken > GONE_S

    def is_silent(self) -> bool:
        return time.monotonic() - self.heard > SILENT_S
