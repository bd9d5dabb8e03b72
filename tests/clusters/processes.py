"""The end of processes: of a whole process tree now, or of all that this process started when this process ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Literal

import psutil


class _Watcher:
    """A child process that cleans up after this process, however this process ends.

    The child reads process ids and folders from a pipe. Only this process holds the pipe's write end, so the pipe
    closes when this process ends by exit, exception or SIGKILL. The child then kills the processes with their
    descendants and removes the folders.

    A pipe works on every Unix. Linux's parent-death signal would also fire at the end of a single thread.
    """

    PROGRAM = """
import psutil, shutil, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
processes, folders = [], []
for line in sys.stdin:
    kind, _, value = line.rstrip("\\n").partition(" ")
    if kind == "folder":
        folders.append(value)
    elif kind == "keep":
        folders.remove(value)
    else:
        try:
            processes.append(psutil.Process(int(value)))
        except psutil.NoSuchProcess:
            pass
tree = []
for process in processes:
    try:
        tree += [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        pass
for process in tree:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass
psutil.wait_procs(tree, timeout=10)
for folder in folders:
    shutil.rmtree(folder, ignore_errors=True)
"""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def watch(self, kind: Literal["pid", "folder", "keep"], value: object) -> None:
        """Have a "pid" killed or a "folder" removed at the end of this process. "keep" takes a folder back."""
        if self._process is None or self._owner != os.getpid():
            command = [sys.executable, "-c", self.PROGRAM]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, text=True, start_new_session=True)
            self._owner = os.getpid()
            atexit.register(self.close)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {value}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Clean up now, and return when it is done."""
        if self._process is not None and self._owner == os.getpid():
            self._process.communicate()
            self._process = None


watcher = _Watcher()


def is_alive(process: psutil.Process) -> bool:
    """Whether the process runs. Where no init process reaps orphans, a killed one stays as a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def end_tree(processes: Iterable[psutil.Process], grace: timedelta = timedelta(0)) -> None:
    """End processes and all their descendants.

    With a grace they get SIGTERM first. SIGKILL ends those that are left after it.
    """
    tree: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            tree += [*process.children(recursive=True), process]
    if grace:
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, tree = psutil.wait_procs(tree, timeout=grace.total_seconds())
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(tree, timeout=10)
