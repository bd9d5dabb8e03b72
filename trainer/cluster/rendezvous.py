"""The rendezvous of a run's parts: a thread of the process that started them, which distributes addresses and commands
and collects progress and ends.

Each part sends a message twice a second, and every answer contains the complete state. So a lost message loses no
information, and silence means the same on both sides. Messages are JSON on an encrypted connection that requires the
run's token."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import zmq

from pipeline.core.errors import DataError, UsageError
from trainer.cluster.roster import LEASE_S, AddressTable, Roster
from trainer.home.segments import SupersededError
from trainer.transport.bodies.json_object import pack_json, unpack_json
from trainer.transport.malformed import MalformedMessageError
from trainer.transport.sockets import Secret, Watch, dealer, offer, serve
from trainer.transport.status import NOT_READY, RunStatus

BEAT_S = 0.5
SILENT_S = LEASE_S / 2  # a part without answers for so long leaves, so that it is gone by the end of its lease
TEXT_LIMIT = 2000
MOST_LINES = 100  # lines of text per message
MESSAGE_BYTES = 1 << 16

# The commands to a part.
WAIT = "wait"
GO = "go"
CHECKPOINT = "checkpoint"
CHANGE = "change"  # a checkpoint, after which the run continues with other workers
LEAVE = "leave"
DONE = "done"


class AttemptLostError(SupersededError):
    """The loss of this attempt, for example because the starting process is silent. Another attempt may succeed."""


@dataclass(frozen=True)
class PartEnd:
    """The end of a part.

    Attributes:
        part, attempt: the part, and the number of its attempt.
        code: exit code.
        text: the error message if the code is not 0.
    """

    part: int
    attempt: int
    code: int
    text: str


class Rendezvous:
    """The starting process's side of the rendezvous. A part is one host's share of the run, an attempt one start of it.

    Attributes:
        roster: the current attempt and the addresses of each part.
        texts: (part, text) of messages to print.
        ends: ends of current attempts.
        arrivals: (part, host) for each new attempt.
        departures: parts whose current attempts are on hosts that are to end.
        status: the newest status of server 0 that a part has sent.
        totals: attempt and counters of the leading part, as it sent them last; see RunMetrics.
        facts: the facts of the run, None until the leading part has sent them.
        commands: the command to each part.
        port: the TCP port on which the rendezvous listens.
    """

    def __init__(self, num_parts: int, num_servers: int, secret: Secret, bind: str = "0.0.0.0") -> None:
        self.roster = Roster(num_parts, num_servers)
        self.texts: SimpleQueue[tuple[int, str]] = SimpleQueue()
        self.ends: SimpleQueue[PartEnd] = SimpleQueue()
        self.arrivals: SimpleQueue[tuple[int, str]] = SimpleQueue()
        self.departures: SimpleQueue[int] = SimpleQueue()
        self.status = NOT_READY
        self.totals: tuple[int, dict[str, dict[str, int]]] = (0, {})
        self.facts: dict[str, Any] | None = None
        self.commands: dict[int, str] = dict.fromkeys(range(num_parts), WAIT)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = serve(self._context, f"tcp://{bind}:0", secret, MESSAGE_BYTES)
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._socket.router_mandatory = True
        # by (part, attempt)
        self._identities: dict[tuple[int, int], bytes] = {}  # connections, as addresses of messages
        self._ended: set[tuple[int, int]] = set()  # whose end is already in ``ends``
        self._departing: set[tuple[int, int]] = set()  # which are already in ``departures``
        self._said_by: dict[tuple[int, int], int] = {}  # the number of an attempt's last line that was taken over
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        self._thread.start()

    def want(self, parts: Sequence[int], command: str) -> None:
        """Change the command to some parts, which their next answers carry. command: one of the commands above."""
        for part in parts:
            self.commands[part] = command

    def present(self) -> int:
        """Return the number of parts that have arrived."""
        with self._lock:
            return len(self.roster.members)

    def silent(self) -> dict[int, float]:
        """Return the parts of which nothing is heard, with the duration (seconds); see Roster.silent."""
        with self._lock:
            return self.roster.silent(time.monotonic())

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=500)

    def _serve(self) -> None:
        """Answer messages until ``close``. Runs in the thread, which alone uses the socket."""
        while not self._closing.is_set():
            if not self._socket.poll(100):
                continue
            frames = self._socket.recv_multipart()
            try:
                identity, body = frames
                answer = self._answer(identity, unpack_json(body))
            except (DataError, ValueError, KeyError, TypeError):
                continue  # not from a part of this version
            self._reaches(identity, answer)

    def _reaches(self, identity: bytes, answer: Mapping[str, Any]) -> bool:
        """Send an answer and return whether its connection still exists."""
        try:
            offer(self._socket, identity, pack_json(answer))
        except zmq.ZMQError:  # no route to it
            return False
        return True

    def _answer(self, identity: bytes, message: Mapping[str, Any]) -> dict[str, Any]:
        """Take over a part's message and return the answer, in plain JSON.

        Its keys: heard (number of the message), said (number of the last line of text that was taken over), wanted (the
        command; LEAVE for a replaced attempt), facts, and edition and addresses of the address table, 0 and () while
        the attempt must wait. Raises MalformedMessageError, KeyError, TypeError or ValueError for a message that no
        part of this version sends.

        identity: the connection of the message."""
        part = int(message["part"])
        attempt = int(message["attempt"])
        now = time.monotonic()
        if part not in self.commands:
            raise MalformedMessageError(f"part {part}")
        with self._lock:
            addresses = {int(index): str(address) for index, address in message["addresses"].items()}
            if self.roster.hello(part, attempt, addresses, now):
                self.arrivals.put((part, str(message.get("host", ""))[:200]))
            self._identities[part, attempt] = identity
            # Probe the connections of replaced attempts: the new one need not wait for their leases once they are gone.
            for earlier in self.roster.waits_for(part):
                if not self._reaches(self._identities[part, earlier], {}):
                    self.roster.cut(part, earlier, now)
            current = self.roster.is_current(part, attempt)
            if message.get("goodbye"):
                self.roster.goodbye(part, attempt)
            table = self.roster.address_table(part, attempt, now) or AddressTable(0, ())
        # A part repeats lines until they are acknowledged, so that known numbers are skipped.
        last = self._said_by.get((part, attempt), 0)
        for number, text in message["said"]:
            if number > last:
                self.texts.put((part, str(text)[:TEXT_LIMIT]))
                last = self._said_by[part, attempt] = int(number)
        if current:
            self._take(part, attempt, message)
        command = self.commands[part] if current else LEAVE
        answer = {"heard": message["number"], "said": last, "wanted": command, "facts": self.facts}
        return answer | {"edition": table.edition, "addresses": table.addresses}

    def _take(self, part: int, attempt: int, message: Mapping[str, Any]) -> None:
        """Take over what a current attempt's message may carry.

        It may hold status, totals and facts and, once each, the attempt's departure and its end."""
        if isinstance(message.get("status"), dict):
            self.status = RunStatus.from_json(message["status"])
        if isinstance(message.get("totals"), dict):
            self.totals = attempt, message["totals"]
        if isinstance(message.get("facts"), dict):
            self.facts = message["facts"]
        # A message is repeated until it is answered.
        if message.get("departs") and (part, attempt) not in self._departing:
            self._departing.add((part, attempt))
            self.departures.put(part)
        end = message.get("end")
        if end and (part, attempt) not in self._ended:
            self._ended.add((part, attempt))
            self.ends.put(PartEnd(part, attempt, int(end[0]), str(end[1])[:TEXT_LIMIT]))


@dataclass(frozen=True)
class Answer:
    """The last answer of the rendezvous to a part.

    Attributes:
        wanted: the command.
        edition: number of the address table, 0 while the part must wait for one.
        addresses: one per server.
        facts: the facts of the run, None until they are known.
    """

    wanted: str = WAIT
    edition: int = 0
    addresses: tuple[str, ...] = ()
    facts: dict[str, Any] | None = None


class Line:
    """A part's side of the rendezvous: a thread that sends messages until they are acknowledged.

    Args:
        address: tcp:// address of the rendezvous.
        secret: the token of the run.
        part, attempt: the part, and the number of this attempt.
        addresses: addresses of the part's servers, by server index.
        host: name of this host.

    Attributes:
        departs: whether this host is to end. A signal handler may set it, which could not take a lock.
    """

    def __init__(
        self, address: str, secret: Secret, part: int, attempt: int, addresses: Mapping[int, str], host: str
    ) -> None:
        self.departs = False
        self._about = {"part": part, "attempt": attempt, "addresses": dict(addresses), "host": host}
        self._address = address
        self._secret = secret
        self._unacknowledged: list[tuple[int, str]] = []  # (number, text) of lines that are not acknowledged yet
        self._lines = 0
        self._news: dict[str, Any] = {}  # further values of every message
        self._answer = Answer()
        self._heard_at = time.monotonic()
        self._number = 0  # of the last message
        self._acknowledged = 0  # the highest number of a message that was answered
        self._problem: UsageError | None = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._speak, name="rendezvous", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """Queue a line of text for the starting process to print. It is repeated until it is acknowledged."""
        with self._lock:
            self._lines += 1
            self._unacknowledged.append((self._lines, text[:TEXT_LIMIT]))

    def tell(self, **news: Any) -> None:
        """Add values to all further messages: status, totals, facts, end."""
        with self._lock:
            self._news |= news

    def answer(self) -> Answer:
        """Return the newest answer.

        Raises AttemptLostError if the rendezvous is silent, UsageError if it rejects the token."""
        if self._problem:
            raise self._problem
        if self.is_silent():
            raise AttemptLostError("nothing is heard of the process that started the run")
        return self._answer

    def is_silent(self) -> bool:
        return time.monotonic() - self._heard_at > SILENT_S

    def flush(self, seconds: float = SILENT_S) -> bool:
        """Wait up to ``seconds`` until all earlier messages are acknowledged, and return whether they are."""
        with self._lock:
            number = self._number + 1
        end = time.monotonic() + seconds
        self._wake.set()
        while self._acknowledged < number and time.monotonic() < end and self._thread.is_alive():
            time.sleep(0.02)
        return self._acknowledged >= number

    def close(self) -> None:
        """Say goodbye if the rendezvous answers, and end the thread."""
        self.tell(goodbye=True)
        if not self.is_silent() and not self._problem:
            self.flush(2 * BEAT_S)
        self._closing.set()
        self._wake.set()
        self._thread.join()

    def _speak(self) -> None:
        """Send a message every BEAT_S, or at once after ``flush``, and take over the answers, until ``close``."""
        # zmq sockets are not thread-safe, so this thread has its own.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = dealer(context, self._address, self._secret)
        watch = Watch(socket)
        socket.connect(self._address)
        try:
            while not self._closing.is_set():
                self._wake.clear()
                offer(socket, self._message())
                due = time.monotonic() + BEAT_S
                while (left := due - time.monotonic()) > 0 and not self._wake.is_set():
                    if socket.poll(int(min(left, 0.05) * 1000)):
                        self._hear(socket.recv_multipart()[0])
                watch.has_broken()
        except UsageError as error:
            self._problem = error
        finally:
            context.destroy(linger=0)

    def _message(self) -> bytes:
        with self._lock:
            self._number += 1
            state = {"number": self._number, "said": self._unacknowledged[:MOST_LINES], "departs": self.departs}
            return pack_json(self._about | self._news | state)

    def _hear(self, data: bytes) -> None:
        """Take over an answer, and forget the lines of text that it acknowledges. A malformed answer is ignored."""
        try:
            values = unpack_json(data)
            answer = Answer(values["wanted"], values["edition"], tuple(values["addresses"]), values["facts"])
            number = int(values["heard"])
            acknowledged = int(values["said"])
        except (MalformedMessageError, KeyError, TypeError, ValueError):
            return
        with self._lock:
            self._unacknowledged = [entry for entry in self._unacknowledged if entry[0] > acknowledged]
        self._answer = answer
        self._heard_at = time.monotonic()
        self._acknowledged = max(self._acknowledged, number)
