"""The memory that processes of this host may use, by its size and by the limits of the container that they run in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

V1 = "memory"  # the controller's name, and the folder of its limits


def usable_memory(root: Path = Path("/")) -> int:
    """Return the least of this host's memory and the limits of this process's control groups, in bytes.

    root: folder with ``proc`` and ``sys``."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([host, *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    """Yield the limits of all control groups above this process, of version 1 or 2. None on systems without them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and V1 not in controllers.split(","):
            continue
        base, name = (mount / V1, "memory.limit_in_bytes") if controllers else (mount, "memory.max")
        # In a container the path can be the host's, which is not mounted there: then only the top folder exists.
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # no such group, or no limit, which version 2 calls "max"
                yield int((folder / name).read_text())
            if folder == base:
                break
