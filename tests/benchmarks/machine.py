"""The machine and the versions that a benchmark prints first."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import psutil

from trainer.plan import usable_cores


def print_machine() -> None:
    memory = psutil.virtual_memory().total / 2**30
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "pyzmq"))
    print(f"{_processor()}, {usable_cores()} of {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}", end=" ")
    print(f"{platform.release()}, Python {platform.python_version()}, {versions}")
    load = os.getloadavg()[0]
    print(f"load average before the run: {load:.1f}" + (" (not a quiet machine)" if load > 0.5 else ""))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
