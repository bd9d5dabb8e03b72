"""The fork server, the parent of all role processes: its start, its end, and the processes that it forks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from pipeline.core.errors import JobError, UsageError
from pipeline.core.import_path import handed_on
from trainer.launch.role_main import run_role

START_S = 120.0  # if a fork takes longer, the fork server is frozen
STARTS = 5  # attempts to fork a process, without pauses
SETTLE_S = 1.0  # how long a dying process may take until it can be waited for
MOST_TEMPORARY_BYTES = 70  # longest path of a folder for multiprocessing's sockets
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")

# Starts change the program's modules, environment and warnings for a moment, and a dead fork server is replaced once:
# several threads take turns.
_START_LOCK = threading.RLock()


class ProcessKilledError(JobError):
    """The loss of a process that was killed or could not be forked. A retry may succeed."""


def cause_of(code: int) -> str:
    """Return in words why a process ended. code: its exit code, -N after signal N."""
    if code >= 0:
        return f"exit code {code}"
    names = {each.value: each.name for each in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"  # most real-time signals have no name


def context() -> Any:
    """Return the multiprocessing context of the fork server, which has imported torch once.

    Its children start in milliseconds and share its pages. A plain fork of the supervisor would inherit its sockets and
    the locks of its threads."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["trainer.launch.preload"])
    return forking


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
        with _START_LOCK:
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
            with _silence_warnings(), handed_on(), _short_socket_folder():
                forkserver.ensure_running()

    def settle(self) -> None:
        """Wait up to SETTLE_S for a dying fork server, after a failed start.

        A dying process closes its connections a moment before it can be waited for."""
        end = time.monotonic() + SETTLE_S
        with suppress(ChildProcessError):
            # Another thread may forget the process between two uses of ``pid``.
            while (pid := self.pid) is not None and time.monotonic() < end:
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                    return
                time.sleep(0.01)

    def end(self) -> None:
        """Kill the fork server for good. The caller has ended its children before."""
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
        if (pid := self.pid) is not None:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


FORK_SERVER = ForkServer()


def start_process(name: str, arguments: tuple[Any, ...]) -> tuple[Connection, BaseProcess]:
    """Start a process; return the supervisor's end of its lifeline, and the process.

    Raises ProcessKilledError, and UsageError where a process may not enter the current folder.

    The fork server may be killed or freeze at any moment. A child that it forked without reporting it exits when its
    lifeline closes.

    name: name of the process; arguments: of ``run_role``, after environment and lifeline."""
    if not os.access(".", os.X_OK):
        raise UsageError(f"user {os.geteuid()} may not enter the current folder, {os.getcwd()}: change to another one")
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

    arguments: of ``run_role``, after the environment."""
    # The fork server may have been started for an earlier run, before the program changed its environment.
    with _START_LOCK, handed_on():
        environment = dict(os.environ)
    process: BaseProcess = context().Process(target=run_role, args=(environment, *arguments), name=name, daemon=True)
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
