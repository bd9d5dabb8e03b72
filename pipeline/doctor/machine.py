"""Checks of the machines: open files, room for temporary files, umask."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.doctor.checks import FAILED, OK, WARNING, Check, group_by_value, shorten_names
from pipeline.doctor.facts import ProcessFacts

# A task that writes for 256 workers has a file open for each, in addition to its libraries and connections.
FEWEST_FILES = 400
ENOUGH_FILES = 1024
LEAST_ROOM = 256 << 20  # bytes: a task's spool
ENOUGH_ROOM = 4 << 30  # bytes: decoded rows, shuffles and spools of several tasks
GIB = 1 << 30


def check_open_files(facts: Sequence[ProcessFacts]) -> Check:
    """Return the check of the limit of open files per process: failed if a task's files exceed it, a warning if it is
    low."""
    text = group_by_value(
        [(each.where, "unlimited" if each.open_files < 0 else f"{each.open_files:,}") for each in facts]
    )
    few = [each for each in facts if 0 <= each.open_files < ENOUGH_FILES]
    if not few:
        return Check("open files", OK, text)
    level = FAILED if any(each.open_files < FEWEST_FILES for each in few) else WARNING
    where = shorten_names([each.where for each in few])
    advice = f"before Spark starts on {where}, raise the limit: ulimit -n {4 * ENOUGH_FILES}"
    return Check("open files", level, text, advice)


def check_folders(facts: Sequence[ProcessFacts]) -> list[Check]:
    """Return the checks of folders for temporary files: one failed for each folder that cannot be written or is full,
    and one warning for each with little room. Without problems, return one check that passed."""
    problems = []
    folders = [(each.where, folder) for each in facts for folder in each.folders]
    # Executors on one machine may share their folders: report each problem once.
    for where, folder in dict.fromkeys(folders):
        text = f"{folder.path} on {where}: {folder.free / GIB:.1f} GiB free"
        if not folder.writable:
            text = f"{folder.path} on {where} cannot be written"
        if not folder.writable or folder.free < LEAST_ROOM:
            problems.append(Check("temporary", FAILED, text, f"set {folder.setting} to a folder with room"))
        elif folder.free < ENOUGH_ROOM:
            problems.append(Check("temporary", WARNING, text, f"free some, or set {folder.setting} to another folder"))
    paths = shorten_names([folder.path for _, folder in folders])
    least = min(folder.free for _, folder in folders)
    return problems or [Check("temporary", OK, f"{least / GIB:.1f} GiB free or more in {paths}")]


def check_umask(facts: Sequence[ProcessFacts], store_umask: int | None) -> Check:
    """Return the check of the umask: a warning if other users could not read the output.

    facts: of the driver and the executors. store_umask: the umask of HDFS; None if the output is elsewhere, so that the
    processes' own umask applies."""
    values = [("HDFS", store_umask)] if store_umask is not None else [(each.where, each.umask) for each in facts]
    text = group_by_value([(where, f"{umask:03o}") for where, umask in values])
    if any(umask & 0o044 for _, umask in values):
        setting = "umask" if store_umask is None else "fs.permissions.umask-mode"
        return Check(
            "umask", WARNING, f"{text}: new files are not readable by all users", f"for all, set {setting} to 022"
        )
    return Check("umask", OK, text)
