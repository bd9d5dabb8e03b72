"""The same-host fast path: one worker's vectors in memory that it shares with the servers, without any lock.

The worker owns a sealed anonymous file; a server opens it through /proc, so nothing has a name, and nothing is left
behind however the processes end. Messages still go through sockets, and hand the memory over: the worker writes
``pushed`` before it pushes and touches neither vector until all servers have answered; a server writes its range of
``pulled`` before it answers. A worker that dies therefore never holds anything that a server waits for."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.transport.messages import Malformed

NONCE_BYTES = 64
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SHRINK") else 0


class SharedVectors:
    """``pushed`` and ``pulled``: float32 [elements] each."""

    def __init__(self, memory: mmap.mmap, elements: int) -> None:
        both = np.frombuffer(memory, np.float32, 2 * elements, offset=NONCE_BYTES)
        self.pushed: npt.NDArray[np.float32] = both[:elements]
        self.pulled: npt.NDArray[np.float32] = both[elements:]


class WorkerMemory(SharedVectors):
    """The worker's side. Raises OSError where the system has no sealed anonymous files (only Linux has)."""

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
        """What a server needs to open it."""
        return {"pid": os.getpid(), "descriptor": self.descriptor, "nonce": self.nonce.decode()}


def open_memory(handle: dict[str, Any], elements: int) -> SharedVectors | None:
    """A worker's memory by its handle; None where it is not reachable: another host, another user.

    The seal is what makes reading it safe: memory that its owner could cut would end the reader. The nonce tells that
    it is the worker's and not that of an equal process number on another host. Raises Malformed."""
    try:
        pid, descriptor = int(handle["pid"]), int(handle["descriptor"])
        nonce = str(handle["nonce"]).encode()
    except (KeyError, TypeError, ValueError, OverflowError):
        raise Malformed("a handle to shared memory") from None
    size = NONCE_BYTES + 8 * elements
    try:
        # Whatever a number leads to, a terminal or a device even: opening it neither waits nor takes it over.
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    try:
        sealed = fcntl.fcntl(opened, fcntl.F_GET_SEALS) & SEALS == SEALS
        if not sealed or os.fstat(opened).st_size != size:
            return None
        memory = mmap.mmap(opened, size)
    except OSError:
        return None  # not an anonymous file at all
    finally:
        os.close(opened)
    if not secrets.compare_digest(memory[:NONCE_BYTES], nonce):
        memory.close()
        return None
    return SharedVectors(memory, elements)
