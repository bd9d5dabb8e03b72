"""Import pyspark from the folder that it is installed in, not from the zip file beside it.

spark-submit and the Python workers of executors have the zip files of SPARK_HOME/python/lib first on their path, and what
comes out of a zip file is compiled again by every process: a second for a driver, and one for its workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def without_zips(path: Sequence[str]) -> list[str]:
    """The path less those zip files of a Spark whose content is installed as folders that are on the path as well."""
    real = {os.path.realpath(entry) for entry in path}
    return [entry for entry in path if not _is_twin(Path(entry), real)]


def _is_twin(entry: Path, path: set[str]) -> bool:
    name = "pyspark" if entry.name == "pyspark.zip" else "py4j" if entry.match("py4j-*-src.zip") else None
    if name is None or entry.parts[-4:-1] != ("pyspark", "python", "lib"):
        return False
    packages = entry.parents[3]  # where pyspark is installed as a package, if this Spark is one
    return os.path.realpath(packages) in path and all(
        (packages / package / "__init__.py").is_file() for package in {"pyspark", name}
    )
