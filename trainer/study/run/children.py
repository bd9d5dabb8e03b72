"""Processes of a study. Each does one task, reports how it ended, and does not outlive the study."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

from pipeline.core.import_path import child_variables, variables
from trainer.launch.child import UNKNOWN, Child
from trainer.launch.role_main import PULSE_S

_STARTING = threading.Lock()  # held while a fork changes variables of this process for a moment


class StudyProcess(Protocol):
    """A process of a study."""

    def kill(self) -> None: ...


def run_child(
    module: str,
    task: Any,
    *,
    env: Mapping[str, str] | None = None,
    started: Callable[[StudyProcess], None] = lambda child: None,
    on_end: Callable[[StudyProcess], None] = lambda child: None,
) -> tuple[int, str]:
    """Run ``python -m module`` on a task, and return its exit code (negative: killed by a signal) and its last line.

    Args:
        module: reads its task by ``task_of_parent``.
        task: sent as JSON.
        env: environment variables; by default this process's.
        started: called with the process after its start, so that another thread can kill it.
        on_end: called with the process after its end.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**(os.environ if env is None else env), **child_variables()},
    )
    started(child)
    try:
        assert child.stdin
        assert child.stdout
        try:
            child.stdin.write(json.dumps(task) + "\n")
            child.stdin.flush()  # left open: the child ends when this process closes it
        except BrokenPipeError:
            pass  # the child has ended; its output contains the reason
        output = child.stdout.read().strip().splitlines()
        code = child.wait()
        return code, output[-1] if output else ""
    finally:
        on_end(child)


def run_forked(
    module: str,
    task: Any,
    log: Path,
    *,
    env: Mapping[str, str],
    started: Callable[[StudyProcess], None],
    on_end: Callable[[StudyProcess], None],
) -> tuple[int, str]:
    """Do a task by ``module.main(task)`` in a fork of a process that has loaded torch, which takes others two seconds.

    Returns the same as ``run_child``.

    Args:
        log: file for the output, deleted at the end.
        env: environment variables that the process which is forked starts with, if it does not run yet.
        started, on_end: as in ``run_child``.
    """
    log.unlink(missing_ok=True)
    with _STARTING, variables(env):
        child = Child(log.stem, log, module, task)
    started(child.process)
    try:
        while (code := child.exit_code()) is None:
            wait([child.sentinel], PULSE_S)
            child.hangs(math.inf)  # reads the heartbeats, which would fill the connection
        return -signal.SIGKILL if code == UNKNOWN else code, child.cause()
    finally:
        child.kill()
        on_end(child.process)
        log.unlink(missing_ok=True)


def task_of_parent() -> Any:
    """Return this child's task, and make this process end when its parent does."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(0, 1 << 20)
        if not data:
            os._exit(1)
        line += data
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return json.loads(line)


def _end_with_parent() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock this thread would hold when the process ends
        pass
    os._exit(1)
