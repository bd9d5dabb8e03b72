"""The machine and the program of a benchmark.

Readers need them to judge the figures, and records are comparable only if they are the same."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from pyspark import SparkContext

from pipeline.core.machine import usable_cores
from pipeline.core.provenance import processor
from pipeline.spark.jvm import jvm_of
from trainer.benchmark.systems.executors import ON_EXECUTORS, find_executors

LIBRARIES = ("pyspark", "numpy", "pyarrow", "torch", "pyzmq")
TRAINER = Path(__file__).resolve().parents[1]


def describe_machine(context: SparkContext, data: str) -> dict[str, Any]:
    """Return hardware, versions, Spark's settings, the folder of the data, and the load before the benchmark."""
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "java": jvm_of(context).System.getProperty("java.version"),
        "master": context.master,
        "parallelism": context.defaultParallelism,
        "driver_memory": context.getConf().get("spark.driver.memory", "1g"),
        "data": data,
        "servers_on": ON_EXECUTORS if find_executors(context) else "the driver's host",
        # Another program that runs meanwhile slows down some systems more than others.
        "load_before": round(psutil.getloadavg()[0], 2),
        **{library: version(library) for library in LIBRARIES},
    }


def hash_program() -> str:
    """Return a digest of the trainer's code, including the benchmark, on which the figures depend."""
    digest = hashlib.sha256()
    for path in sorted(TRAINER.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
