"""The choice of where the workers of this host keep their rows: in their memory, or in memory-mapped files."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipeline.core.errors import JobError
from pipeline.core.machine import usable_memory
from pipeline.core.shardset.parts import ShardFile
from pipeline.core.sizes import bytes_in_words
from pipeline.core.storage.uri import is_remote
from trainer.config import Config, RunFacts
from trainer.home.folders import Folders
from trainer.home.work import WorkFolder
from trainer.lifecycle.interruption import RunInterruptedError
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
        owner: whose memory it is, in words.
    """

    worker_bytes: int
    limit_bytes: int
    missing_bytes: int
    free_bytes: int
    owner: str = "per worker"

    def fit_memory(self) -> bool:
        """Return whether the rows of every worker fit into its memory, beside all else that it needs."""
        return self.worker_bytes <= MEMORY_SHARE * self.limit_bytes

    def fit_disk(self) -> bool:
        """Return whether the disk has room for the files."""
        return self.missing_bytes <= self.free_bytes

    def are_mapped(self, choice: str) -> bool:
        """Return whether rows are mapped. choice: ``--row-storage``."""
        if choice != "auto":
            return choice == "mapped"
        # Without room on the disk, a run that has enough memory should not be refused.
        return not self.fit_memory() and (self.fit_disk() or self.worker_bytes > self.limit_bytes)

    def memory_in_words(self) -> str:
        """Return what the rows of a worker need of its memory."""
        return f"{bytes_in_words(self.worker_bytes)} of the {bytes_in_words(self.limit_bytes)} {self.owner}"

    def disk_in_words(self) -> str:
        """Return what the files need of the disk."""
        return f"{bytes_in_words(self.missing_bytes)} to write, {bytes_in_words(self.free_bytes)} free"


class RowReads(NamedTuple):
    """The shard files whose rows processes of this host need.

    Attributes:
        loaded: for each process with workers, the files of which it loads all rows.
        evaluated: files of evaluation rows.
        targets: whether labels are real targets.
        copies: rows that a process has in memory at a time, in multiples of those that it loads.
        in_virtual_time: whether one process has the rows of all workers, and the evaluation rows.
    """

    loaded: Sequence[Sequence[ShardFile]]
    evaluated: Sequence[ShardFile]
    targets: bool
    copies: float = 1
    in_virtual_time: bool = False


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
    say: Callable[[str], object] = lambda text: None,
) -> Iterator[str]:
    """Choose where the processes of this host keep rows, and yield the choice as a line; "" if they need none.

    Until the end, ``work.folders`` has the folder of memory-mapped files, if rows are mapped, and the folder with the mean
    image, if the run subtracts one. Files of a killed start are used again. At the end they are deleted, however the run
    ends, unless it continues at once with other workers. The end of the leading host deletes other hosts' files too, unless
    it is an error, after which these hosts may train on.

    Args:
        config, shards: the run.
        reads: the rows that processes of this host need.
        work: its work folder.
        leads: whether server 0 runs on this host.
        part: number of this host among the parts of a run on a cluster, which may share a machine: each has its own files.
        say: prints a message before a long computation.
    Raises:
        JobError: the disk has no room for the files.
        DataError, OSError: a file is damaged or cannot be read, from which the mean image is computed.
    """
    folders = work.folders
    folder = folders.work / ROWS / (host_name() if part is None else f"{host_name()}-{part}")
    line = _choose(config, shards, reads, work, folder)
    stays = not line
    try:
        if line and config.data.normalise == "image":
            work.folders = replace(work.folders, kept=folder)
            _keep_mean_image(shards, work.folders, say)
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
    from trainer.data.row_files import remove_drafts, remove_row_files  # see ``row_needs``

    choice = config.processes.row_storage
    if choice != "memory":
        remove_drafts(folder)
    needs = row_needs(config, shards, reads, folder)
    is_mapped = needs.are_mapped(choice)
    if is_mapped:
        _check_room(needs, folder)
        work.folders = replace(work.folders, rows=folder)
    else:
        remove_row_files(folder)  # of a killed start
    return describe_storage(needs, folder if is_mapped else None, is_by_choice=choice != "auto")


def _keep_mean_image(shards: Shards, folders: Folders, say: Callable[[str], object]) -> None:
    """Compute the mean image of a set for all processes of this host, unless an earlier start has left it.

    say: prints a message."""
    from trainer.data.mean_image import kept_mean_image  # see ``row_needs``

    say(f"--normalise image: the mean image of {shards.rows:,} rows is computed")
    kept_mean_image(replace(shards, mapped=folders.rows, kept=folders.kept))


def describe_storage(needs: RowNeeds, folder: Path | None, *, is_by_choice: bool) -> str:
    """Return the line about the storage of rows.

    folder: of memory-mapped files; None for rows in memory. is_by_choice: whether the user chose the storage."""
    if folder is None:
        without = "" if is_by_choice or needs.fit_memory() else f"; no room for mapped files: {needs.disk_in_words()}"
        return f"in memory: {needs.memory_in_words()}{without}"
    return f"memory-mapped in {folder}: {needs.disk_in_words()}; in memory: {needs.memory_in_words()}"


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
    evaluated = decoded(reads.evaluated, with_hashes=False)
    # By path, because processes that read the same file share one copy.
    every = [each for files in loaded for each in files] + evaluated
    missing = [each for each in {each.path: each for each in every}.values() if not each.is_made()]
    # Each process, and the evaluator, downloads one file at a time and then decodes it.
    downloads = sorted(each.file.bytes for each in missing if is_remote(shards.address(each.file)))
    beside = sum(each.bytes for each in evaluated) if reads.in_virtual_time else 0
    return RowNeeds(
        max(worker_bytes, default=0) + beside,
        config.processes.worker_memory or usable_memory() // max(1, len(loaded)),
        sum(each.bytes for each in missing) + sum(downloads[-len(loaded) - 1 :]),
        _free_bytes(folder),
        "for all workers" if reads.in_virtual_time else "per worker",
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
    if not needs.fit_disk():
        raise JobError(
            f"memory-mapped rows need {bytes_in_words(needs.missing_bytes)} in {folder}, which has"
            f" {bytes_in_words(needs.free_bytes)} free: make room, or give --row-storage memory, which needs"
            f" {bytes_in_words(needs.worker_bytes)} {needs.owner}"
        )


def _free_bytes(folder: Path) -> int:
    """Return the free space where a folder is or will be."""
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free
