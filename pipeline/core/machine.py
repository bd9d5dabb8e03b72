"""The memory and the cores that processes of this host may use: the host's, within the limits of their container."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")


def usable_memory(root: Path = ROOT) -> int:
    """Return the least of this host's memory and the limits of this process's control groups, in bytes.

    root: folder with ``proc`` and ``sys``."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group, version in _control_groups(root, "memory"):
        with suppress(OSError, ValueError):  # no such group, or no limit, which version 2 calls "max"
            limits.append(int((group / ("memory.limit_in_bytes" if version == 1 else "memory.max")).read_text()))
    return min(limits)


def usable_cores(root: Path = ROOT) -> int:
    """Return the cores on which this process may run, within the quotas of its control groups, rounded up.

    root: folder with ``proc`` and ``sys``."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group, version in _control_groups(root, "cpu"):
        with suppress(OSError, ValueError):  # no such group, or no quota, which version 2 calls "max"
            if version == 1:
                quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            else:
                quota, period = map(int, (group / "cpu.max").read_text().split())
            if quota > 0 and period > 0:  # version 1 writes -1 for no quota
                cores = min(cores, math.ceil(quota / period))
    return cores


def _control_groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folders of all control groups above this process, with their version. None on systems without them.

    controller: the name of version 1, in which each controller has groups of its own."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = mount / controller if controllers else mount
        # In a container the path can be the host's, which is not mounted there: then only the top folder exists.
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, 1 if controllers else 2
            if folder == base:
                break
