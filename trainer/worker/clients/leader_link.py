"""A worker's connection to server 0, in an exchange without servers of parameters, with heartbeats of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import zmq

from trainer.transport.agreement import Agreement
from trainer.transport.malformed import MalformedMessageError
from trainer.transport.messages.heads import Body, Message, pack, unpack_frames
from trainer.transport.messages.peers import PeerBeat, Replacement
from trainer.transport.messages.servers import ChangeStage
from trainer.transport.messages.supervisors import Refusal
from trainer.transport.sockets import Secret, Watch, dealer, offer
from trainer.worker.clients.base import ReplacedError, StageSwitch

HEARTBEAT_S = 0.5

logger = logging.getLogger(__name__)


class LeaderLink:
    """The connection to server 0.

    Args:
        context: of the sockets.
        address: of server 0.
        secret: the token of the run.
        agreement: the values that all hosts of the run have in common.
        beat: returns the present heartbeat; called by a thread.

    Attributes:
        socket: to be polled.
        watch: of the connection.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        secret: Secret,
        agreement: Agreement,
        beat: Callable[[], PeerBeat],
    ) -> None:
        self.agreement = agreement
        self.beat = beat
        self.socket = dealer(context, address, secret)
        self.watch = Watch(self.socket)
        self.socket.connect(address)
        self._context = context
        self._answers: SimpleQueue[tuple[Message, tuple[Body, ...]]] = SimpleQueue()
        self._closing = threading.Event()
        # Last, because the thread reads the fields above.
        self._thread = threading.Thread(target=self._beat, args=(address, secret), name="heartbeat", daemon=True)
        self._thread.start()

    def send(self, message: Message, *bodies: Body) -> bool:
        """Send a message. Returns False if server 0 does not read its messages."""
        return offer(self.socket, pack(message), *(bodies or (b"",)), copy=False)

    def receive(self, process: int) -> Iterator[tuple[Message, tuple[Body, ...]]]:
        """Yield the messages that have arrived, with their bodies.

        Raises UsageError if server 0 refuses this host, ReplacedError if ``process``, this worker's number, is replaced,
        StageSwitch if the run is in another stage, and MalformedMessageError."""
        while self.socket.poll(0):
            frames = [frame.buffer for frame in self.socket.recv_multipart(copy=False)]
            yield self._checked(*unpack_frames(frames), process)
        while not self._answers.empty():
            yield self._checked(*self._answers.get(), process)

    def close(self) -> None:
        """End the heartbeats. The owner of the context closes the sockets."""
        self._closing.set()
        self._thread.join()

    def _checked(self, message: Message, bodies: tuple[Body, ...], process: int) -> tuple[Message, tuple[Body, ...]]:
        """Return a message with its bodies. Raises as ``receive``."""
        match message:
            case Refusal():
                raise self.agreement.refused(bodies[0])
            case Replacement(process=number) if number == process:
                raise ReplacedError("a later process has this worker's place")
            case ChangeStage():
                raise StageSwitch(message.stage)
        return message, bodies

    def _beat(self, address: str, secret: Secret) -> None:
        """Send heartbeats from a separate thread, because a step may take longer than the timeout of server 0.

        The answer makes up for a message that was lost."""
        socket = dealer(self._context, address, secret)
        socket.connect(address)
        while not self._closing.wait(HEARTBEAT_S):
            offer(socket, pack(self.beat()), b"")
            while socket.poll(0):
                # A server 0 of another version must not end the heartbeats.
                try:
                    self._answers.put(unpack_frames(socket.recv_multipart()))
                except MalformedMessageError as error:
                    logger.warning(f"dropped a malformed message: {error}")
        socket.close()
