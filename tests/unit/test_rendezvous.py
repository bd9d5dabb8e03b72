"""Where the parts of a run on a cluster meet, over real sockets."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import zmq

from pipeline.core.errors import UsageError
from tests.support.trainer_runs import until
from trainer.cluster import rendezvous as module
from trainer.cluster.rendezvous import CHECKPOINT, GO, LEAVE, WAIT, AttemptLostError, Line, PartEnd, Rendezvous
from trainer.cluster.run import drained
from trainer.transport import sockets
from trainer.transport.addresses import interface_towards
from trainer.transport.sockets import Secret, connect

SECRET = Secret(secrets.token_hex(16))
Call = Callable[..., Line]


@pytest.fixture(autouse=True)
def _short_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.05)


@pytest.fixture
def meeting() -> Iterator[Rendezvous]:
    """Of two parts, the first with the only server."""
    found = Rendezvous(2, 1, SECRET, "127.0.0.1")
    yield found
    found.close()


@pytest.fixture
def call(meeting: Rendezvous) -> Iterator[Call]:
    lines: list[Line] = []

    def start(part: int, attempt: int = 0, secret: Secret = SECRET) -> Line:
        addresses = {0: f"tcp://127.0.0.1:{7000 + attempt}"} if part == 0 else {}
        lines.append(Line(f"tcp://127.0.0.1:{meeting.port}", secret, part, attempt, addresses, f"host-{part}"))
        return lines[-1]

    yield start
    for line in lines:
        line.close()


def collected(queue: SimpleQueue[Any], count: int) -> list[Any]:
    found: list[Any] = []

    def enough() -> bool:
        found.extend(drained(queue))
        return len(found) >= count

    until(enough, f"{count} entries")
    return found


@pytest.mark.full
def test_parts_get_all_addresses_and_their_commands(meeting: Rendezvous, call: Call) -> None:
    first = call(0)
    until(lambda: meeting.present() == 1, "the first part is there")
    first.flush()
    assert first.answer().edition == 0
    second = call(1)
    until(lambda: second.answer().edition == 1, "the second part has addresses")
    until(lambda: first.answer().addresses == ("tcp://127.0.0.1:7000",), "the first has them too")
    assert first.answer().wanted == WAIT
    meeting.want([0, 1], GO)
    meeting.want([0], CHECKPOINT)
    until(lambda: (first.answer().wanted, second.answer().wanted) == (CHECKPOINT, GO), "each hears what is wanted")
    first.tell(facts={"num_workers": 3})
    until(lambda: second.answer().facts == {"num_workers": 3}, "facts reach the others")
    assert collected(meeting.arrivals, 2) == [(0, "host-0"), (1, "host-1")]


@pytest.mark.full
def test_every_line_is_heard_once_and_in_order(meeting: Rendezvous, call: Call) -> None:
    line = call(1)
    said = [f"line {number}" for number in range(3 * module.MOST_LINES)]
    for text in said:
        line.say(text)
        if text.endswith("7"):
            time.sleep(0.005)
    assert collected(meeting.texts, len(said)) == [(1, text) for text in said]
    line.flush()
    assert not drained(meeting.texts)


def test_an_end_is_heard_once_and_only_of_the_attempt_that_counts(meeting: Rendezvous, call: Call) -> None:
    old, new = call(0), call(0, 1)
    until(lambda: old.answer().wanted == LEAVE, "the old attempt is told to leave")
    old.tell(end=(1, "the old one's"), totals={"counts": {"images": 1}})
    new.tell(end=(3, "broken"), totals={"counts": {"images": 2}})
    old.flush()
    new.flush()
    assert collected(meeting.ends, 1) == [PartEnd(0, 1, 3, "broken")]
    assert meeting.totals == (1, {"counts": {"images": 2}})


def test_a_successor_goes_on_when_its_predecessor_has_said_goodbye(meeting: Rendezvous, call: Call) -> None:
    old, other = call(0), call(1)
    until(lambda: other.answer().edition == 1, "the first edition")
    new = call(0, 1)
    new.flush()
    assert new.answer().edition == 0, "the old one lives"
    assert other.answer().addresses == ("tcp://127.0.0.1:7000",)
    old.close()
    until(lambda: new.answer().addresses == other.answer().addresses == ("tcp://127.0.0.1:7001",), "the second edition")


@pytest.mark.full
def test_a_successor_of_a_killed_process_does_not_wait_for_its_lease(
    meeting: Rendezvous, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, other = call(0), call(1)
    until(lambda: other.answer().edition == 1, "the first edition")
    monkeypatch.setattr(old, "_message", lambda: 1 / 0)  # it ends without a word, and its connection with it
    monkeypatch.setattr("threading.excepthook", lambda arguments: None)
    until(lambda: not old._thread.is_alive(), "the old attempt is gone")
    meeting.roster.lease_s = 3600
    new = call(0, 1)
    until(lambda: new.answer().edition == 2, "the second edition")


def test_a_host_that_is_to_end_is_reported_once(meeting: Rendezvous, call: Call) -> None:
    """Not that of a replaced attempt, but that of its successor again."""
    old, new = call(1), call(1, 1)
    until(lambda: old.answer().wanted == LEAVE, "the old attempt is told to leave")
    old.departs = new.departs = True
    for line in (old, new, new):
        line.flush()
    assert drained(meeting.departures) == [1]
    newest = call(1, 2)
    newest.departs = True
    assert collected(meeting.departures, 1) == [1]


@pytest.mark.slow
def test_one_that_hears_nothing_is_lost(call: Call, meeting: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", 1.0)
    line = call(1)
    until(lambda: meeting.present() == 1, "the part is there")
    assert line.answer().wanted == WAIT
    monkeypatch.setattr(meeting, "_answer", lambda *message: {}[message])  # it does not answer
    until(line.is_silent, "it hears nothing")
    with pytest.raises(AttemptLostError):
        line.answer()


def test_what_nobody_heard_is_known(call: Call, meeting: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    line = call(1)
    line.say("a word")
    assert line.flush()
    monkeypatch.setattr(meeting, "_answer", lambda *message: {}[message])
    line.tell(end=(0, ""))
    assert not line.flush(0.3)


def test_only_the_token_opens_the_line(call: Call, meeting: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "REFUSED_AFTER_S", 0.2)
    stranger = call(1, secret=Secret("another token of it"))

    def is_refused() -> bool:
        try:
            stranger.answer()
        except UsageError as error:
            return "token" in str(error)
        return False

    until(is_refused, "the stranger is refused")
    assert meeting.present() == 0


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"part": 7, "attempt": 0}', b'{"part": "x"}', b"\xff" * 100])
def test_what_no_part_says_changes_nothing(meeting: Rendezvous, call: Call, body: bytes) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = connect(context, f"tcp://127.0.0.1:{meeting.port}", SECRET)
    socket.send(body)
    socket.send_multipart([body, body, body])
    line = call(1)
    until(lambda: meeting.present() == 1, "a part is heard")
    assert line.answer().wanted == WAIT
    context.destroy(linger=0)


def test_a_part_listens_where_packets_to_the_rendezvous_leave() -> None:
    assert interface_towards("tcp://127.0.0.1:9")[1] == "127.0.0.1"
    assert interface_towards("tcp://[::1]:9")[1] == "::1"
