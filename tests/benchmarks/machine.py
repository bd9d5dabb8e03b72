"""The machine and the versions that a benchmark prints first."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from pipeline.core.machine import usable_cores


def print_machine() -> None:
    machine = describe_machine()
    versions = ", ".join(f"{name} {number}" for name, number in list_versions().items())
    cores = f"{machine['cores']} of {os.cpu_count()} cores"
    print(f"{machine['processor']}, {cores}, {machine['memory_gib']} GiB, {machine['system']}, {versions}")
    load = machine["load"]
    print(f"load average before the run: {load:.1f}" + (" (not a quiet machine)" if load > 0.5 else ""))


def describe_machine() -> dict[str, Any]:
    """Return the processor, its usable cores, the memory, the system and the load average of the last minute."""
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "load": round(os.getloadavg()[0], 2),
    }


def list_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages on which speed depends, by name."""
    return {"Python": platform.python_version()} | {name: version(name) for name in ("torch", "numpy", "pyzmq")}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
