"""The limits of a container: its memory and its cores, in control groups of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.core.machine import usable_cores, usable_memory


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")


def test_memory_is_the_least_limit_of_the_control_groups(tmp_path: Path) -> None:
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert usable_memory(tmp_path) == host
    write(tmp_path, {"proc/self/cgroup": "0::/pod/box", "sys/fs/cgroup/pod/box/memory.max": "max"})
    assert usable_memory(tmp_path) == host
    write(tmp_path, {"sys/fs/cgroup/pod/memory.max": "70000"})
    assert usable_memory(tmp_path) == 70000
    write(tmp_path, {"sys/fs/cgroup/memory.max": "60000"})
    assert usable_memory(tmp_path) == 60000
    # Version 1, and a path of the host that does not exist in the container.
    write(tmp_path, {"proc/self/cgroup": "5:cpu:/a\n3:memory,other:/docker/1f"})
    write(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "50000"})
    assert usable_memory(tmp_path) == 50000


def test_cores_are_those_of_the_least_quota_rounded_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    assert usable_cores(tmp_path) == 64
    write(tmp_path, {"proc/self/cgroup": "0::/pod/box", "sys/fs/cgroup/pod/box/cpu.max": "max 100000"})
    assert usable_cores(tmp_path) == 64
    write(tmp_path, {"sys/fs/cgroup/pod/cpu.max": "350000 100000"})
    assert usable_cores(tmp_path) == 4
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "20000 100000"})
    assert usable_cores(tmp_path) == 1
    # Version 1, where -1 is no quota.
    group = "sys/fs/cgroup/cpu/docker"
    write(tmp_path, {"proc/self/cgroup": "3:memory:/a\n4:cpu,cpuacct:/docker", f"{group}/cpu.cfs_period_us": "50000"})
    write(tmp_path, {f"{group}/cpu.cfs_quota_us": "-1"})
    assert usable_cores(tmp_path) == 64
    write(tmp_path, {f"{group}/cpu.cfs_quota_us": "100000"})
    assert usable_cores(tmp_path) == 2
