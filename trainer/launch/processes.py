"""The role processes of one host: how they start, how they are watched, and that none outlives its supervisor."""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.core.errors import JobError
from pipeline.core.import_path import handed_on, hiding_file
from trainer.launch.open_files import raise_limit
from trainer.watchdog import kick, stalled_s, trouble

PULSE_S = 1.0
START_S = 120.0  # a process that is not forked within so long never will be: the fork server is frozen
STARTS = 5  # tries to have one forked, at once one after the other
KILL_S = 10.0  # one that has not gone so long after its SIGKILL hangs in the kernel, and is left behind
UNKNOWN = 255  # multiprocessing's exit code of a process whose fork server, which alone is told, has gone
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEEP_BYTES = 1 << 30
EXIT = b"exit "  # in front of the exit code that a process tells before it ends


def context() -> Any:
    """Processes forked from a server that has imported torch once: each starts in milliseconds and shares its pages.
    A plain fork of the supervisor would hand on its sockets and threads."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["trainer.launch.preload"])
    return forking


MOST_TEMPORARY_BYTES = 70  # of the path of a folder in which multiprocessing can have sockets
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
SETTLE_S = 1.0  # for a process that is dying to be dead


class ForkServer:
    """That server, one a program. What it has forked lives on when it is gone. losses: why it had to be started again."""

    def __init__(self) -> None:
        self.losses: list[str] = []

    @property
    def pid(self) -> int | None:
        return vars(forkserver._forkserver)["_forkserver_pid"]  # type: ignore[no-any-return]

    def ensure(self) -> None:
        """Start it if it does not run; it imports torch while this process goes on."""
        context()
        if self.pid is not None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # whoever started this program ignores SIGCHLD
                ended, status = self.pid, 0
            if not ended:
                return
            self.losses.append(_cause(os.waitstatus_to_exitcode(status)))
            self._forget()
        with _without_warnings(), handed_on(), _short_socket_folder():
            forkserver.ensure_running()

    def settle(self) -> None:
        """After a start that failed: one that is dying closes its connections first, and is dead a moment later."""
        end = time.monotonic() + SETTLE_S
        with suppress(ChildProcessError):
            while self.pid is not None and time.monotonic() < end:
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                    return
                time.sleep(0.01)

    def end(self) -> None:
        """For good: what it forked has ended."""
        if self.pid is not None:
            self.kill()
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self._forget()
        for entry in list(vars(util)["_finalizer_registry"].values()):
            if entry._callback is vars(util)["_remove_temp_dir"]:
                entry()  # the folder of its socket, which only a program that ends by itself would remove

    def _forget(self) -> None:
        os.close(vars(forkserver._forkserver)["_forkserver_alive_fd"])
        vars(forkserver._forkserver)["_forkserver_pid"] = None

    def kill(self) -> None:
        """Returns when it is dead, and leaves it for ``ensure`` to find: multiprocessing would start another in silence."""
        if self.pid is not None:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


FORK_SERVER = ForkServer()


class Killed(JobError):
    """A process that was killed, or could not be forked: another one may do better."""


def _cause(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Child:
    """A running role: module.main(*arguments) in a process of its own. heartbeat: its last heartbeat (monotonic seconds);
    stalled_s: for how long its main thread had done nothing then; trouble: what it had reported then, or "".

    The module goes by name, so that a supervisor need not import torch. Raises Killed if it cannot be started."""

    def __init__(self, name: str, log: Path, module: str, *arguments: Any) -> None:
        self.name, self.log = name, log
        self.lifeline, self.process = _start(name, (str(log), module, arguments))
        self.heartbeat, self.stalled_s = time.monotonic(), 0.0
        self.trouble = ""
        self._told: int | None = None  # the exit code that it announced
        self._is_cut = False

    def hangs(self, heartbeat_s: float, stall_s: float = 0) -> str | None:
        """Why it must be killed, if it must. No heartbeat: it is stopped, or stuck in the kernel. No progress (0: however
        long): its main thread is."""
        self._hear()
        if time.monotonic() - self.heartbeat > heartbeat_s:
            return f"no heartbeat for {heartbeat_s:g} s"
        return f"no progress for {stall_s:g} s" if 0 < stall_s < self.stalled_s else None

    def _hear(self) -> None:
        try:
            while self.lifeline.poll():
                word = self.lifeline.recv_bytes()
                self.heartbeat = time.monotonic()
                if word.startswith(EXIT):
                    self._told = int(word.removeprefix(EXIT))
                else:
                    seconds, _, self.trouble = word.decode().partition(" ")
                    self.stalled_s = float(seconds)
        except (EOFError, OSError):
            self._is_cut = True  # it is ending, or has ended

    def exit_code(self) -> int | None:
        """None while it runs; -9 when killed by signal 9; UNKNOWN if it ended without a word after its fork server."""
        code = self.process.exitcode
        if code != UNKNOWN:
            return code
        self._hear()
        if not self._is_cut:
            return None
        return UNKNOWN if self._told is None else self._told

    @property
    def sentinel(self) -> Any:
        """Ready when it has ended; without its fork server, also when it gives a heartbeat."""
        return self.lifeline if self.process.exitcode == UNKNOWN else self.process.sentinel

    def cause(self) -> str:
        """Why it ended: its last line if it said something, or its signal."""
        code = self.exit_code() or 0
        if code < 0:
            return _cause(code)
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        if code == UNKNOWN or not lines:
            return "killed" if code == UNKNOWN else _cause(code)
        return lines[-1].removeprefix("error: ")

    def join(self) -> None:
        """Wait for one that is ending."""
        end = time.monotonic() + KILL_S
        while self.exit_code() is None and time.monotonic() < end:
            wait([self.sentinel], PULSE_S)
        self.process.join(0)

    def kill(self) -> None:
        if self.exit_code() is None and self.process.pid:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
        self.join()
        self.lifeline.close()


def _start(name: str, arguments: tuple[Any, ...]) -> tuple[Connection, BaseProcess]:
    """A process and the supervisor's end of its lifeline. The fork server may be killed, or freeze, at any moment: what
    it forked without saying so ends with its lifeline. Raises Killed."""
    problem: Exception | None = None
    for _ in range(STARTS):
        FORK_SERVER.ensure()
        forking = context()
        mine, theirs = forking.Pipe()
        process = forking.Process(target=_main, args=(theirs, *arguments), name=name, daemon=True)
        alarm = threading.Timer(START_S, FORK_SERVER.kill)
        alarm.daemon = True
        alarm.start()
        try:
            with _without_main(), _without_warnings(), handed_on():
                process.start()
            return mine, process
        except (OSError, EOFError) as error:
            mine.close()
            problem = error
            FORK_SERVER.settle()
        finally:
            alarm.cancel()
            alarm.join()  # where it kills, until that is dead
            theirs.close()
    raise Killed(f"{name} could not be started, tried {STARTS} times: {problem}")


@contextmanager
def _without_warnings() -> Iterator[None]:
    """multiprocessing warns when its resource tracker was killed. It starts it again, and nothing here needs it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _short_socket_folder() -> Iterator[None]:
    """Have multiprocessing put its sockets where their paths are short enough, whatever TMPDIR says.

    Systems take 104 bytes at most; multiprocessing adds 31 to the folder of temporary files, once."""
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > MOST_TEMPORARY_BYTES:
        tempfile.tempdir = next((folder for folder in SHORT_FOLDERS if os.access(folder, os.W_OK | os.X_OK)), before)
    try:
        util.get_temp_dir()
        yield
    finally:
        tempfile.tempdir = before


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
    for number in (signal.SIGINT, signal.SIGTERM):  # terminals and schedulers send them to all; the supervisor decides
        signal.signal(number, signal.SIG_IGN)
    _redirect(log)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(Path(log).stem)  # so that ps and top tell the roles apart
    _keep_freed_memory()
    raise_limit()  # of a fork server that another part of this program has started
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
        if hidden := hiding_file(error):
            print(f"{type(error).__name__}: {hidden}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(OSError):
        lifeline.send_bytes(EXIT + str(code).encode())
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
            lifeline.send_bytes(f"{stalled_s():.1f} {trouble()}".encode())
    except (EOFError, OSError):
        pass
    os._exit(1)
