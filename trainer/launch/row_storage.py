"""The choice of where the workers of this host keep their rows: in their memory, or in memory-mapped files."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipeline.core.errors import JobError
from pipeline.core.shardset.contract import ShardFile
from pipeline.core.sizes import bytes_in_words
from pipeline.core.storage.uri import is_remote
from trainer.config import Config, RunFacts
from trainer.home.work import WorkFolder
from trainer.launch.memory import usable_memory
from trainer.launch.supervisor import RunInterruptedError
from trainer.options import Role
from trainer.run_files import ROWS

if TYPE_CHECKING:
    from trainer.data.row_files import RowFile
    from trainer.data.shards import Shards

MEMORY_SHARE = 0.5  # of a worker's memory, for rows: the rest is for torch, the model and its activations


class RowNeeds(NamedTuple):
    """The space for the rows of this host.

    Attributes:
        worker_bytes: memory of the worker with the most rows while it loads them into memory.
        limit_bytes: memory per worker.
        missing_bytes: space on the disk that the files that do not exist yet take while they are made.
        free_bytes: free space.
    """

    worker_bytes: int
    limit_bytes: int
    missing_bytes: int
    free_bytes: int

    def fit_memory(self) -> bool:
        """Return whether the rows of every worker fit into its memory, beside all else that it needs."""
        return self.worker_bytes <= MEMORY_SHARE * self.limit_bytes

    def memory_in_words(self) -> str:
        """Return what the rows of a worker need of its memory."""
        return f"{bytes_in_words(self.worker_bytes)} of the {bytes_in_words(self.limit_bytes)} per worker"


class RowReads(NamedTuple):
    """The shard files whose rows processes of this host need.

    Attributes:
        loaded: for each process with workers, the files of which it loads all rows.
        evaluated: files of evaluation rows.
        targets: whether labels are real targets.
        copies: rows that a process has in memory at a time, in multiples of those that it loads.
    """

    loaded: Sequence[Sequence[ShardFile]]
    evaluated: Sequence[ShardFile]
    targets: bool
    copies: float = 1


def host_reads(config: Config, facts: RunFacts, shards: Shards, roles: Sequence[Role]) -> RowReads:
    """Return the files that processes with some roles need. A worker needs its own shard, or all of them."""
    workers = [role.index for role in roles if role.kind == "worker"]
    repartitions = config.data.repartition != "fixed"
    has_changed = bool(config.cohorts.entries)
    loaded = [shards.files() if repartitions or has_changed else shards.worker_files(worker) for worker in workers]
    evaluated = shards.eval_files() if any(role.kind == "evaluator" for role in roles) else []
    # With other workers than shards, a worker keeps its part of all rows and of the open passes, and reads shard by shard.
    parts = 2 / facts.num_workers + 1 / shards.num_workers
    copies = 2 if repartitions else parts if has_changed else 1
    return RowReads(loaded, evaluated, not facts.classifies, copies)


@contextmanager
def row_storage(
    config: Config,
    shards: Shards,
    reads: RowReads,
    work: WorkFolder,
    *,
    leads: bool,
    part: int | None = None,
) -> Iterator[str]:
    """Choose where the processes of this host keep rows, and yield the choice as a line; "" if they need none.

    Until the end, ``work.folders`` has the folder of memory-mapped files, if rows are mapped. Files of a killed start are
    used again. At the end they are deleted, however the run ends, unless it continues at once with other workers. The end
    of the leading host deletes other hosts' files too, unless it is an error, after which these hosts may train on.

    Args:
        config, shards: the run.
        reads: the rows that processes of this host need.
        work: its work folder.
        leads: whether server 0 runs on this host.
        part: number of this host among the parts of a run on a cluster, which may share a machine: each has its own files.
    Raises:
        JobError: the disk has no room for the files.
    """
    folders = work.folders
    folder = folders.work / ROWS / (host_name() if part is None else f"{host_name()}-{part}")
    line = _choose(config, shards, reads, work, folder)
    stays = not line
    try:
        yield line
        # Also files of hosts that were killed.
        if leads:
            shutil.rmtree(folder.parent, ignore_errors=True)
    except RunInterruptedError as error:
        stays = error.changes
        raise
    finally:
        work.folders = folders
        if not stays:
            remove_rows(folder)


def _choose(config: Config, shards: Shards, reads: RowReads, work: WorkFolder, folder: Path) -> str:
    """Choose as ``row_storage``, and return the choice as a line. folder: for memory-mapped files."""
    if not reads.loaded and not reads.evaluated:
        return ""
    needs = row_needs(config, shards, reads, folder)
    is_mapped = config.processes.row_storage == "mapped"
    if config.processes.row_storage == "auto":
        is_mapped = not needs.fit_memory()
    if is_mapped:
        _check_room(needs, folder)
        work.folders = replace(work.folders, rows=folder)
    else:
        remove_rows(folder)  # of a killed start
    return describe_storage(needs, folder if is_mapped else None)


def describe_storage(needs: RowNeeds, folder: Path | None) -> str:
    """Return the line about the storage of rows. folder: of memory-mapped files; None for rows in memory."""
    if folder is None:
        return f"in memory: {needs.memory_in_words()}"
    return (
        f"memory-mapped in {folder}: {bytes_in_words(needs.missing_bytes)} to write, {bytes_in_words(needs.free_bytes)}"
        f" free; in memory: {needs.memory_in_words()}"
    )


def row_needs(config: Config, shards: Shards, reads: RowReads, folder: Path) -> RowNeeds:
    """Return the space for the rows of this host, from the manifest alone.

    folder: of memory-mapped files. See ``row_storage`` for the other arguments."""
    from trainer.data.row_files import row_file  # loads pyarrow, which --help should not

    def decoded(files: Sequence[ShardFile], *, with_hashes: bool = True) -> list[RowFile]:
        return [row_file(shards, each, folder, targets=reads.targets, with_hashes=with_hashes) for each in files]

    loaded = [decoded(files) for files in reads.loaded]
    # In memory, whole shard files are read one after the other, beside the rows.
    worker_bytes = [
        int(reads.copies * sum(each.bytes for each in files)) + max(each.file.bytes for each in files)
        for files in loaded
    ]
    # By path, because processes that read the same file share one copy.
    every = [each for files in loaded for each in files] + decoded(reads.evaluated, with_hashes=False)
    missing = [each for each in {each.path: each for each in every}.values() if not each.is_made()]
    # Each process, and the evaluator, downloads one file at a time and then decodes it.
    downloads = sorted(each.file.bytes for each in missing if is_remote(shards.address(each.file)))
    return RowNeeds(
        max(worker_bytes, default=0),
        config.processes.worker_memory or usable_memory() // max(1, len(loaded)),
        sum(each.bytes for each in missing) + sum(downloads[-len(loaded) - 1 :]),
        _free_bytes(folder),
    )


def host_name() -> str:
    """Return the name of this host's folder, which differs between hosts that share the folder of a run."""
    return re.sub(r"[^\w.-]", "_", platform.node()) or "host"


def remove_rows(folder: Path) -> None:
    """Delete memory-mapped files, if there are any. Processes that have mapped them keep their content.

    Errors are ignored, because the run has ended."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()  # if no other host has files there


def _check_room(needs: RowNeeds, folder: Path) -> None:
    """Raise JobError if the disk has no room for memory-mapped files."""
    if needs.missing_bytes > needs.free_bytes:
        raise JobError(
            f"memory-mapped rows need {bytes_in_words(needs.missing_bytes)} in {folder}, which has"
            f" {bytes_in_words(needs.free_bytes)} free: make room, or give --row-storage memory, which needs"
            f" {bytes_in_words(needs.worker_bytes)} per worker"
        )


def _free_bytes(folder: Path) -> int:
    """Return the free space where a folder is or will be."""
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free
