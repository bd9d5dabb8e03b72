"""The supervisor's connection to server 0."""

from __future__ import annotations

import time

import zmq

from trainer.transport.agreement import Agreement
from trainer.transport.bodies.json_object import unpack_json
from trainer.transport.messages.heads import pack, unpack
from trainer.transport.messages.supervisors import AskStatus, End, EndReply, Refusal, WorkerLoss
from trainer.transport.sockets import Secret, Watch, dealer, offer
from trainer.transport.status import NOT_READY, RunStatus

STATUS_S = 0.5
GONE_S = 2.0
SILENT_S = 5.0  # without a reply for so long, server 0 is gone for now, or for good


class Control:
    """The supervisor's connection to server 0: sends commands, and keeps the newest status that server 0 sent.

    Attributes:
        status: the newest status; not ready before the first reply.
        at_end: the status in server 0's reply to End, None before.
        heard: time of the last reply (monotonic seconds).
        is_admitted: whether server 0 has ever replied.
    """

    def __init__(self, address: str, secret: Secret, agreement: Agreement) -> None:
        self.agreement = agreement
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = dealer(self.context, address, secret)
        self.watch = Watch(self.socket)
        self.socket.connect(address)
        self.status = NOT_READY
        self.at_end: RunStatus | None = None
        self.heard = time.monotonic()
        self.is_admitted = False
        self._broken_since: float | None = None  # since when the connection is broken, if nothing was received since
        self._last_request = 0.0

    def tell(self, message: AskStatus | WorkerLoss | End) -> None:
        """Send a message to server 0, without waiting. It is lost if server 0 cannot be reached for long."""
        offer(self.socket, pack(message), self.agreement.introduction())

    def ask(self) -> bool:
        """Request the status every STATUS_S and return whether a reply has come since the last call.

        Raises UsageError if server 0 does not admit this host, or has another configuration, and DataError if its
        status cannot be read."""
        if self.watch.has_broken() and self._broken_since is None:
            self._broken_since = time.monotonic()
        if time.monotonic() - self._last_request >= STATUS_S:
            self._last_request = time.monotonic()
            self.tell(AskStatus())
        fresh = False
        while self.socket.poll(0):
            head, body = self.socket.recv_multipart()
            reply = unpack(head)
            if isinstance(reply, Refusal):
                raise self.agreement.refused(body)
            # Every reply has the status; the reply to End has the version at which the checkpoint is written.
            self.status = RunStatus.from_json(unpack_json(body))
            if isinstance(reply, EndReply):
                self.at_end = self.status
            self.heard = time.monotonic()
            self._broken_since = None
            fresh = self.is_admitted = True
        return fresh

    def close(self) -> None:
        self.context.destroy(linger=0)  # closes the watch's socket too

    def is_gone(self) -> bool:
        """Return whether server 0 has ended and not returned within GONE_S.

        If it is only busy, for example with a long write, it is silent but not gone."""
        return self._broken_since is not None and time.monotonic() - self._broken_since > GONE_S

    def is_silent(self) -> bool:
        return time.monotonic() - self.heard > SILENT_S
