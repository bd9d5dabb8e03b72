"""The facts that a process reports about itself and its machine.

Standard library only: tasks run this on executors, whose Python may lack every package."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

DRIVER = "driver"
TASK_S = 0.2  # the least duration of a task, so that the tasks of a round go to all executors
PROGRAM_S = 10  # the time limit of another program (java, klist)
# The packages that tasks import, by distribution: the name of the module.
PACKAGES = {
    "pyspark": "pyspark", "numpy": "numpy", "scipy": "scipy", "pandas": "pandas", "pyarrow": "pyarrow", "pillow": "PIL",
    "xxhash": "xxhash", "threadpoolctl": "threadpoolctl", "tenacity": "tenacity", "hdfs-native": "hdfs_native",
    "obstore": "obstore", "google-crc32c": "google_crc32c",
}  # fmt: skip
LIBJPEG = "libjpeg"  # the library that decodes Pillow's JPEGs, which has its own version
TOKENS = "HADOOP_TOKEN_FILE_LOCATION"  # YARN sets this variable of its containers to the path of the file


class Folder(NamedTuple):
    """A folder for temporary files.

    Attributes:
        setting: the setting that determines the folder, such as "TMPDIR".
        path: its path.
        free: bytes that this user may still write there; 0 if the folder does not exist.
        writable: whether this process may write there.
    """

    setting: str
    path: str
    free: int
    writable: bool


class ProcessFacts(NamedTuple):
    """The facts that one process reports.

    Attributes:
        where: "driver", or the name of an executor's machine.
        key: distinguishes executors on one machine.
        python: the version of Python.
        java: the version of Java; empty if unknown.
        packages: versions by distribution; empty for a missing one.
        open_files: the limit of open files per process; -1: unlimited.
        umask: the permission bits that new files lack.
        folders: the folders for temporary files.
        has_ticket: whether this user has a Kerberos ticket, as far as a program can find out.
        has_tokens: whether a file of Hadoop's delegation tokens exists.
        clock_s: seconds since 1970 by the machine's clock.
    """

    where: str
    key: str
    python: str
    java: str
    packages: Mapping[str, str]
    open_files: int
    umask: int
    folders: Sequence[Folder]
    has_ticket: bool
    has_tokens: bool
    clock_s: float


class ExecutorAccess(NamedTuple):
    """The access of one executor.

    Attributes:
        where: the name of its machine.
        visible: for each given path, whether the executor sees it.
        may_use_hdfs: whether it has a Kerberos ticket or delegation tokens.
    """

    where: str
    visible: tuple[bool, ...]
    may_use_hdfs: bool


def facts_of_process(where: str, java: str = "") -> ProcessFacts:
    """Return the facts of this process. java: the version, if the caller knows it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ProcessFacts(
        where=where,
        # Each executor has a working folder of its own, which tells executors on one machine apart.
        key=f"{socket.gethostname()}:{os.getcwd()}",
        python=platform.python_version(),
        java=java,
        packages=package_versions(),
        open_files=-1 if soft == resource.RLIM_INFINITY else soft,
        umask=current_umask(),
        folders=temporary_folders(os.environ),
        has_ticket=has_ticket(),
        has_tokens=has_tokens(),
        clock_s=time.time(),
    )


def facts_of_executor(_: int) -> ProcessFacts:
    """Return the facts of an executor."""
    time.sleep(TASK_S)
    return facts_of_process(socket.gethostname(), java_above())


def check_access(paths: Sequence[str], kerberos: bool, keytab: str, _: int) -> ExecutorAccess:
    """Return which local paths this executor sees, and whether it may use HDFS. Runs in a Spark task.

    Args:
        paths: the local paths to look for.
        kerberos: whether HDFS requires a Kerberos ticket or delegation tokens.
        keytab: the path of the job's keytab, empty without one.
        _: the element that ``RDD.map`` passes, the task's number; not used.
    """
    exists = tuple(os.path.exists(path) for path in paths)
    return ExecutorAccess(
        socket.gethostname(), exists, not kerberos or has_tokens() or has_ticket() or os.path.isfile(keytab)
    )


def package_versions() -> dict[str, str]:
    """Return the version of every package that tasks import; empty for a missing one."""
    versions = {name: package_version(name, module) for name, module in PACKAGES.items()}
    if versions["pillow"]:
        with suppress(Exception):  # a Pillow without its C library
            features = import_module("PIL.features")
            versions[LIBJPEG] = str(features.version("libjpeg_turbo") or features.version("jpg"))
    return versions


def package_version(name: str, module: str) -> str:
    """Return the version of a package, or an empty text if its module is not found."""
    loaded = getattr(sys.modules.get(module), "__version__", None)
    if isinstance(loaded, str):  # executors import pyspark from a zip, not from an installed package
        return loaded
    if find_spec(module) is None:
        return ""
    try:
        return version(name)
    except PackageNotFoundError:
        return "of an unknown version"


def current_umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def temporary_folders(environment: Mapping[str, str]) -> tuple[Folder, ...]:
    """Return TMPDIR and, on an executor, Spark's local folders."""
    local = [path for path in environment.get("SPARK_LOCAL_DIRS", "").split(",") if path]
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:  # no folder is writable
        temporary = environment.get("TMPDIR", "/tmp")
    return (folder_facts("TMPDIR", temporary), *(folder_facts("spark.local.dir", path) for path in local))


def folder_facts(setting: str, path: str) -> Folder:
    """Return the free space of a folder, and whether files can be made there."""
    try:
        free = shutil.disk_usage(path).free
    except OSError:
        return Folder(setting, path, 0, False)
    return Folder(setting, path, free, os.access(path, os.W_OK | os.X_OK))


def has_ticket() -> bool:
    """True if this user has a valid Kerberos ticket or a keytab. Without the program klist: if a ticket cache exists."""
    if os.path.isfile(os.environ.get("KRB5_CLIENT_KTNAME", "").removeprefix("FILE:")):
        return True
    if klist := shutil.which("klist"):
        with suppress(OSError, subprocess.TimeoutExpired):
            return subprocess.run([klist, "-s"], capture_output=True, timeout=PROGRAM_S, check=False).returncode == 0
    kind, _, path = (os.environ.get("KRB5CCNAME") or f"FILE:/tmp/krb5cc_{os.getuid()}").rpartition(":")
    return kind not in ("", "FILE", "DIR") or os.path.exists(path)  # KCM and keyrings cannot be inspected


def has_tokens() -> bool:
    """True if a file of delegation tokens exists for this process."""
    return os.path.exists(os.environ.get(TOKENS, ""))


def java_above() -> str:
    """Return the version of the Java that started this process (an executor); empty if /proc does not show it."""
    pid = os.getppid()
    with suppress(OSError, IndexError, ValueError):
        while pid > 1:
            program = Path(os.readlink(f"/proc/{pid}/exe"))
            if program.name == "java":
                release = (program.parents[1] / "release").read_text(encoding="utf-8")
                match = re.search(r'^JAVA_VERSION="(.*)"', release, re.MULTILINE)
                return match[1] if match else ""
            pid = int(
                Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
            )
    return ""


def java_installed() -> str:
    """Return the version of the Java in JAVA_HOME or PATH; empty if there is none."""
    home = os.environ.get("JAVA_HOME")
    program = f"{home}/bin/java" if home else "java"
    try:
        process = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=PROGRAM_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r'version "([^"]+)"', process.stderr)
    return match[1] if match else ""
