"""Memory that a worker shares with servers: between real processes, and whatever a handle says."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.spark.shipping import PACKAGE
from trainer.transport.malformed import MalformedMessageError
from trainer.transport.shared_memory import NONCE_BYTES, SEALS, SharedVectors, WorkerMemory, open_memory

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has sealed anonymous files"),
    pytest.mark.slow,  # processes of its own
]

NUMBERS = 1000
SIZE = NONCE_BYTES + 8 * NUMBERS
NONCE = "0123456789abcdef" * 4
WORKER = """
import json, sys
from trainer.transport.shared_memory import WorkerMemory
memory = WorkerMemory(int(sys.argv[1]))
print(json.dumps(memory.handle()), flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Worker:
    """Another process that owns the memory and does to it what it is told."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(NUMBERS)],
            cwd=PACKAGE.parent,
            env=os.environ | {"TMPDIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.handle: dict[str, Any] = json.loads(self._line())

    def do(self, statement: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(statement + "\n")
        self.process.stdin.flush()
        assert self._line() == "done\n", statement

    def _line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    found = Worker(tmp_path)
    yield found
    found.end()


def opened(handle: dict[str, Any]) -> SharedVectors:
    memory = open_memory(handle, NUMBERS)
    assert memory is not None
    return memory


def test_what_one_process_writes_the_other_reads_in_both_directions(worker: Worker) -> None:
    memory = opened(worker.handle)
    worker.do("memory.pushed[:] = range(1000)")
    np.testing.assert_array_equal(memory.pushed, np.arange(NUMBERS))
    memory.pulled[:] = 7.0
    worker.do("assert (memory.pulled == 7).all() and (memory.pushed[1:] > 0).all()")


def test_every_server_opens_the_same_memory(worker: Worker) -> None:
    first, second = opened(worker.handle), opened(worker.handle)
    first.pulled[:500], second.pulled[500:] = 1.0, 2.0
    worker.do("assert (memory.pulled[:500] == 1).all() and (memory.pulled[500:] == 2).all()")


@pytest.mark.parametrize("cut", ["0", "4096", "10**9"])
def test_a_worker_cannot_cut_what_a_server_has_opened(worker: Worker, cut: str) -> None:
    """Reading beyond the end of a cut file would end the server by SIGBUS."""
    memory = opened(worker.handle)
    worker.do("import os, contextlib")
    worker.do(f"with contextlib.suppress(OSError): os.ftruncate(memory.descriptor, {cut})")
    assert float(memory.pushed.sum()) == 0.0
    assert os.stat(f"/proc/{worker.process.pid}/fd/{worker.handle['descriptor']}").st_size == SIZE


def test_a_killed_worker_leaves_no_memory_and_takes_none(worker: Worker, tmp_path: Path) -> None:
    memory = opened(worker.handle)
    worker.do("memory.pushed[:] = 3")
    named = os.readlink(f"/proc/{worker.process.pid}/fd/{worker.handle['descriptor']}")
    assert not Path(named).exists()
    worker.process.send_signal(signal.SIGKILL)
    worker.process.wait()
    np.testing.assert_array_equal(memory.pushed, np.full(NUMBERS, 3.0))
    memory.pulled[:] = 1.0
    assert list(tmp_path.iterdir()) == []
    assert open_memory(worker.handle, NUMBERS) is None
    del memory
    assert "memfd:trainer" not in Path("/proc/self/maps").read_text()


def anonymous(size: int = SIZE, seals: int = SEALS, nonce: str = NONCE) -> int:
    descriptor = os.memfd_create("made-by-a-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, nonce.encode(), 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def regular(folder: Path) -> int:
    (folder / "file").write_bytes(NONCE.encode().ljust(SIZE, b"\0"))
    return os.open(folder / "file", os.O_RDWR)


def fifo(folder: Path) -> int:
    os.mkfifo(folder / "fifo")
    return os.open(folder / "fifo", os.O_RDONLY | os.O_NONBLOCK)


OTHERS: dict[str, Callable[[Path], int]] = {
    "without seals": lambda folder: anonymous(seals=0),
    "that can shrink": lambda folder: anonymous(seals=SEALS & ~fcntl.F_SEAL_SHRINK),
    "that can grow": lambda folder: anonymous(seals=SEALS & ~fcntl.F_SEAL_GROW),
    "that nobody may write": lambda folder: anonymous(seals=SEALS | fcntl.F_SEAL_WRITE),
    "too small": lambda folder: anonymous(size=SIZE - 8),
    "too large": lambda folder: anonymous(size=SIZE + 4096),
    "empty": lambda folder: anonymous(size=0, nonce=""),
    "with another nonce": lambda folder: anonymous(nonce=NONCE[:-1] + "0"),
    "with no nonce": lambda folder: anonymous(nonce="\0"),
    "a regular file": regular,
    "a fifo that nobody writes": fifo,
    "a pipe": lambda folder: os.pipe()[0],
    "a socket": lambda folder: socket.socketpair()[0].detach(),
    "a folder": lambda folder: os.open(folder, os.O_RDONLY),
    "/dev/zero": lambda folder: os.open("/dev/zero", os.O_RDWR),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_anything_but_the_workers_sealed_memory_is_not_opened(kind: str, tmp_path: Path) -> None:
    descriptor = OTHERS[kind](tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    assert open_memory({"pid": os.getpid(), "descriptor": descriptor, "nonce": NONCE}, NUMBERS) is None
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(descriptor)


def test_memory_without_a_fault_opens() -> None:
    descriptor = anonymous()
    assert open_memory({"pid": os.getpid(), "descriptor": descriptor, "nonce": NONCE}, NUMBERS)
    os.close(descriptor)


@pytest.mark.parametrize(
    "change",
    [
        {"pid": 2**22 + 1},  # beyond the largest process number
        {"pid": 0},
        {"pid": -1},
        {"pid": 10**400},
        {"descriptor": -1},
        {"descriptor": 10**400},
        {"nonce": ""},
        {"nonce": "é" * 64},
    ],
    ids=lambda change: str(change)[:24],
)
def test_a_handle_to_what_is_not_there_is_declined(change: dict[str, Any]) -> None:
    memory = WorkerMemory(NUMBERS)
    assert open_memory(memory.handle() | change, NUMBERS) is None


@pytest.mark.parametrize(
    "handle",
    [
        {},
        {"pid": 1},
        {"pid": "../../etc", "descriptor": 1, "nonce": ""},
        {"pid": None, "descriptor": 1, "nonce": ""},
        {"pid": 1, "descriptor": [3], "nonce": ""},
        {"pid": float("inf"), "descriptor": 1, "nonce": ""},
        {"pid": float("nan"), "descriptor": 1, "nonce": ""},
        {"pid": 1, "descriptor": 1, "nonce": "\ud800"},
        {"pid": "9" * 5000, "descriptor": 1, "nonce": ""},
    ],
    ids=lambda handle: str(handle)[:40],
)
def test_what_is_no_handle_is_malformed(handle: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessageError):
        open_memory(handle, NUMBERS)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@given(pid=json_values | st.just(os.getpid()), descriptor=json_values | st.integers(0, 40), nonce=json_values)
@settings(max_examples=150, deadline=None)
def test_no_handle_opens_anything_but_what_bears_its_nonce(pid: Any, descriptor: Any, nonce: Any) -> None:
    with contextlib.suppress(MalformedMessageError):
        assert open_memory({"pid": pid, "descriptor": descriptor, "nonce": nonce}, NUMBERS) is None
