"""The zip of a package that the executors of a cluster import from."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import zipfile
from pathlib import Path

from pyspark import SparkContext

from pipeline.core.atomic import path_in_errors
from pipeline.core.command_line import CONF
from pipeline.spark.jvm import shipped_packages

PACKAGE = Path(__file__).resolve().parents[1]
NOT_SHIPPED = {"__pycache__", "conf"}  # folders; the files of conf are added separately


def package_zip(target: Path, *packages: Path) -> Path:
    """Write packages as a zip that executors and YARN containers import from.

    This package includes the defaults of conf/."""
    # Images that are built reproducibly date all files 1970, which a zip cannot store.
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for package in packages:
            for path in sorted(package.rglob("*")):
                if path.is_file() and not NOT_SHIPPED & set(path.relative_to(package).parts):
                    archive.write(path, path.relative_to(package.parent))
        for file in sorted(CONF.iterdir() if PACKAGE in packages else [], key=lambda file: file.name):
            if file.name.endswith((".toml", ".conf", ".properties")):
                archive.writestr(f"{PACKAGE.name}/conf/{file.name}", file.read_bytes())
    return target


def ship_package(context: SparkContext, package: Path = PACKAGE) -> None:
    """Give a package to the executors of a cluster, once per context; a local executor imports the driver's."""
    # In YARN's cluster mode this package is itself imported from a zip, which the executors have too.
    if str(context.master).startswith("local") or not package.is_dir():
        return
    name = f"{package.name}.zip"
    if name in shipped_packages(context):
        return
    folder = tempfile.mkdtemp()  # kept until the driver ends, for executors that join late
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with path_in_errors(folder):
        context.addPyFile(str(package_zip(Path(folder) / name, package)))
