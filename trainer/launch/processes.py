"""The role processes of one host: how they start, how they are watched, and that none outlives its supervisor."""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.errors import JobError

PULSE_S = 1.0
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEEP_BYTES = 1 << 30


def context() -> Any:
    """Processes forked from a server that has imported torch once: each starts in milliseconds and shares its pages.
    A plain fork of the supervisor would hand on its sockets and threads."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["trainer.launch.preload"])
    return forking


def preload() -> None:
    """Start that server now, so that it imports torch while this process loads what it needs itself."""
    context()
    forkserver.ensure_running()


class Child:
    """A running role: module.main(*arguments) in a process of its own. heartbeat: its last heartbeat (monotonic seconds).

    The module goes by name, so that a supervisor need not import torch."""

    def __init__(self, name: str, log: Path, module: str, *arguments: Any) -> None:
        self.name, self.log = name, log
        self.started = self.heartbeat = time.monotonic()
        forking = context()
        self.lifeline, theirs = forking.Pipe()
        self.process: BaseProcess = forking.Process(
            target=_main, args=(theirs, str(log), module, arguments), name=name, daemon=True
        )
        with _without_main():
            self.process.start()
        theirs.close()

    def is_frozen(self, patience_s: float) -> bool:
        """Whether it has given no heartbeat for so long: stopped, or stuck in the kernel."""
        try:
            while self.lifeline.poll():
                self.lifeline.recv_bytes()
                self.heartbeat = time.monotonic()
        except (EOFError, OSError):
            pass  # it is ending
        return time.monotonic() - self.heartbeat > patience_s

    def exit_code(self) -> int | None:
        """None while it runs; -9 when killed by signal 9."""
        return self.process.exitcode

    def cause(self) -> str:
        """Why it ended: its last line if it said something, or its signal."""
        code = self.exit_code() or 0
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return lines[-1].removeprefix("error: ") if lines else f"exit code {code}"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.lifeline.close()


@contextmanager
def _without_main() -> Iterator[None]:
    """multiprocessing imports the caller's program anew in every child. A role needs nothing of it, and a script without
    ``if __name__ == "__main__"``, or one that loads Spark, would run again in each."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _main(lifeline: Connection, log: str, module: str, arguments: tuple[Any, ...]) -> None:
    """A role's process: its output goes to its log, a foreseen error becomes one line and the contract's exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the supervisor decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _redirect(log)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(Path(log).stem)  # so that ps and top tell the roles apart
    _keep_freed_memory()
    threading.Thread(target=_pulse, args=(lifeline,), name="lifeline", daemon=True).start()
    code = 0
    try:
        import_module(module).main(*arguments)
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no library's threads or exit handlers may hold a process that is done


def _keep_freed_memory() -> None:
    """Have malloc use large buffers again instead of handing them back: the kernel would clear their pages anew for
    every message. Only glibc has these settings; elsewhere nothing changes."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, KEEP_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)


class _Log(io.TextIOBase):
    """A role's output. A full disk costs lines, never the process that prints them."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for standard in (1, 2):
            os.dup2(self.descriptor, standard)

    def write(self, text: str) -> int:
        with suppress(OSError):
            os.write(self.descriptor, text.encode(errors="replace"))
        return len(text)


def _redirect(path: str) -> None:
    try:
        log: io.TextIOBase = _Log(path)
    except OSError:
        log = _Log(os.devnull)
    sys.stdout = sys.stderr = log


def _pulse(lifeline: Connection) -> None:
    """Heartbeats to the supervisor; when it is gone, however it ended, this process ends too."""
    try:
        while not lifeline.poll(PULSE_S):
            lifeline.send_bytes(b".")
    except (EOFError, OSError):
        pass
    os._exit(1)
