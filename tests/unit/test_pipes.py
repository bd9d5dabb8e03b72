"""Pipes between processes of one host: between real processes, and whatever a handle says."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.spark.shipping import PACKAGE
from trainer.transport.malformed import MalformedMessageError
from trainer.transport.pipes import MOST_BYTES, MessagePipe, PipeWriter, open_pipe, open_pipes

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="pipes are opened through /proc")

WRITER = """
import json, sys
from trainer.transport.pipes import open_pipe
writer = open_pipe(json.loads(sys.argv[1]))
number = 0
while writer.offer(sys.argv[2].encode() * 100 + b"%09d" % number) or sys.argv[3:]:
    number += 1
print(number)
"""


@pytest.fixture
def pipe() -> MessagePipe:
    return MessagePipe()


def opened(pipe: MessagePipe) -> PipeWriter:
    writer = open_pipe(pipe.handle())
    assert writer is not None
    return writer


def writer(pipe: MessagePipe, letter: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, json.dumps(pipe.handle()), letter, *more]
    return subprocess.Popen(command, cwd=PACKAGE.parent, stdout=subprocess.PIPE, text=True)


def test_messages_arrive_whole_and_in_order(pipe: MessagePipe) -> None:
    writer = opened(pipe)
    assert pipe.read() == b""
    assert writer.offer(b"one")
    assert writer.offer(b"two")
    assert pipe.read() == b"onetwo"
    assert pipe.read() == b""


def test_a_full_pipe_refuses_and_one_read_empties_it(pipe: MessagePipe) -> None:
    writer = opened(pipe)
    count = 0
    while writer.offer(b"%064d" % count):
        count += 1
    assert pipe.read() == b"".join(b"%064d" % number for number in range(count))
    assert pipe.read() == b""
    assert count == pipe.capacity // 64
    assert writer.offer(b"again")


def test_one_read_empties_a_pipe_of_a_kernel_with_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with pages of 64 KiB makes pipes of 1 MiB, as this one."""
    create = os.pipe

    def create_large() -> tuple[int, int]:
        ends = create()
        fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, 1 << 20)
        return ends

    monkeypatch.setattr(os, "pipe", create_large)
    pipe = MessagePipe()
    writer = opened(pipe)
    count = 0
    while count < 1000 and writer.offer(b"%0109d" % count):
        count += 1
    assert pipe.read() == b"".join(b"%0109d" % number for number in range(count))


def test_a_message_that_could_be_cut_is_refused(pipe: MessagePipe) -> None:
    writer = opened(pipe)
    assert not writer.offer(bytes(MOST_BYTES + 1))
    assert writer.offer(bytes(MOST_BYTES))
    assert pipe.read() == bytes(MOST_BYTES)


def test_a_pipe_without_its_reader_refuses() -> None:
    pipe = MessagePipe()
    writer = opened(pipe)
    del pipe
    assert not writer.offer(b"anybody?")


def test_without_descriptors_sockets_carry_all() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        assert open_pipes(2) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(open_pipes(2)) == 2


def test_both_ends_leave_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    pipe = MessagePipe()
    writer = opened(pipe)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 3
    del pipe, writer
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.slow
def test_a_killed_writer_leaves_whole_messages_only(pipe: MessagePipe) -> None:
    """Two processes write without end; one is killed in between, and the other goes on."""
    processes = [writer(pipe, "a", "for ever"), writer(pipe, "b", "for ever")]
    read = b""
    while b"a" not in read or b"b" not in read:
        read += bytes(pipe.read())
    processes[0].kill()
    processes[0].wait()
    pipe.read()  # the last of it
    rest = b""
    while len(rest) < pipe.capacity:
        rest += bytes(pipe.read())
    processes[1].kill()
    processes[1].wait()
    for data in (read, rest):
        assert len(data) % 109 == 0
        for at in range(0, len(data), 109):
            assert data[at : at + 100] in (b"a" * 100, b"b" * 100)
            assert data[at + 100 : at + 109].isdigit()
    assert b"a" not in rest


OTHERS: dict[str, Callable[[Path], int]] = {
    "a regular file": lambda folder: os.open(folder / "file", os.O_RDWR | os.O_CREAT),
    "a socket": lambda folder: socket.socketpair()[0].detach(),
    "a folder": lambda folder: os.open(folder, os.O_RDONLY),
    "/dev/null": lambda folder: os.open("/dev/null", os.O_RDWR),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_anything_but_a_pipe_is_not_opened(kind: str, tmp_path: Path) -> None:
    descriptor = OTHERS[kind](tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    handle = {"pid": os.getpid(), "descriptor": descriptor, "inode": os.fstat(descriptor).st_ino}
    assert open_pipe(handle) is None
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(descriptor)


@pytest.mark.parametrize(
    "change", [{"pid": 2**22 + 1}, {"pid": -1}, {"pid": 10**400}, {"descriptor": -1}, {"inode": 1}], ids=str
)
def test_a_handle_to_another_pipe_is_declined(pipe: MessagePipe, change: dict[str, Any]) -> None:
    assert open_pipe(pipe.handle() | change) is None


@pytest.mark.parametrize("handle", [None, [], "x", {}, {"pid": 1, "descriptor": 1, "inode": float("inf")}], ids=str)
def test_what_is_no_handle_to_a_pipe_is_malformed(handle: Any) -> None:
    with pytest.raises(MalformedMessageError):
        open_pipe(handle)


@given(pid=st.integers() | st.text() | st.just(os.getpid()), descriptor=st.integers(0, 40), inode=st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_no_handle_opens_a_pipe_of_another_number(pid: Any, descriptor: int, inode: int) -> None:
    with contextlib.suppress(MalformedMessageError):
        assert open_pipe({"pid": pid, "descriptor": descriptor, "inode": inode}) is None
