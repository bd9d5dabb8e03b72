"""The process of a role: its output, its heartbeats to the supervisor, and its end, at the latest with the supervisor."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core.errors import JobError
from pipeline.core.import_path import hiding_file
from trainer.launch.open_files import raise_limit
from trainer.watchdog import has_started, kick, stalled_s, trouble

PULSE_S = 0.5
EXIT = b"exit "  # prefix of the message with which a process announces its exit code
# the second field of a heartbeat: whether the process has called watchdog.mark_started
STARTING = "starting"
STARTED = "started"
# parameters of glibc's mallopt
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEEP_BYTES = 1 << 30


class Pulse(NamedTuple):
    """A heartbeat of a process to its supervisor.

    Attributes:
        stalled_s: seconds without progress of its main thread.
        has_started: whether it has called watchdog.mark_started, as a worker does when it is about to join.
        trouble: the problem that it reports, or "".
    """

    stalled_s: float
    has_started: bool
    trouble: str

    def to_bytes(self) -> bytes:
        return f"{self.stalled_s:.1f} {STARTED if self.has_started else STARTING} {self.trouble}".encode()

    @classmethod
    def from_bytes(cls, message: bytes) -> Pulse:
        seconds, started, trouble = message.decode().split(" ", 2)
        return cls(float(seconds), started == STARTED, trouble)


def run_role(
    environment: dict[str, str], lifeline: Connection, log: str, module: str, arguments: tuple[Any, ...]
) -> None:
    """Run a role's process: write its output to its log; turn an expected error into one line and its exit code.

    Args:
        environment: the environment variables of the supervisor.
        lifeline: the process's end of the connection to the supervisor.
        log: file of its output.
        module: the module whose ``main`` is called.
        arguments: of ``main``.
    """
    # Sent to all processes; the supervisor reacts. Spark sends SIGHUP where an executor ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    _redirect(log)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(Path(log).stem, encoding="utf-8")  # the role's name in ps and top
    keep_freed_memory()
    raise_limit()  # the fork server may have been started with the lower limit
    kick()
    threading.Thread(target=_pulse, args=(lifeline,), name="lifeline", daemon=True).start()
    code = 0
    try:
        import_module(module).main(*arguments)
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except BaseException as error:
        traceback.print_exc()
        if message := hiding_file(error):
            print(f"{type(error).__name__}: {message}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(OSError):
        lifeline.send_bytes(EXIT + str(code).encode())
    os._exit(code)  # skips threads and exit handlers of libraries, which could block the exit


def keep_freed_memory() -> None:
    """Make malloc keep large buffers for reuse: the kernel would clear returned pages anew for every message.

    Only glibc has these settings; elsewhere nothing changes."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, KEEP_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)


class _Log(io.TextIOBase):
    """The output of a role. A full disk costs lines of output, but never fails the process."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        for standard in (1, 2):
            os.dup2(self.descriptor, standard)

    def write(self, text: str) -> int:
        with suppress(OSError):
            os.write(self.descriptor, text.encode(errors="replace"))
        return len(text)


def _redirect(path: str) -> None:
    """Send the output of this process to its log, or nowhere if that cannot be opened."""
    try:
        log: io.TextIOBase = _Log(path)
    except OSError:
        log = _Log(os.devnull)
    sys.stdout = sys.stderr = log


def _pulse(lifeline: Connection) -> None:
    """Send heartbeats to the supervisor, and exit this process when the supervisor is gone, for any reason."""
    try:
        # The supervisor sends nothing, so the connection is readable only when it is closed.
        while not lifeline.poll(PULSE_S):
            lifeline.send_bytes(Pulse(stalled_s(), has_started(), trouble()).to_bytes())
    except (EOFError, OSError):
        pass
    os._exit(1)
