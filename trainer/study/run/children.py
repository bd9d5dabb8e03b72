"""Processes of a study. Each does one task, reports how it ended, and does not outlive the study."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.core.import_path import child_variables

Child = subprocess.Popen[str]


def run_child(
    module: str,
    task: Any,
    *,
    env: Mapping[str, str] | None = None,
    started: Callable[[Child], None] = lambda child: None,
    on_end: Callable[[Child], None] = lambda child: None,
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
