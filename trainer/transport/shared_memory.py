"""The fast path on one host: a worker's vectors in memory that it shares with the servers, without locks.

The worker owns a sealed anonymous file, which a server opens through /proc. It has no name, so that nothing is left
behind however the processes end. Messages through pipes or sockets transfer ownership of the memory: the worker
writes ``pushed`` before it pushes and touches neither vector until all servers have replied; a server writes its range
of ``pulled`` before it replies. A worker that dies can therefore never block a server.
Workers of an all-reduce share theirs with each other, by the marks of trainer.transport.mesh."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.transport.malformed import MalformedMessageError

NONCE_BYTES = 64
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SHRINK") else 0


class SharedVectors:
    """The two shared vectors of a worker, ``pushed`` and ``pulled``: float32 [elements] each."""

    def __init__(self, memory: mmap.mmap, elements: int) -> None:
        both = np.frombuffer(memory, np.float32, 2 * elements, offset=NONCE_BYTES)
        self.pushed: npt.NDArray[np.float32] = both[:elements]
        self.pulled: npt.NDArray[np.float32] = both[elements:]


class WorkerMemory(SharedVectors):
    """The worker's side of the memory. Raises OSError on systems without sealed anonymous files (all but Linux)."""

    def __init__(self, elements: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("no anonymous shared files on this system")
        size = NONCE_BYTES + 8 * elements
        self.descriptor = os.memfd_create("trainer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        memory = mmap.mmap(self.descriptor, size)
        self.nonce = secrets.token_hex(NONCE_BYTES // 2).encode()
        memory[:NONCE_BYTES] = self.nonce
        super().__init__(memory, elements)

    def handle(self) -> dict[str, Any]:
        """Return the data with which a server opens the memory."""
        return {"pid": os.getpid(), "descriptor": self.descriptor, "nonce": self.nonce.decode()}


def share_memory(elements: int) -> WorkerMemory | None:
    """Return new memory for the vectors of a worker, or None if this system has none to share."""
    try:
        return WorkerMemory(elements)
    except OSError:
        return None


def open_memory(handle: dict[str, Any], elements: int) -> SharedVectors | None:
    """Open a worker's memory by its handle. Returns None if this process cannot reach it: another host, another user.

    Only sealed memory is read, because a reader is killed if the owner truncates the file. The nonce proves that the
    memory is the worker's, not a process's with the same number on another host.
    Raises MalformedMessageError for an invalid handle."""
    try:
        pid = int(handle["pid"])
        descriptor = int(handle["descriptor"])
        nonce = str(handle["nonce"]).encode()
    except (KeyError, TypeError, ValueError, OverflowError):
        raise MalformedMessageError("a handle to shared memory") from None
    size = NONCE_BYTES + 8 * elements
    try:
        # A handle from another host may lead to a terminal or a device of this one. The flags prevent that the open
        # blocks, or makes it the controlling terminal.
        file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    try:
        sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS == SEALS
        if not sealed or os.fstat(file).st_size != size:
            return None
        memory = mmap.mmap(file, size)
    except OSError:
        return None  # not an anonymous file
    finally:
        os.close(file)
    if not secrets.compare_digest(memory[:NONCE_BYTES], nonce):
        memory.close()
        return None
    return SharedVectors(memory, elements)
