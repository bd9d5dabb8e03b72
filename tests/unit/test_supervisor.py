"""A supervisor in this process, with roles that have ended before it looks, and a server 0 that a test plays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import zmq

from tests.clusters import free_ports
from tests.support.configs import make_config
from trainer.config import RunFacts
from trainer.home.folders import Folders
from trainer.home.work import WorkFolder
from trainer.launch import role_processes
from trainer.launch.fork_server import cause_of
from trainer.launch.overseer import Wanted
from trainer.launch.supervisor import Supervisor
from trainer.lifecycle.interruption import RunInterruptedError
from trainer.options import Options, Role
from trainer.transport.bodies.json_object import pack_json
from trainer.transport.messages.heads import pack
from trainer.transport.messages.supervisors import StatusReply
from trainer.transport.sockets import Secret, close, serve
from trainer.transport.status import NOT_READY, RunStatus

SECRET = Secret("the token of these tests")


class Recorder:
    """An overseer that notes what it is shown."""

    def __init__(self) -> None:
        self.shown: list[RunStatus] = []

    def wanted(self) -> Wanted:
        return "go"

    def update(self, status: RunStatus) -> None:
        self.shown.append(status)

    def message(self, text: str) -> None: ...
    def close(self) -> None: ...


class EndedRole:
    """A process that has ended well. on_look: called when the supervisor looks whether it has."""

    trouble = ""

    def __init__(self, on_look: Callable[[], object]) -> None:
        self.on_look = on_look
        self.sentinel, other_end = Pipe()
        other_end.close()  # so that it is ready

    def exit_code(self) -> int:
        self.on_look()
        return 0

    def cause(self) -> str:
        return "exit code 0"

    def kill(self) -> None: ...


@pytest.mark.parametrize(
    ("code", "words"), [(1, "exit code 1"), (-9, "killed by SIGKILL"), (-40, "killed by signal 40")]
)
def test_the_end_of_a_process_has_its_cause_in_words(code: int, words: str) -> None:
    assert cause_of(code) == words


@pytest.mark.parametrize(("kind", "version"), [("server", " at version 7 (epoch 1.50)"), ("worker", "")])
def test_only_the_leading_host_names_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, version: str
) -> None:
    """The other hosts may end before the last checkpoint is written."""
    config = make_config("s", tmp_path)
    state = SimpleNamespace(version=7, epoch=1.5)
    monkeypatch.setattr("trainer.lifecycle.interruption.newest_state", lambda root: state)
    monkeypatch.setattr("trainer.launch.supervisor.wait_for_checkpoint", lambda *arguments: None)
    work = WorkFolder(Folders.from_home(tmp_path))
    host = Supervisor(config, RunFacts(1, 100, 10, 0), Options(), ["tcp://h:1"], SECRET, work, [Role(kind, 0)])
    host.interrupted = True
    with closing(host), pytest.raises(RunInterruptedError) as error:
        host.run()
    assert str(error.value) == f"interrupted{version}; the same command with --resume continues"


class Leader:
    """Server 0, played in a thread: it reports version 1, and once more a later one when it is told to."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = serve(self.context, address, SECRET, 1 << 20)
        self.last = threading.Event()

    def run(self) -> None:
        identity = b""
        status = replace(NOT_READY, ready=True, version=1)
        while not self.last.is_set():
            while self.socket.poll(10):
                identity = self.socket.recv_multipart()[0]
                self._report(identity, status)
        self._report(identity, replace(status, version=2))

    def _report(self, identity: bytes, status: RunStatus) -> None:
        self.socket.send_multipart([identity, pack(StatusReply()), pack_json(status.to_json())])


@pytest.mark.parametrize(
    ("kind", "exchange", "has_started", "limit_s"),
    [
        ("worker", "all-reduce", False, 15),
        ("worker", "all-reduce", True, 2),
        ("worker", "strategy-switch", True, 2),
        ("worker", "parameter-server", True, 15),
        ("evaluator", "all-reduce", True, 15),
    ],
)
def test_a_worker_that_others_await_is_given_less_time(
    tmp_path: Path, kind: Any, exchange: str, has_started: bool, limit_s: float
) -> None:
    config = make_config("s", tmp_path, exchange=exchange)
    work, limits = WorkFolder(Folders.from_home(tmp_path)), []
    child: Any = SimpleNamespace(has_started=has_started, hangs=lambda heartbeat_s, stall_s: limits.append(heartbeat_s))
    host = Supervisor(config, RunFacts(1, 100, 10, 0), Options(), ["tcp://h:1"], SECRET, work, [Role("worker", 0)])
    host.processes._hang_of(Role(kind, 0), child)
    assert limits == [limit_s]


def test_a_fork_server_that_cannot_start_now_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = WorkFolder(Folders.from_home(tmp_path))
    roles = [Role("worker", 0)]
    host = Supervisor(
        make_config("s", tmp_path), RunFacts(1, 100, 10, 0), Options(), ["tcp://h:1"], SECRET, work, roles
    )
    start = Mock(side_effect=[OSError("no process is free"), None])
    monkeypatch.setattr(role_processes, "FORK_SERVER", SimpleNamespace(ensure=start, losses=[]))
    with closing(host):
        for _ in range(2):
            host.processes._keep_fork_server()
    assert start.call_count == 2


def test_a_status_that_comes_as_a_role_ends_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the newest that there is: the supervisor asks for another one then, and does not wait for it."""
    addresses = [f"tcp://127.0.0.1:{free_ports(1)[0]}"]
    leader, overseer = Leader(addresses[0]), Recorder()
    config = make_config("s", tmp_path, batch_size=12)
    work = WorkFolder(Folders.from_home(tmp_path))
    roles = [Role("worker", 0)]
    host = Supervisor(config, RunFacts(1, 100, 10, 0), Options(), addresses, SECRET, work, roles, overseer=overseer)
    with ThreadPoolExecutor(1) as pool:
        playing = pool.submit(leader.run)

        def have_the_last_word() -> None:
            """Have version 2 reported, and let it arrive."""
            leader.last.set()
            playing.result(20)
            time.sleep(0.1)

        monkeypatch.setattr(role_processes, "Child", lambda *_: EndedRole(have_the_last_word))
        monkeypatch.setattr(role_processes, "FORK_SERVER", SimpleNamespace(ensure=lambda: None, losses=[]))
        try:
            host.run()
        finally:
            leader.last.set()
            host.close()
    close(leader.context)
    assert overseer.shown[-1].version == 2
