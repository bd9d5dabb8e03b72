"""Pipes from workers to real server processes of the same host."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_processes import Served, Worker
from tests.support.trainer_runs import until
from tests.support.wire import REPORT, raw
from trainer.coordination.orders import StepMeasurements
from trainer.transport.addresses import local_addresses
from trainer.transport.messages.heads import unpack
from trainer.transport.messages.servers import Heartbeat, Push
from trainer.transport.pipes import MessagePipe


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
