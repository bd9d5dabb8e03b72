"""Hostile bytes against real server processes: from peers that the token admits, and from those that it does not."""

from __future__ import annotations

import ast
import itertools
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.auth
from zmq.utils.monitor import recv_monitor_message

from pipeline.core.errors import UsageError
from pipeline.spark.session import PACKAGE
from tests.campaigns.cable import LOOPBACK, Tap
from tests.clusters import free_ports
from tests.support.configs import change, make_config
from tests.support.sources import modules, nodes
from tests.support.trainer_runs import until
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import write_slice, write_state
from trainer.config import RunFacts, slice_bounds
from trainer.coordination.orders import ExampleOffer, OwnRound, Round, RowLosses, StepMeasurements, join_measurements
from trainer.coordination.passes import RowSums
from trainer.launch.control import Control
from trainer.server.rounds import BODY_BYTES
from trainer.transport import sockets as transport
from trainer.transport.addresses import local_addresses
from trainer.transport.agreement import Agreement
from trainer.transport.messages import (
    KINDS,
    AskStatus,
    Cancel,
    ChangeStage,
    CopyReceipt,
    End,
    EndReply,
    Execute,
    GiveUp,
    GossipContent,
    GossipOffer,
    GossipPool,
    GradientPiece,
    GradientReceipt,
    Heartbeat,
    Hello,
    Join,
    JoinReceipt,
    LinkLoss,
    Load,
    LoadReceipt,
    MalformedMessageError,
    Message,
    ModelCopy,
    NeighbourModel,
    NeighbourView,
    Parameters,
    PeerBeat,
    PeerJoin,
    PeerOffer,
    PeerView,
    PoolRequest,
    Push,
    RangeSum,
    Refusal,
    Regroup,
    Rejoin,
    Replacement,
    ReplicaCopy,
    RoundGrant,
    RoundReport,
    RunEnd,
    Settlement,
    StatusReply,
    Stop,
    StoreEntry,
    WantSnapshot,
    WorkerLoss,
    WriteCopy,
    WriteReceipt,
    most_report_bytes,
    pack,
    pack_json,
    pack_own_rounds,
    pack_report,
    pack_reports,
    pack_rounds,
    report_bytes,
    unpack,
    unpack_own_rounds,
    unpack_report,
    unpack_reports,
    unpack_rounds,
)
from trainer.transport.pipes import MessagePipe
from trainer.transport.sockets import Secret, connect
from trainer.worker.clients.base import MustRejoin, Turn
from trainer.worker.clients.servers import ServerClient
from trainer.worker.neighbour_replica import NeighbourReplica
from trainer.worker.replica import Replica

ROOT = PACKAGE.parent
SECRET = Secret("the token of these tests")
NUMBERS, WORKERS = 1000, 2
FACTS = RunFacts(WORKERS, 100, NUMBERS, 0)
# Code and fields of every kind, written down once more: what is on the wire must not change by accident.
WIRE: dict[type[Message], tuple[int, str]] = {
    Join: (0, "qq"),
    Push: (1, "qqqq?"),
    GiveUp: (2, "qqq"),
    Heartbeat: (3, "qq?"),
    Hello: (4, "qq"),
    JoinReceipt: (5, "qqqq"),
    GradientReceipt: (6, "qqqqq"),
    LoadReceipt: (7, "qq"),
    WriteReceipt: (8, "qqqq"),
    AskStatus: (9, ""),
    WorkerLoss: (10, "q"),
    End: (11, ""),
    StatusReply: (12, ""),
    EndReply: (13, ""),
    Refusal: (14, "q"),
    Parameters: (15, "qqqqq?"),
    Stop: (16, "qqqqq"),
    Cancel: (17, "qqq"),
    Rejoin: (18, "qqq?"),
    Load: (19, "qqq"),
    Execute: (20, "q"),
    PeerJoin: (21, "qqqqq"),
    PeerBeat: (22, "qqqq"),
    RoundReport: (23, "qqqq"),
    CopyReceipt: (24, "qqqqq"),
    LinkLoss: (25, "qqq"),
    Regroup: (26, "q"),
    Replacement: (27, "q"),
    PeerView: (28, "qqq"),
    WriteCopy: (29, "qq"),
    Settlement: (30, "qq"),
    WantSnapshot: (31, "qq"),
    RunEnd: (32, "q"),
    GradientPiece: (33, "qqq?"),
    RangeSum: (34, "qqq??"),
    ModelCopy: (35, "qq"),
    ChangeStage: (36, "q"),
    StoreEntry: (37, "q"),
    NeighbourView: (38, "qq"),
    RoundGrant: (39, "qqqq"),
    NeighbourModel: (40, "qqq"),
    ReplicaCopy: (41, "qqqq"),
    GossipOffer: (42, "qqq"),
    GossipPool: (43, "qqqqqqq"),
    GossipContent: (44, "qqq"),
    PeerOffer: (45, "qqqq"),
    PoolRequest: (46, "qqqq"),
}
# Of a mini-batch of one row that is not hashed, and whose loss is not kept, without examples for others.
REPORT = struct.pack("<iidddQQiiii", 1, 1, 0.5, 0.01, 0.0, 0, 0, -1, -1, -1, 0)
RUN: dict[str, Any] = {"steps": 10**6, "recipe": "constant", "learning_rate": 1.0, "momentum": 0.0}
EXTREMES = [0, 1, 2, -1, 7, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63)]
START = """
import json, sys
from pathlib import Path
from trainer.config import Config, RunFacts
from trainer.home.folders import Folders
from trainer.server.endpoint import Endpoint
from trainer.server.process import main
from trainer.transport.sockets import Secret
config, facts, index, addresses, token = json.loads(sys.argv[1])
folders = Folders.from_home(Path(config["run"]["output"]))
secret = Secret(token, config["processes"]["encryption"])
endpoint = Endpoint(index, addresses, secret, None, folders)
main(Config.from_json(config), RunFacts.from_json(facts), endpoint)
"""


def agreement(servers: int = 1, **values: Any) -> Agreement:
    """Of a host of such a run."""
    return Agreement.from_config(make_config("", "o", servers=servers, **RUN | values), FACTS)


INTRODUCTION = agreement().introduction()


class Served:
    """Real server processes of a run without supervisor, and what can be asked of them."""

    def __init__(self, folder: Path, servers: int, addresses: list[str], *, start: str = START, **values: Any) -> None:
        """start: the program of a server; values: of the configuration."""
        self.folder, self.addresses, self.servers, self.start = folder, addresses, servers, start
        waits = {"start_wait_s": 0.1, "checkpoint_every_s": 1e6}
        self.config = make_config("", folder, servers=servers, **RUN | waits | values)
        self.agreement = agreement(servers, **values)
        self.secret = Secret(SECRET.token, self.config.processes.encryption)
        self._first_checkpoint()
        self.processes = [self._start(index) for index in range(servers)]
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.asker = connect(self.context, addresses[0], self.secret)
        until(lambda: self.status()["ready"], "the servers are ready")

    def _first_checkpoint(self) -> None:
        root = folder_of(self.folder / "checkpoints", 0)
        zeros = np.zeros(NUMBERS, np.float32)
        write_slice(root, 0, 1, 0, 0, NUMBERS, NUMBERS, zeros, zeros)
        clocks = dict.fromkeys(range(WORKERS), 0)
        write_state(root, RunState(0, 0, 0, 0, 0.0, None, False, clocks, 0.0, 1, NUMBERS, 0, self.config.identity()))

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        what = [self.config.to_json(), FACTS.to_json(), index, self.addresses, SECRET.token]
        with open(self.folder / f"server-{index}.txt", "wb") as text:
            command = [sys.executable, "-c", self.start, json.dumps(what)]
            return subprocess.Popen(command, cwd=ROOT, stdout=text, stderr=subprocess.STDOUT)

    def status(self) -> dict[str, Any]:
        self.asker.send_multipart([pack(AskStatus()), self.agreement.introduction()])
        assert self.asker.poll(60_000), self.said()
        answer: dict[str, Any] = json.loads(self.asker.recv_multipart()[1])
        return answer

    def said(self) -> str:
        return "\n".join((self.folder / f"server-{index}.txt").read_text() for index in range(self.servers))

    def peer(self, server: int = 0) -> zmq.Socket[bytes]:
        """A connection that the token admits."""
        return connect(self.context, self.addresses[server], self.secret)

    def worker(self, index: int = 0, *, use_memory: bool = True) -> Worker:
        return Worker(self, self.client(index, use_memory=use_memory))

    def client(
        self,
        index: int = 0,
        secret: Secret | None = None,
        of: Agreement | None = None,
        *,
        use_memory: bool = True,
        addresses: list[str] | None = None,
    ) -> ServerClient:
        """A worker's end, perhaps of a host that has another token, another configuration or another way there."""
        where = addresses or self.addresses
        return ServerClient(of or self.agreement, FACTS, index, where, secret or self.secret, use_memory=use_memory)

    def wait_for_malformed(self, count: int) -> None:
        until(lambda: self._all_alive() and self.status()["malformed"] >= count, f"{count} malformed messages")
        assert self.status()["malformed"] == count

    def _all_alive(self) -> bool:
        assert all(process.poll() is None for process in self.processes), self.said()
        return True

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.context.destroy(linger=0)


class Worker:
    """An honest worker that pushes ones, so that every number tells how many gradients were applied."""

    def __init__(self, served: Served, client: ServerClient) -> None:
        self.served, self.client = served, client
        self.turn: Turn | None = client.join()

    def step(self) -> None:
        """One gradient into the model, whatever it takes."""
        version = self.served.status()["version"]
        while self.served.status()["version"] == version:
            assert self.turn
            self.client.pushed[:] = 1.0
            try:
                self.turn = self.client.exchange(self.turn, StepMeasurements(1, 0.5, 1, 0.01))
            except MustRejoin:
                self.turn = self.client.join()

    def check(self) -> None:
        """Each update subtracts rate 1.0 / 2 workers from every number, on every server."""
        self.step()
        assert self.turn
        np.testing.assert_array_equal(self.client.pulled, np.full(NUMBERS, -0.5 * self.turn.version))
        assert self.served.status()["version"] == self.turn.version


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server."""
    served = Served(tmp_path_factory.mktemp("alone"), 1, local_addresses(f"wire-{time.time_ns()}", 1))
    yield served
    served.end()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Served]:
    """Two servers, for what only a follower hears."""
    served = Served(tmp_path, 2, local_addresses(f"wire-{time.time_ns()}", 2))
    yield served
    served.end()


@pytest.fixture(params=["on", "off"])
def networked(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server reached over TCP, as from other hosts, with --encryption on or off."""
    served = Served(tmp_path, 1, [f"tcp://127.0.0.1:{free_ports(1)[0]}"], encryption=request.param)
    yield served
    served.end()


@pytest.fixture
def honest(alone: Served) -> Iterator[Worker]:
    """A worker that has done a step before the test, and must be able to do another after it."""
    worker = alone.worker()
    worker.step()
    yield worker
    worker.check()
    worker.client.close()


def losses_of(rows: int) -> bytes:
    """The numbers of a report with the losses of some rows."""
    return REPORT[:-12] + struct.pack("<iii", rows, -1, 0)


def raw(kind: type[Message], *values: int, code: int | None = None, magic: bytes = b"PS2") -> bytes:
    """The head of a message, valid or not. values: of its first fields; the others are 0."""
    number, fields = WIRE[kind]
    values += (0,) * (len(fields) - len(values))
    return struct.pack(f"<3sB{fields}", magic, number if code is None else code, *values)


def join(body: bytes) -> list[bytes]:
    """A request of worker 1, from a session later than any test's: a server does not look into one of an earlier session."""
    return [raw(Join, 1, 2**62), body]


def handle(**values: Any) -> bytes:
    return agreement().introduction(**{"pid": os.getpid(), "descriptor": 0, "nonce": "0" * 64} | values)


def huge(number: str) -> bytes:
    return INTRODUCTION[:-1] + b',"pid":' + number.encode() + b',"descriptor":1,"nonce":""}'


HEAD = raw(AskStatus)
MALFORMED: dict[str, list[bytes]] = {
    "nothing": [b""],
    "one frame": [HEAD],
    "three frames": [HEAD, b"", b""],
    "a push without a report": [raw(Push), bytes(4 * NUMBERS)],
    "fifty frames": [b"x"] * 50,
    "fifty frames behind a head": [HEAD] + [b"x"] * 49,
    "an empty head": [b"", b""],
    "a head of magic alone": [b"PS2", b""],
    "a short head": [raw(Join)[:-1], INTRODUCTION],
    "a long head": [HEAD + b"x", b""],
    "a head of another kind's size": [raw(Join) + bytes(8), INTRODUCTION],
    "another version's magic": [raw(AskStatus, magic=b"PS0"), b""],
    "a kind that does not exist": [raw(AskStatus, code=len(WIRE)), b""],
    "a megabyte of noise": [random.Random(0).randbytes(10**6), b""],
    "an order from a worker": [raw(Execute), pack_json({"sequence": 1, "version": 9, "accepted": [[0, 1.0]]})],
    "a load from a worker": [raw(Load, 2**62), b""],
    "an answer": [raw(Parameters), bytes(4 * NUMBERS)],
    "a stop": [raw(Stop), b""],
    "a hello of server 0": [raw(Hello, 0), INTRODUCTION],
    "a hello of a server too many": [raw(Hello, 1), INTRODUCTION],
    "a hello of server -1": [raw(Hello, -1), INTRODUCTION],
    "a loaded of a server too many": [raw(LoadReceipt, 1), b""],
    "a join held of a server too many": [raw(JoinReceipt, 1, 0, 1, 1), b""],
    "a gradient held of a server too many": [raw(GradientReceipt, 1, 0, 1, 1, 1), b""],
    "an outcome that does not exist": [raw(WriteReceipt, 1, 0, 1, 99), b""],
    "a loss of worker -1": [raw(WorkerLoss, -1), INTRODUCTION],
    "a heartbeat of worker 2": [raw(Heartbeat, WORKERS), b""],
    "a join of worker 2": [raw(Join, WORKERS, 1), INTRODUCTION],
    "a join of worker -1": [raw(Join, -1, 1), INTRODUCTION],
    "a join of a session that no clock has": [raw(Join, 1, -1), INTRODUCTION],
    "a push of a generation that no clock has": [raw(Push, 0, 1, -(2**63)), REPORT, bytes(4 * NUMBERS)],
    "a push of step -1": [raw(Push, 0, 1, 1, -1), REPORT, bytes(4 * NUMBERS)],
    "a push of worker -1": [raw(Push, -(2**31), 1, 1, 1), REPORT, bytes(4 * NUMBERS)],
    "a push with half a report": [raw(Push), REPORT[:-1], bytes(4 * NUMBERS)],
    "a push with losses of fewer rows": [raw(Push), losses_of(1) + bytes(12), bytes(4 * NUMBERS)],
    "a push with losses of other rows": [raw(Push), losses_of(2) + bytes(26), bytes(4 * NUMBERS)],
    "a push with losses of -2 rows": [raw(Push), losses_of(-2), bytes(4 * NUMBERS)],
    "a step given up without a report": [raw(GiveUp), b""],
    "a join without JSON": join(b"no"),
    "a join with nothing": join(b""),
    "a join with a list": join(b"[1]"),
    "a join with half a handle": join(agreement().introduction(pid=1)),
    "a join without an introduction": join(b"{}"),
    "a join with a number for an introduction": join(b'{"run": 1}'),
    "a status without an introduction": [raw(AskStatus), b""],
    "a loss without an introduction": [raw(WorkerLoss, 1), b"{}"],
    "a join with a path": join(handle(pid="../../../etc", descriptor="passwd")),
    "a join with endless numbers": join(huge("1e999")),
    "a join with no number": join(huge("NaN")),
    "a join with ten thousand digits": join(huge("9" * 10_000)),
    "a join with half a character": join(huge("1").replace(b'""', b'"\\ud800"')),
    "a join a hundred thousand deep": join(b'{"a":' * 100_000),
    "a join of lists in lists": join(b"[" * 500_000),
    "a join of a megabyte": join(b'{"a":"' + b"x" * (1 << 20) + b'"}'),
    "a join in bytes that are no text": join(b"\xff\xfe\x00\xd8{}"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_carries_the_fields_of_its_kind_and_no_others(kind: type[Message]) -> None:
    code, fields = WIRE[kind]
    values: list[Any] = [number % 2 == 0 if field == "?" else 10 + number for number, field in enumerate(fields)]
    message = kind(*values)
    assert pack(message) == struct.pack(f"<3sB{fields}", b"PS2", code, *values)
    assert unpack(memoryview(pack(message))) == message
    for place, field in enumerate(fields):
        if field == "q":
            with pytest.raises(MalformedMessageError):
                unpack(raw(kind, *values[:place], -1))


def test_a_report_is_the_same_on_the_other_side() -> None:
    for report in (
        StepMeasurements(1, 0.5, 1, 0.01),
        StepMeasurements(7, -1.5, 3, 2.0, 0.25, RowSums(2**64 - 1, 3, 1)),
    ):
        assert unpack_report(pack_report(report)) == report
    assert pack_report(StepMeasurements(1, 0.5, 1, 0.01)) == REPORT


def test_a_report_carries_the_ids_of_examples_for_others() -> None:
    plain = StepMeasurements(1, 0.5, 1, 0.01)
    offered = plain._replace(offer=ExampleOffer(3, (2**62, -5)))
    assert len(pack_report(offered)) == report_bytes(offered) == most_report_bytes(0, 2)
    reports = (offered, plain, offered, offered)
    assert unpack_reports(pack_reports(reports)) == reports
    assert unpack_rounds(pack_rounds([Round(True, reports)]), 4) == [Round(True, reports)]
    assert unpack_own_rounds(pack_own_rounds([OwnRound(9, offered, (4,))])) == [OwnRound(9, offered, (4,))]
    body = pack_report(offered)
    for count, epoch in ((3, 3), (0, 3), (-2, 3), (2, -1)):
        with pytest.raises(MalformedMessageError):
            unpack_report(body[:-24] + struct.pack("<ii", count, epoch) + body[-16:])


def test_a_worker_waits_before_its_rounds_exceed_a_message() -> None:
    """Rounds with the losses of rows are long; without losses, the limit on their number is reached first."""
    rows = RowLosses(np.arange(1 << 16), np.zeros(1 << 16, np.float32), np.zeros(1 << 16, np.bool_))
    long = StepMeasurements(1 << 16, 0.5, 1, 0.01, row_losses=rows)
    assert len(pack_report(long)) == report_bytes(long) == most_report_bytes(1 << 16)
    assert len(pack_report(long._replace(row_losses=None))) == most_report_bytes(0)
    shared = SimpleNamespace(snapshots={}, version=0, num_workers=2, rounds=[Round(False, (long, long))] * 8)
    own = SimpleNamespace(copies={}, rounds=[OwnRound(0, long)] * 16)
    for replica, kind in ((shared, Replica), (own, NeighbourReplica)):
        must_wait = vars(kind)["must_wait"].fget  # of the class, because a whole replica needs a network
        assert not must_wait(replica)
        replica.rounds += replica.rounds[:8]
        assert must_wait(replica)
    assert len(pack_rounds(shared.rounds)) < BODY_BYTES


def test_losses_of_rows_are_the_same_on_the_other_side() -> None:
    """Also of a mini-batch without rows, between other reports, and in rounds of both kinds."""
    plain = StepMeasurements(1, 0.5, 1, 0.01)
    rows = RowLosses(np.array([2**40, 3]), np.array([0.25, 1.5], np.float32), np.array([True, False]))
    nothing = RowLosses(*(np.empty(0, column.dtype) for column in rows))
    long = StepMeasurements(2, 0.875, 1, 0.5, 0.25, RowSums(7, 3, 1), rows)
    mixed = join_measurements([long, plain, long])  # plain: of other workers' examples, whose losses do not count
    assert (mixed.examples, len(mixed.row_losses or ()), mixed.row_losses and len(mixed.row_losses.ids)) == (5, 3, 4)
    reports = (long, mixed, plain._replace(examples=0, row_losses=nothing), plain, mixed, long)

    def text(each: StepMeasurements) -> str:
        rows = [(column.dtype, column.tolist()) for column in each.row_losses or ()]
        return f"{each._replace(row_losses=None)} {rows}"

    expected = [text(each) for each in reports]
    assert [text(each) for each in unpack_reports(pack_reports(reports))] == expected
    parts = [Round(flag, reports[begin : begin + 2]) for begin, flag in ((0, True), (2, False), (4, True))]
    rounds = unpack_rounds(pack_rounds(parts), 2)
    assert [text(each) for round in rounds for each in round.reports] == expected
    assert [round.snapshot for round in rounds] == [True, False, True]
    own = unpack_own_rounds(pack_own_rounds([OwnRound(9, each, (4, 2)) for each in reports]))
    assert [text(round.report) for round in own] == expected
    assert {(round.sent_bytes, round.changed) for round in own} == {(9, (4, 2))}
    for unpack_all in (lambda data: unpack_rounds(data, 2), unpack_reports, unpack_own_rounds):
        with pytest.raises(MalformedMessageError):
            unpack_all(pack_reports(reports)[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", MALFORMED)
def test_what_no_peer_of_this_version_sends_is_counted_and_dropped(alone: Served, honest: Worker, kind: str) -> None:
    before = alone.status()["malformed"]
    peer = alone.peer()
    peer.send_multipart(MALFORMED[kind])
    alone.wait_for_malformed(before + 1)
    assert not peer.poll(0), "it is not answered"


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [{"pid": 1}, {"pid": 2**22 + 1}, {"pid": -1}, {"descriptor": 10**300}, {"pid": 0}, {"nonce": "x" * 10**5}],
    ids=lambda values: str(values)[:30],
)
def test_foreign_memory_is_declined_and_the_socket_used(alone: Served, honest: Worker, values: dict[str, Any]) -> None:
    peer = alone.peer()
    peer.send_multipart([raw(Join, 1, time.time_ns()), handle(**values)])
    assert peer.poll(60_000)
    head, body = peer.recv_multipart()
    answer = unpack(head)
    assert isinstance(answer, Parameters)
    assert not answer.in_memory
    assert len(body) == 4 * NUMBERS


def joined(alone: Served, peer: zmq.Socket[bytes]) -> tuple[int, int, int, int]:
    """Take worker 1's place by hand; (worker, session, generation, clock) of the answer."""
    peer.send_multipart([raw(Join, 1, time.time_ns()), INTRODUCTION])
    assert peer.poll(60_000)
    answer = unpack(peer.recv_multipart()[0])
    assert isinstance(answer, Parameters)
    return answer[:4]


@pytest.mark.slow
def test_a_heartbeat_that_overtakes_the_join_request_does_not_undo_it(
    alone: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.worker.clients.servers.HEARTBEAT_S", 0.01)
    client = alone.client(use_memory=False)
    send_join = client._send_join

    def late() -> None:
        time.sleep(0.2)  # beats of this session come first, and are answered
        send_join()

    monkeypatch.setattr(client, "_send_join", late)
    turn = client.join()
    for _ in range(5):
        assert turn
        time.sleep(0.03)
        client.pushed[:] = 1.0
        turn = client.exchange(turn, StepMeasurements(1, 0.5, 1, 0.01))
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, 4 * NUMBERS - 4, 4 * NUMBERS + 4, 4 * NUMBERS * 10])
def test_a_gradient_of_another_size_is_not_taken(alone: Served, honest: Worker, size: int) -> None:
    peer, before = alone.peer(), alone.status()
    peer.send_multipart([raw(Push, *joined(alone, peer)), REPORT, bytes(size)])
    alone.wait_for_malformed(before["malformed"] + 1)
    assert alone.status()["version"] == before["version"]


@pytest.mark.slow
def test_a_gradient_in_memory_that_was_never_opened_is_not_taken(alone: Served, honest: Worker) -> None:
    peer, before = alone.peer(), alone.status()["malformed"]
    peer.send_multipart([raw(Push, *joined(alone, peer), True), REPORT, b""])
    alone.wait_for_malformed(before + 1)


@pytest.mark.slow
def test_steps_on_one_host_pass_through_pipes_only(
    alone: Served, honest: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[int] = []
    sent: list[bytes] = []
    monkeypatch.setattr(honest.client, "_receive", received.append)
    monkeypatch.setattr("trainer.worker.clients.servers.offer", lambda socket, *frames: sent.append(frames[0]))
    for _ in range(3):
        assert honest.turn
        honest.client.pushed[:] = 1.0
        honest.turn = honest.client.exchange(honest.turn, StepMeasurements(1, 0.5, 1, 0.01))
    assert not received
    assert not [head for head in sent if isinstance(unpack(head), Push)]  # heartbeats there may be


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [b"x", bytes(100), raw(Heartbeat) + REPORT, raw(Push) + REPORT[:-1], raw(Push, -1) + REPORT, raw(Push)],
    ids=lambda data: data[:8].hex(),
)
def test_malformed_bytes_in_a_pipe_are_dropped(alone: Served, honest: Worker, data: bytes) -> None:
    writer, before = honest.client.writers[0], alone.status()["malformed"]
    assert writer
    assert writer.offer(data)
    alone.wait_for_malformed(before + 1)


@pytest.mark.slow
def test_pushes_of_strangers_in_a_pipe_change_nothing(alone: Served, honest: Worker) -> None:
    writer, before = honest.client.writers[0], alone.status()
    assert writer
    for head in (raw(Push, 2**62), raw(Push, 0), raw(Push, 0, honest.client.session), raw(Push, 1, 0, 0, 0, True)):
        assert writer.offer(head + REPORT)
    honest.step()
    assert alone.status()["version"] == before["version"] + 1


@pytest.mark.slow
def test_a_push_that_a_pipe_refuses_goes_through_the_socket(
    alone: Served, honest: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.transport.pipes.MOST_BYTES", 0)
    honest.check()


@pytest.mark.slow
@pytest.mark.parametrize("values", [{"pid": 1}, {"inode": 0}, {"descriptor": 0}], ids=str)
def test_a_foreign_pipe_is_declined_and_the_socket_used(
    alone: Served, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]
) -> None:
    own = MessagePipe.handle
    monkeypatch.setattr(MessagePipe, "handle", lambda pipe: own(pipe) | values)
    worker = alone.worker()
    assert worker.client.in_memory == [True]
    worker.check()
    worker.client.close()


@pytest.mark.slow
def test_a_worker_uses_the_pipe_of_a_restarted_server(tmp_path: Path) -> None:
    """The first server dies with a push in its pipe, which it never reads."""
    served = Served(tmp_path, 1, local_addresses(f"wire-{time.time_ns()}", 1))
    worker = served.worker()
    worker.step()
    before = worker.client.writers[0]
    assert before
    served.processes[0].send_signal(signal.SIGSTOP)
    assert worker.turn
    assert before.offer(raw(Push, 0, worker.client.session, worker.turn.generation, worker.turn.clock, True) + REPORT)
    served.processes[0].kill()
    served.processes[0].wait()
    assert not before.offer(b"anybody?")
    served.processes[0] = served._start(0)
    until(lambda: served.status()["ready"], "the server is ready again")
    worker.check()
    assert worker.client.writers[0] not in (None, before)
    worker.client.close()
    served.end()


@pytest.mark.slow
def test_a_gradient_of_another_generation_makes_its_worker_rejoin(alone: Served, honest: Worker) -> None:
    peer, before = alone.peer(), alone.status()
    worker, session, generation, clock = joined(alone, peer)
    for head in (
        raw(Push, worker, session - 1, generation, clock),
        raw(Push, worker, session, generation - 1, clock),
        raw(Push, worker, session, generation, clock + 1),
        raw(Push, worker, session, generation, 2**63 - 1),
        raw(Push, 2**31 - 1, session, generation, clock),
        raw(Push, 2**63 - 1, session, generation, clock),
    ):
        peer.send_multipart([head, REPORT, np.full(NUMBERS, 99, np.float32).tobytes()])
        assert peer.poll(60_000)
        assert isinstance(unpack(peer.recv_multipart()[0]), Rejoin)
    assert alone.status()["version"] == before["version"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_messages_from_an_admitted_peer_change_nothing(alone: Served, honest: Worker, seed: int) -> None:
    """Fields at their limits in a valid head, then random bodies; every kind is among them."""
    rng, peer = random.Random(seed), alone.peer()
    for kind in [*WIRE] * 20:
        least = rng.choice([0, -(2**63)])  # a negative field makes the whole message malformed
        limits = [value for value in EXTREMES if value >= least]
        values = [rng.choice([*limits, rng.getrandbits(31)]) for _ in WIRE[kind][1]]
        if kind is Join:  # a worker's place is taken by who joins last: not by a time that no honest worker reaches
            values[1] = rng.getrandbits(40)
        ints = [rng.choice([0, 1, -1, 2**31 - 1, -(2**31)]) for _ in range(3)]
        floats = [rng.choice([0.0, -1.0, float("inf"), float("nan"), 1e308]) for _ in range(3)]
        report = struct.pack("<iidddQQi", *ints[:2], *floats, rng.getrandbits(64), rng.getrandbits(64), ints[2])
        body = rng.choice([b"", b"{}", INTRODUCTION, rng.randbytes(30), bytes(4 * NUMBERS), b"[[" * 50, handle()])
        bodies = [report, body] if kind is Push else [rng.choice([report, body])]
        peer.send_multipart([raw(kind, *values), *bodies])
    sizes = [0, 1, *{len(raw(kind)) + more for kind in WIRE for more in (-1, 0, 1)}]
    for _ in range(200):
        peer.send_multipart([rng.randbytes(rng.choice(sizes)) for _ in range(rng.randint(1, 5))])
    before = alone.status()["malformed"]
    peer.send_multipart([b"the last"])
    until(lambda: alone.status()["malformed"] > before, "all of it has been read")
    honest.check()


@pytest.mark.slow
def test_a_message_beyond_any_slice_ends_its_connection_and_no_other(alone: Served, honest: Worker) -> None:
    peer = alone.peer()
    monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    peer.send_multipart([raw(Push), REPORT, bytes(50 << 20)])
    assert monitor.poll(60_000)
    peer.disable_monitor()


@pytest.mark.slow
@pytest.mark.full
def test_a_follower_takes_orders_from_nobody_but_server_0(pair: Served) -> None:
    worker, peer = pair.worker(), pair.peer(server=1)
    worker.step()
    order = {
        "sequence": 3,
        "version": 9,
        "rate": 1.0,
        "accepted": [[0, 1.0]],
        "unblocked": [],
        "stop": [],
        "snapshot": False,
    }
    to_others = (Execute, Load, Hello, JoinReceipt, GradientReceipt, LoadReceipt, AskStatus, WorkerLoss, End, Heartbeat)
    for kind in to_others:
        peer.send_multipart([raw(kind, *[1, 2**62][: len(WIRE[kind][1])]), pack_json(order)])
    until(lambda: pair.said().count("malformed") == len(to_others), "all of them are dropped")
    worker.check()
    worker.client.close()


@pytest.mark.slow
def test_messages_about_unknown_workers_change_nothing(pair: Served) -> None:
    worker, peer = pair.worker(), pair.peer()
    worker.step()
    assert worker.turn
    generation = worker.turn.generation
    for server, number in itertools.product((0, 2, -1, 2**31 - 1), (0, 1, 2, -1)):
        peer.send_multipart([raw(JoinReceipt, server, 7, number, 7), b""])
        peer.send_multipart([raw(GradientReceipt, server, 7, number, 7), b""])
        peer.send_multipart([raw(LoadReceipt, server, 7), b""])
        peer.send_multipart([raw(Hello, server, 7), b""])
    for number in (-1, 0, 1, 2):
        peer.send_multipart([raw(GradientReceipt, 1, generation, number, 7), b""])
    peer.send_multipart([raw(LoadReceipt, 1, 2**62), b""])
    worker.check()
    assert worker.turn.generation == generation, "no roll-back"
    worker.client.close()


@pytest.mark.slow
def test_a_starting_server_ignores_late_checkpoint_messages(tmp_path: Path) -> None:
    """A follower that outlived server 0 may tell the next one that it has loaded what the last one wanted."""
    addresses = local_addresses(f"wire-{time.time_ns()}", 2)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    early = connect(context, addresses[0], SECRET)
    for generation in (0, 1, 2**62):
        early.send_multipart([raw(LoadReceipt, 1, generation), b""])
    served = Served(tmp_path, 2, addresses)
    worker = served.worker()
    worker.check()
    worker.client.close()
    served.end()
    context.destroy(linger=0)


def refused(peer: zmq.Socket[bytes], address: str) -> None:
    """Connect, and wait until the server has ended the connection before hearing a word."""
    monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | HANDSHAKE_FAILED)
    peer.linger = 0
    peer.connect(address)
    with suppress(zmq.Again):  # the connection may have ended already
        peer.send_multipart([b"malformed, if it were heard"], zmq.NOBLOCK)
    assert monitor.poll(60_000)
    recv_monitor_message(monitor)
    assert not peer.poll(0)
    peer.disable_monitor()
    peer.close()


HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def strangers(context: zmq.Context[zmq.Socket[bytes]]) -> Sequence[zmq.Socket[bytes]]:
    """Peers without the token, by every mechanism of ZeroMQ."""
    public, secret = zmq.curve_keypair()
    nobody, unnamed, wrong, other, known = (context.socket(zmq.DEALER) for _ in range(5))
    unnamed.plain_username, unnamed.plain_password = b"someone", b"?"
    wrong.plain_username, wrong.plain_password = b"run", SECRET.password("ipc://@another-run").encode()
    other.curve_serverkey, other.curve_publickey, other.curve_secretkey = zmq.curve_keypair()[0], public, secret
    known.curve_serverkey = SECRET.keys("server")[0]  # a public key may leak; it admits nobody
    known.curve_publickey, known.curve_secretkey = public, secret
    return nobody, unnamed, wrong, other, known


@pytest.mark.slow
def test_on_this_host_nobody_without_the_token_is_heard(alone: Served, honest: Worker) -> None:
    before = alone.status()["malformed"]
    for stranger in strangers(alone.context):
        refused(stranger, alone.addresses[0])
    assert alone.status()["malformed"] == before


@pytest.mark.slow
def test_over_a_network_nobody_without_the_token_is_heard(networked: Served) -> None:
    worker = networked.worker(use_memory=False)
    for stranger in strangers(networked.context):
        refused(stranger, networked.addresses[0])
    assert networked.status()["malformed"] == 0
    worker.check()
    worker.client.close()


@pytest.mark.slow
def test_gradients_are_read_on_the_way_only_with_encryption_off(networked: Served) -> None:
    """A peer between worker and server reads gradients, parameters and a password, and never the token."""
    tap = Tap(int(networked.addresses[0].rpartition(":")[2]))
    client = networked.client(use_memory=False, addresses=[f"tcp://{LOOPBACK}:{tap.port}"])
    turn = client.join()
    assert turn
    client.pushed[:] = np.random.default_rng(0).normal(size=NUMBERS)
    assert client.exchange(turn, StepMeasurements(1, 0.5, 1, 0.01))
    clear = networked.secret.encryption == "off"
    for vector in (client.pushed, client.pulled):
        assert vector.any()
        assert tap.carried(vector.tobytes()) == clear
    assert tap.carried(networked.secret.password(networked.addresses[0]).encode()) == clear
    assert not tap.carried(SECRET.token.encode())
    client.close()
    tap.close()


@pytest.mark.slow
def test_what_is_read_with_encryption_off_admits_to_no_other_address(networked: Served) -> None:
    """The password of TCP addresses opens neither the private ones nor servers whose encryption is on."""
    read = networked.secret.password(networked.addresses[0])
    assert read != networked.secret.password("ipc://@trainer-run-0")
    assert read == networked.secret.password("tcp://another-name:7000")
    peer = networked.context.socket(zmq.DEALER)
    peer.plain_username, peer.plain_password = b"run", read.encode()
    if networked.secret.encryption == "on":
        refused(peer, networked.addresses[0])
    else:
        peer.close()


@pytest.mark.slow
def test_a_host_with_another_encryption_is_told_so(networked: Served) -> None:
    other = Secret(SECRET.token, "off" if networked.secret.encryption == "on" else "on")
    client = networked.client(1, other)
    with pytest.raises(UsageError) as refused:
        client.join()
    assert str(refused.value) == "the servers have another --encryption than this host: give every host the same"
    client.close()


@pytest.mark.slow
def test_a_worker_with_another_token_is_told_so_on_this_host(alone: Served) -> None:
    client = alone.client(1, Secret("another token, of another run"))
    time.sleep(0.5)  # the answer may be there before it has asked: then no message will ever leave it
    with pytest.raises(UsageError, match="token"):
        client.join()
    client.close()


@pytest.mark.slow
def test_a_supervisor_with_another_token_is_told_so_on_this_host(alone: Served) -> None:
    control = Control(alone.addresses[0], Secret("another token, of another run"), alone.agreement)
    with pytest.raises(UsageError, match="token"):
        until(control.ask, "an answer", seconds=20)
    control.close()


@pytest.mark.slow
@pytest.mark.full
def test_a_worker_with_another_token_is_told_so_over_a_network(
    networked: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "REFUSED_AFTER_S", 1.0)
    client = networked.client(1, Secret("another token, of another run", networked.secret.encryption))
    with pytest.raises(UsageError, match="token"):
        client.join()
    client.close()


@pytest.mark.slow
def test_a_worker_of_another_configuration_learns_the_difference(alone: Served, honest: Worker) -> None:
    client = alone.client(0, of=agreement(batch_size=64))  # it takes the place of one that is there
    with pytest.raises(UsageError) as refused:
        client.join()
    assert str(refused.value) == (
        "--batch-size is 64 here and 128 on the host of server 0: give every host the same command"
    )
    client.close()
    turn = honest.turn
    honest.step()
    assert turn
    assert honest.turn
    assert (honest.turn.generation, honest.turn.clock) == (turn.generation, turn.clock + 1)


@pytest.mark.slow
def test_a_supervisor_of_another_configuration_changes_nothing(alone: Served, honest: Worker) -> None:
    before = alone.status()["alive"]
    control = Control(alone.addresses[0], SECRET, agreement(servers=2))
    control.tell(WorkerLoss(0))
    with pytest.raises(UsageError, match=r"^--servers is 2 here and 1 on the host of server 0: .* same command$"):
        until(control.ask, "an answer")
    control.close()
    assert alone.status()["alive"] == before


@pytest.mark.slow
@pytest.mark.full
def test_a_server_of_another_configuration_ends_with_a_line(pair: Served, tmp_path: Path) -> None:
    worker = pair.worker()
    worker.step()
    pair.processes[1].kill()
    pair.processes[1].wait()
    right, pair.config = pair.config, change(pair.config, momentum=0.5)
    wrong = pair._start(1)
    wrong.wait(60)
    assert "--momentum is 0.5 here and 0.0 on the host of server 0" in (tmp_path / "server-1.txt").read_text()
    pair.config = right
    pair.processes[1] = pair._start(1)
    worker.check()
    worker.client.close()


@pytest.mark.parametrize(
    ("theirs", "line"),
    [
        ({"seed": 1}, "--seed is 0 here and 1 on the host of server 0: give every host the same command"),
        (
            {"protocol": "bsp"},
            "--protocol is asp here and bsp on the host of server 0: give every host the same command",
        ),
        ({"model": "cnn", "norm": "group"}, "--model is resnet20 here and cnn on the host of server 0: give every"),
        ({"protocol": "ssp"}, "--protocol is asp here"),
        ({"device": "cpu", "threads": 3, "checkpoint_every_s": 5.0, "start_wait_s": 1.0}, None),
    ],
)
def test_hosts_agree_on_what_decides_the_result_and_on_nothing_else(theirs: dict[str, Any], line: str | None) -> None:
    mine, other = agreement(), agreement(**theirs)
    assert (mine.digest == other.digest) == (line is None)
    if line:
        assert str(mine.refused(other.refusal())).startswith(line)


def test_hosts_of_other_shards_do_not_agree() -> None:
    config = make_config("", "o", **RUN)
    mine, other = (Agreement.from_config(config, replace(FACTS, shards=digest)) for digest in ("f00d", "beef"))
    assert mine.digest != other.digest
    assert str(mine.refused(other.refusal())) == (
        "shard digest is f00d here and beef on the host of server 0: give every host the same shards"
    )


def forbidden(tree: Iterable[ast.AST]) -> Iterator[str]:
    """Names in a module that turn bytes into code or objects."""
    for node in tree:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"} & {
                n.split(".")[0] for n in names
            }
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield from {"eval", "exec", "compile", "__import__"} & {node.func.id}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            called = {f"{owner}.{node.func.attr}", f".{node.func.attr}"}
            if owner == "super()":  # of a ZeroMQ socket, whose recv returns bytes
                called.discard(".recv")
            yield from {"torch.load", "np.load", ".recv_pyobj", ".recv_serialized", ".recv"} & called


def test_nothing_in_the_trainer_turns_bytes_into_objects_or_code() -> None:
    """``recv`` of a multiprocessing pipe unpickles; ``recv_bytes`` does not."""
    paths = [path for path in modules() if path.is_relative_to(ROOT / "trainer")]
    assert paths
    for path in paths:
        assert list(forbidden(nodes(path))) == [], path
    assert list(forbidden(ast.walk(ast.parse("import pickle\neval('1')\ntorch.load(f)\npipe.recv()")))) != []


def test_the_bounds_of_the_tests_are_those_of_the_servers() -> None:
    assert slice_bounds(NUMBERS, 2) == [(0, 500), (500, 1000)]
