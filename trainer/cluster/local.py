"""A launcher that runs parts as processes of this machine, to try out runs on several hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from pipeline.core.import_path import child_variables
from pipeline.core.machine import usable_cores
from trainer.cluster.launcher import LaunchArguments, Part, PartExecution
from trainer.cluster.watched import WatchingLauncher


class LocalLauncher(WatchingLauncher["subprocess.Popen[bytes]"]):
    """A launcher with one process per part. Each exits with this process, which holds the other end of its stdin."""

    def check(self, parts: Sequence[Part]) -> None:
        """Accept any number of parts."""

    def host(self) -> str:
        return "127.0.0.1"

    def threads(self, parts: Sequence[Part]) -> int:
        return max(1, usable_cores() // sum(part.count("worker") for part in parts))

    def waiting_for(self) -> str:
        return "they are still starting"

    def begin(self, arguments: LaunchArguments, attempt: int) -> subprocess.Popen[bytes]:
        """Start a part as a process, which reads its launch arguments from stdin.

        A command line would show the run's token to other users."""
        command = [sys.executable, "-m", "trainer.cluster.child"]
        environment = os.environ | child_variables()
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        assert process.stdin
        with suppress(BrokenPipeError):  # the process has died; the watcher restarts it
            process.stdin.write(json.dumps([arguments.to_json(), asdict(PartExecution(attempt))]).encode() + b"\n")
            process.stdin.flush()
        return process

    def outcome(self, handle: subprocess.Popen[bytes]) -> str | None:
        code = handle.poll()
        if code is None:
            return None
        return f"exit code {code}" if code else ""

    def end(self, handle: subprocess.Popen[bytes]) -> None:
        handle.kill()
        handle.wait()
        if handle.stdin:
            with suppress(BrokenPipeError):
                handle.stdin.close()
