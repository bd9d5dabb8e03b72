"""This machine: the repository and its cache folder, the current account, the loopback address and its ports."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import random
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of downloads and of the developer's HDFS: $SHARDING_CACHE, else .cache in the repository."""
    return Path(environ.get("SHARDING_CACHE") or ROOT / ".cache").absolute()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock file, so that one process at a time changes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def current_user() -> str:
    """The account that the servers run as, which is HDFS's superuser.

    The JVM asks the system for it and ignores $USER.
    """
    return pwd.getpwuid(os.getuid()).pw_name


def free_ports(count: int, host: str = HOST) -> list[int]:
    """Different ports of an address that no process listens on, drawn at random from this test process's range.

    Two processes that draw at once, before the servers of either listen, therefore never draw the same port."""
    ports = port_range(os.environ.get("PYTEST_XDIST_WORKER", "gw0"))
    candidates = random.SystemRandom().sample(ports, min(64 + 4 * count, len(ports)))
    free = [port for port in candidates if port_is_free(port, host)]
    return free[:count]


def port_range(process: str) -> range:
    """The ports of a process of pytest-xdist, such as gw3, and of the programs that it starts; eight processes share none.

    They lie below the ephemeral range, so no outgoing connection takes one before its use."""
    first = 20_000 + int(process.removeprefix("gw")) % 8 * 1500
    return range(first, first + 1500)


def port_is_free(port: int, host: str = HOST) -> bool:
    """Whether a server can listen on the port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # The servers set this option too. It allows a port whose last connections are in TIME_WAIT.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def port_holder(port: int) -> str:
    """The process that listens on the port, in words. The system hides the processes of other users."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                process = psutil.Process(connection.pid)
                return f"{process.name()}, pid {process.pid}"
    return "a process of another user"
