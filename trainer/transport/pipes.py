"""The shortest way for small messages on one host: pipes that other processes open through /proc, as they do memory.

A message through a socket of libzmq wakes one of its threads on either side, which costs several times as much as the
message itself. A pipe wakes the receiver alone. The kernel writes up to PIPE_BUF bytes whole or not at all, so a process
that dies while it writes leaves no part of a message, and a full pipe refuses one without blocking. Sockets carry all
else, and whatever a pipe refuses."""

from __future__ import annotations

import fcntl
import os
import select
import stat
from typing import Any

from trainer.transport.malformed import MalformedMessageError

MOST_BYTES = select.PIPE_BUF  # of a message


class MessagePipe:
    """A pipe from which its owner reads the messages of other processes. ``fileno`` is readable if there are any.

    It stays open while no other process has it open, so that there is no end of file. Raises OSError without
    descriptors left.

    Attributes:
        capacity: the most bytes that it holds.
    """

    def __init__(self) -> None:
        self._descriptors: tuple[int, ...] = ()  # before the call below, which may fail
        self._descriptors = self._messages, self._entrance = os.pipe()
        os.set_blocking(self._messages, False)
        # 64 KiB with pages of 4 KiB, more with larger ones. A read of fewer bytes could end within a message.
        self.capacity = fcntl.fcntl(self._messages, fcntl.F_GETPIPE_SZ)

    def fileno(self) -> int:
        return self._messages

    def handle(self) -> dict[str, Any]:
        """Return the data with which another process opens the pipe."""
        return {"pid": os.getpid(), "descriptor": self._entrance, "inode": os.fstat(self._entrance).st_ino}

    def read(self) -> memoryview:
        """Return all waiting messages, one after the other; b"" if there are none."""
        try:
            return memoryview(os.read(self._messages, self.capacity))
        except BlockingIOError:
            return memoryview(b"")

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


class PipeWriter:
    """Another process's pipe, opened for writing."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def offer(self, message: bytes) -> bool:
        """Write a message. Returns False if it is too long, or the pipe is full or has lost its reader."""
        if len(message) > MOST_BYTES:
            return False
        try:
            os.write(self._descriptor, message)
        except OSError:
            return False
        return True

    def __del__(self) -> None:
        os.close(self._descriptor)


def pipe_key(server: int) -> str:
    """Return the key, in a worker's introduction, of the handle of its pipe for the answers of a server."""
    return f"pipe {server}"


def open_pipes(count: int) -> list[MessagePipe]:
    """Return new pipes for the messages of others; none without descriptors left, as sockets can carry all messages."""
    try:
        return [MessagePipe() for _ in range(count)]
    except OSError:
        return []


def open_pipe(handle: Any) -> PipeWriter | None:
    """Open the pipe of another process by its handle. Returns None if this process cannot reach it.

    The kernel numbers its pipes, so a pipe of another host is not taken for it. Raises MalformedMessageError for an
    invalid handle."""
    try:
        pid = int(handle["pid"])
        descriptor = int(handle["descriptor"])
        inode = int(handle["inode"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise MalformedMessageError("a handle to a pipe") from None
    place = f"/proc/{pid}/fd/{descriptor}"
    try:
        # Looked at before it is opened, because opening some devices has effects.
        if not _is_pipe(os.stat(place), inode):
            return None
        writer = PipeWriter(os.open(place, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY))
    except OSError:
        return None
    return writer if _is_pipe(os.fstat(writer._descriptor), inode) else None


def _is_pipe(status: os.stat_result, inode: int) -> bool:
    return stat.S_ISFIFO(status.st_mode) and status.st_ino == inode
