"""The supervisor's side of a role process: its start, its heartbeats, its exit code and its end."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from trainer.launch.fork_server import cause_of, start_process
from trainer.launch.role_main import EXIT, PULSE_S, Pulse

KILL_S = 10.0  # a process that survives its SIGKILL for longer hangs in the kernel and is abandoned
UNKNOWN = 255  # multiprocessing's exit code if the fork server, which alone knows the real one, is gone
UNFINISHED = 254  # exit code of a process that exited with 0 before its main returned, as os._exit(0) does


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
        has_started: whether it had called watchdog.mark_started by then, as a worker does when it is about to join.
        trouble: the problem that it reported with that heartbeat, or "".
    """

    def __init__(self, name: str, log: Path, module: str, *arguments: Any) -> None:
        self.name = name
        self.log = log
        self._log_begin = log.stat().st_size if log.exists() else 0  # earlier lines are not by this process
        self.lifeline, self.process = start_process(name, (str(log), module, arguments))
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
                    self.stalled_s, self.has_started, self.trouble = Pulse.from_bytes(word)
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
