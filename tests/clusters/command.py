"""The developer's HDFS: `python -m tests.clusters hdfs up|down|status`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil

from pipeline.core.errors import JobError, UsageError
from tests.clusters.hdfs import Hdfs, live_datanodes
from tests.clusters.machine import HOST, cache_folder, locked, port_holder, port_is_free
from tests.clusters.processes import end_tree
from tests.clusters.servers import START_TIMEOUT, wait_until

# ----------------------------------------------------------------------------------------------------
# The state between `up` and `down`


@dataclass(frozen=True)
class Running:
    """What `hdfs up` records: the ports, and each server's pid with its start time, because pids are reused."""

    rpc_port: int
    http_port: int
    servers: dict[str, tuple[int, float]]

    def alive(self) -> dict[str, psutil.Process]:
        """The recorded servers that still run, by name."""
        found = {}
        for name, (pid, created) in self.servers.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                    found[name] = process
        return found


def read_running(folder: Path) -> Running | None:
    """What the last `hdfs up` recorded in the folder, or None."""
    try:
        stored = json.loads((folder / "state.json").read_text())
    except FileNotFoundError:
        return None
    servers = {name: (int(pid), float(created)) for name, (pid, created) in stored["servers"].items()}
    return Running(stored["rpc_port"], stored["http_port"], servers)


def write_running(folder: Path, running: Running) -> None:
    """Record the state in the folder, by a rename."""
    scratch = folder / "state.json.tmp"
    scratch.write_text(json.dumps(vars(running), indent=2))
    os.replace(scratch, folder / "state.json")


# ----------------------------------------------------------------------------------------------------
# The three actions


def describe(folder: Path, running: Running) -> str:
    """What a user of the running HDFS needs to know."""
    return (
        f"  file system  hdfs://{HOST}:{running.rpc_port}\n"
        f"  WebHDFS      http://{HOST}:{running.http_port}\n"
        f"  for clients  export HADOOP_CONF_DIR={folder / 'conf'}\n"
        f"  stop it      make hdfs-down   (python -m tests.clusters hdfs down --delete also removes its files)"
    )


def hdfs_up(folder: Path, rpc_port: int, http_port: int) -> None:
    """Start the developer's HDFS, or say that it is up. A failed start leaves no server behind.

    Raises UsageError for a port in use.
    """
    with locked(folder):
        running = read_running(folder)
        alive = running.alive() if running else {}
        if running and len(alive) == len(running.servers):
            port, datanodes = running.http_port, len(alive) - 1
            wait_until(lambda: live_datanodes(port) == datanodes, "all DataNodes", [], START_TIMEOUT)
            print(f"HDFS is already up\n{describe(folder, running)}")
            return
        # Only some of the servers run. All of them start afresh on the same files.
        end_tree(alive.values())
        for port in (rpc_port, http_port):
            if not port_is_free(port):
                raise UsageError(
                    f"port {port} is in use by {port_holder(port)}: stop that, or pass another --port/--http-port"
                )
        began = time.monotonic()
        cluster = Hdfs(folder, rpc_port, http_port, detached=True)
        # SIGTERM raises SystemExit, so that it ends the started servers as Ctrl-C does.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        with contextlib.ExitStack() as stack:
            stack.callback(cluster.stop)

            def record() -> None:
                """Before the wait: `down` finds the servers even when SIGKILL ends this process meanwhile."""
                nonlocal running
                servers = {s.name: (s.pid, psutil.Process(s.pid).create_time()) for s in cluster.servers}
                running = Running(rpc_port, http_port, servers)
                write_running(folder, running)

            cluster.start(record)
            stack.pop_all()
    assert running, "recorded when the servers ran"
    print(f"HDFS is up: one NameNode, three DataNodes ({time.monotonic() - began:.0f} s)\n{describe(folder, running)}")


def hdfs_down(folder: Path, delete: bool) -> None:
    """Stop the developer's HDFS if it is up. With delete, remove its files, logs and configuration too."""
    with locked(folder):
        running = read_running(folder)
        alive = running.alive() if running else {}
        end_tree(alive.values(), grace=timedelta(seconds=10))
        (folder / "state.json").unlink(missing_ok=True)
        if delete:
            shutil.rmtree(folder)
    print(f"HDFS is {'down' if alive else 'not up'}{', its files are removed' if delete else ''}")


def hdfs_status(folder: Path) -> bool:
    """Print whether the developer's HDFS is up and accepts writes, and return it."""
    running = read_running(folder)
    alive = running.alive() if running else {}
    if running is None or "namenode" not in alive:
        print("HDFS is not up: start it with make hdfs-up")
        return False
    live = live_datanodes(running.http_port)
    if live < 0:
        print(f"HDFS is starting (or in safe mode): see {folder / 'logs'}")
        return False
    print(f"HDFS is up: {live} live DataNodes\n{describe(folder, running)}")
    return True


# ----------------------------------------------------------------------------------------------------
# The command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one action and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.clusters", description="A real HDFS on this machine.")
    hdfs_parser = parser.add_subparsers(dest="cluster", required=True).add_parser("hdfs")
    actions = hdfs_parser.add_subparsers(dest="action", required=True)
    up = actions.add_parser("up", help="start it; files of an earlier one are still there")
    up.add_argument("--port", type=int, default=9820, help="of the NameNode (default 9820)")
    up.add_argument("--http-port", type=int, default=9870, help="of WebHDFS (default 9870)")
    down = actions.add_parser("down", help="stop it")
    down.add_argument("--delete", action="store_true", help="remove its files, logs and configuration too")
    actions.add_parser("status", help="say whether it is up (exit 0) or not (exit 1)")
    options = parser.parse_args(arguments)
    folder = cache_folder() / "hdfs"
    try:
        if options.action == "up":
            hdfs_up(folder, options.port, options.http_port)
        elif options.action == "down":
            hdfs_down(folder, options.delete)
        else:
            return 0 if hdfs_status(folder) else 1
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: nothing is left running", file=sys.stderr)
        return 130
    return 0
