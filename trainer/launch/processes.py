"""The role processes of one host: their start, their supervision and their end, at the latest with the supervisor."""

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
from trainer.watchdog import has_started, kick, stalled_s, trouble

PULSE_S = 0.5
START_S = 120.0  # if a fork takes longer, the fork server is frozen
STARTS = 5  # attempts to fork a process, without pauses
KILL_S = 10.0  # a process that survives its SIGKILL for longer hangs in the kernel and is abandoned
UNKNOWN = 255  # multiprocessing's exit code if the fork server, which alone knows the real one, is gone
UNFINISHED = 254  # exit code of a process that exited with 0 before its main returned, as os._exit(0) does
# parameters of glibc's mallopt
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEEP_BYTES = 1 << 30
STARTING, STARTED = "starting", "started"  # of a heartbeat: before a worker joins, and from then on
EXIT = b"exit "  # prefix of the message with which a process announces its exit code


def context() -> Any:
    """Return the multiprocessing context of the fork server, which has imported torch once.

    Its children start in milliseconds and share its pages. A plain fork of the supervisor would inherit its sockets and
    the locks of its threads."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["trainer.launch.preload"])
    return forking


MOST_TEMPORARY_BYTES = 70  # longest path of a folder for multiprocessing's sockets
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
SETTLE_S = 1.0  # how long a dying process may take until it can be waited for


class ForkServer:
    """The fork server of multiprocessing, one per program. Its children survive its death.

    losses: the causes of its unexpected ends so far; the supervisor reports and removes them."""

    def __init__(self) -> None:
        self.losses: list[str] = []

    @property
    def pid(self) -> int | None:
        return vars(forkserver._forkserver)["_forkserver_pid"]  # type: ignore[no-any-return]

    def ensure(self) -> None:
        """Start the fork server if it does not run, without waiting until it has imported torch."""
        context()
        if self.pid is not None:
            try:
                ended_pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # this program inherited an ignored SIGCHLD
                ended_pid = self.pid
                status = 0
            if not ended_pid:
                return
            self.losses.append(cause_of(os.waitstatus_to_exitcode(status)))
            self._forget()
        with _START_LOCK, _silence_warnings(), handed_on(), _short_socket_folder():
            forkserver.ensure_running()

    def settle(self) -> None:
        """Wait up to SETTLE_S for a dying fork server, after a failed start.

        A dying process closes its connections a moment before it can be waited for."""
        end = time.monotonic() + SETTLE_S
        with suppress(ChildProcessError):
            while self.pid is not None and time.monotonic() < end:
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                    return
                time.sleep(0.01)

    def end(self) -> None:
        """End the fork server for good, once its children have ended."""
        if self.pid is not None:
            self.kill()
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self._forget()
        for entry in list(vars(util)["_finalizer_registry"].values()):
            if entry._callback is vars(util)["_remove_temp_dir"]:
                entry()  # remove the folder of its socket, which would otherwise happen only at a regular exit

    def _forget(self) -> None:
        os.close(vars(forkserver._forkserver)["_forkserver_alive_fd"])
        vars(forkserver._forkserver)["_forkserver_pid"] = None

    def kill(self) -> None:
        """Kill the fork server and wait until it is dead, but leave its exit status to ``ensure``.

        ``ensure`` then notices the loss; multiprocessing alone would start a new one silently."""
        if self.pid is not None:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


FORK_SERVER = ForkServer()


class ProcessKilledError(JobError):
    """The loss of a process that was killed or could not be forked. A retry may succeed."""


def cause_of(code: int) -> str:
    """Return in words why a process ended. code: its exit code, -N after signal N."""
    if code >= 0:
        return f"exit code {code}"
    names = {each.value: each.name for each in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"  # most real-time signals have no name


class Child:
    """A running role: module.main(*arguments) in its own process.

    The module is given by name, so that the supervisor need not import torch.
    Raises ProcessKilledError if it cannot be started.

    Attributes:
        name: str(role).
        log: file of its output.
        lifeline: connection that carries heartbeats; the process exits when the supervisor's end closes.
        process: the process.
        heartbeat: time of its last heartbeat (monotonic seconds).
        stalled_s: seconds without progress of its main thread, as of that heartbeat.
        has_started: whether it was a worker that joins, or has joined, by then.
        trouble: the problem that it reported with that heartbeat, or "".
    """

    def __init__(self, name: str, log: Path, module: str, *arguments: Any) -> None:
        self.name = name
        self.log = log
        self._log_begin = log.stat().st_size if log.exists() else 0  # earlier lines are not by this process
        self.lifeline, self.process = _start(name, (str(log), module, arguments))
        self.heartbeat = time.monotonic()
        self.stalled_s = 0.0
        self.has_started = False
        self.trouble = ""
        self._announced_code: int | None = None  # the exit code that it announced, None before
        self._is_cut = False  # whether the lifeline is closed at its end

    def hangs(self, heartbeat_s: float, stall_s: float = 0) -> str | None:
        """Return why the process must be killed, or None.

        Without heartbeats the whole process is stopped, or stuck in the kernel; without progress its main thread is.

        heartbeat_s, stall_s: limits of either, in seconds; a stall_s of 0 sets no limit."""
        self._hear()
        if time.monotonic() - self.heartbeat > heartbeat_s:
            return f"no heartbeat for {heartbeat_s:g} s"
        return f"no progress for {stall_s:g} s" if 0 < stall_s < self.stalled_s else None

    def _hear(self) -> None:
        """Read the messages that have arrived: heartbeats, with the stall and the trouble, and the exit code."""
        try:
            while self.lifeline.poll():
                word = self.lifeline.recv_bytes()
                self.heartbeat = time.monotonic()
                if word.startswith(EXIT):
                    self._announced_code = int(word.removeprefix(EXIT))
                else:
                    seconds, started, self.trouble = word.decode().split(" ", 2)
                    self.stalled_s, self.has_started = float(seconds), started == STARTED
        except (EOFError, OSError):
            self._is_cut = True  # the process is ending, or has ended

    def exit_code(self) -> int | None:
        """Return the exit code, or None while the process runs.

        It is -9 after signal 9. If the fork server is gone, only the process itself can tell its code: the result is
        then the one that it announced, or UNKNOWN if it announced none. A process that exits with 0 without having
        announced it was ended by a user's code or a library in the middle of its work: the result is UNFINISHED."""
        code = self.process.exitcode
        if code not in (0, UNKNOWN):
            return code
        self._hear()
        if code == 0:
            return 0 if self._announced_code == 0 else UNFINISHED
        if not self._is_cut:
            return None
        return UNKNOWN if self._announced_code is None else self._announced_code

    @property
    def sentinel(self) -> Any:
        """An object for ``wait``, ready when the process has ended (without its fork server also at a heartbeat)."""
        return self.lifeline if self.process.exitcode == UNKNOWN else self.process.sentinel

    def cause(self) -> str:
        """Return why the process ended: its signal ("killed" if unknown), else its log's last line or its exit code."""
        code = self.exit_code() or 0
        if code < 0:
            return cause_of(code)
        if code == UNFINISHED:
            return "exit code 0 before its work was done"
        output = self.log.read_bytes()[self._log_begin :] if self.log.exists() else b""
        lines = output.decode(errors="replace").strip().splitlines()
        if code == UNKNOWN or not lines:
            return "killed" if code == UNKNOWN else cause_of(code)
        return lines[-1].removeprefix("error: ")

    def join(self) -> None:
        """Wait up to KILL_S for a process that is ending."""
        end = time.monotonic() + KILL_S
        while self.exit_code() is None and time.monotonic() < end:
            wait([self.sentinel], PULSE_S)
        self.process.join(0)

    def kill(self) -> None:
        """Kill the process if it runs, wait up to KILL_S for its end, and close the lifeline."""
        if self.exit_code() is None and self.process.pid:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
        self.join()
        self.lifeline.close()


# Starts change the program's modules, environment and warnings for a moment: those of several threads take turns.
_START_LOCK = threading.RLock()


def _start(name: str, arguments: tuple[Any, ...]) -> tuple[Connection, BaseProcess]:
    """Start a process; return the supervisor's end of its lifeline, and the process. Raises ProcessKilledError.

    The fork server may be killed or freeze at any moment. A child that it forked without reporting it exits when its
    lifeline closes.

    name: name of the process; arguments: of ``_main``, after environment and lifeline."""
    problem: Exception | None = None
    for _ in range(STARTS):
        try:
            FORK_SERVER.ensure()
            own_end, child_end = context().Pipe()
            with child_end:
                try:
                    return own_end, _fork(name, (child_end, *arguments))
                except BaseException:
                    own_end.close()
                    raise
        # Without free file descriptors, processes or threads each of these steps fails, perhaps only for a while.
        except (OSError, EOFError) as error:
            problem = error
            FORK_SERVER.settle()
    raise ProcessKilledError(f"{name} could not be started, tried {STARTS} times: {problem}")


def _fork(name: str, arguments: tuple[Any, ...]) -> BaseProcess:
    """Have the fork server fork a process, and return it. Raises OSError and EOFError.

    arguments: of ``_main``, after the environment."""
    # The fork server may have been started for an earlier run, before the program changed its environment.
    with _START_LOCK, handed_on():
        environment = dict(os.environ)
    process: BaseProcess = context().Process(target=_main, args=(environment, *arguments), name=name, daemon=True)
    # start() would wait forever for a frozen fork server; killing it turns that into an error and a retry.
    alarm = threading.Timer(START_S, FORK_SERVER.kill)
    alarm.daemon = True
    try:
        alarm.start()
    except RuntimeError as error:
        raise OSError(str(error)) from None
    try:
        with _START_LOCK, _hide_main(), _silence_warnings(), handed_on():
            process.start()
    finally:
        alarm.cancel()
        alarm.join()  # if it has fired, wait until the fork server is dead
    return process


@contextmanager
def _silence_warnings() -> Iterator[None]:
    """Suppress multiprocessing's warning that its resource tracker was killed: it is restarted, and not needed here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _short_socket_folder() -> Iterator[None]:
    """Make multiprocessing create its sockets in a folder with a short path, even if TMPDIR is long.

    Systems allow as little as 104 bytes for a socket's path; multiprocessing adds 31 to the temporary folder's, which
    it chooses once."""
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > MOST_TEMPORARY_BYTES:
        tempfile.tempdir = next((folder for folder in SHORT_FOLDERS if os.access(folder, os.W_OK | os.X_OK)), before)
    try:
        util.get_temp_dir()
        yield
    finally:
        tempfile.tempdir = before


@contextmanager
def _hide_main() -> Iterator[None]:
    """Hide the caller's program from multiprocessing, which would import it in every child.

    A role needs nothing of it, and a script without ``if __name__ == "__main__"``, or one that loads Spark, would run
    again in each child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _main(environment: dict[str, str], lifeline: Connection, log: str, module: str, arguments: tuple[Any, ...]) -> None:
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
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
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
            lifeline.send_bytes(f"{stalled_s():.1f} {STARTED if has_started() else STARTING} {trouble()}".encode())
    except (EOFError, OSError):
        pass
    os._exit(1)
