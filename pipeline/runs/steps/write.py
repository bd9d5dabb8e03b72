"""The steps that write: shard files, written and verified by tasks, and fitted models."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any, TypeVar

import numpy as np
from pyspark import SparkContext

from pipeline.core.errors import DataError, JobError
from pipeline.core.shardset.commit import Move
from pipeline.core.storage.retries import with_retries
from pipeline.core.storage.store import Store
from pipeline.input.decoded import decoder_versions
from pipeline.input.scan import WORD, Scan
from pipeline.output.assignment import AssignmentFile, WorkerTotals
from pipeline.output.entries import check_empty
from pipeline.output.placement import Placement
from pipeline.output.spill import SpillFiles, SpillJob
from pipeline.output.writer import SHARD_FOLDER, ChunkJob, WrittenChunk
from pipeline.runs.steps.inputs import ScannedInputs
from pipeline.runs.steps.place import PlacedRows, deal
from pipeline.runs.steps.run import ShardingRun
from pipeline.spark.images import run_on
from pipeline.spark.source import ScannedInput
from pipeline.strategies import FitResult
from pipeline.strategies.base import OneGroup

T = TypeVar("T")


@dataclass(frozen=True)
class WrittenFiles:
    """The files of a run before its commit.

    chunks: the shard files, empty if only the assignment was written; assignment: its files; tally: totals of each
    worker if there are no chunks to count."""

    chunks: list[WrittenChunk]
    assignment: list[AssignmentFile]
    tally: WorkerTotals | None = None

    def moves(self) -> list[Move]:
        moves = [(file.staged, file.path) for chunk in self.chunks for file in chunk.files]
        return moves + [(file.staged, file.path) for file in self.assignment]


@dataclass(frozen=True)
class WrittenSet:
    """The rows of a set before their commit.

    Attributes:
        inputs: the scanned rows.
        placed_rows: their placement.
        rows: the files of the shards.
        evaluation: the files of the evaluation rows, or None.
    """

    inputs: ScannedInputs
    placed_rows: PlacedRows
    rows: WrittenFiles
    evaluation: WrittenFiles | None

    def moves(self) -> list[Move]:
        return self.rows.moves() + (self.evaluation.moves() if self.evaluation else [])


def write_rows(run: ShardingRun, scans: ScannedInputs, placed_rows: PlacedRows, staging: str) -> WrittenSet:
    """Write and verify every row, or with assignment_only its worker alone, and the evaluation rows.

    staging: the attempt's folder. Raises JobError, and UsageError for workers without rows."""
    if placed_rows.shares is not None:  # refuse empty workers before any row is written
        check_empty(placed_rows.shares.tolist(), run.request.allow_empty)
    with run.progress.phase("write"):
        write = _assign_and_verify if run.request.assignment_only else _write_and_verify
        rows = write(run.context, staging, scans.source, placed_rows)
        if placed_rows.neighbourhoods is not None:
            sparse = sum(entry.sparse for entry in placed_rows.neighbourhoods)
            run.progress.report(f"{placed_rows.copies:,} copies of {sparse:,} sparse groups")
    evaluation = None
    if scans.evaluation:
        with run.progress.phase("eval"):
            evaluation = _write_evaluation(run.context, staging, scans.evaluation)
    return WrittenSet(scans, placed_rows, rows, evaluation)


def _write_and_verify(
    context: SparkContext, staging: str, source: ScannedInput, placed_rows: PlacedRows
) -> WrittenFiles:
    files = write_all(context, staging, source, placed_rows.placement)
    verify_chunks(files.chunks, source.scan, placed_rows.copies)
    return files


def _assign_and_verify(
    context: SparkContext, staging: str, source: ScannedInput, placed_rows: PlacedRows
) -> WrittenFiles:
    """Write the assignment alone, one file per chunk, and check its counts."""
    job = ChunkJob(source.dataset, placed_rows.placement, source.bounds, staging, source.scan.num_classes)
    chunks = _run_tries(context, job, job.assign)
    tally = reduce(add, [chunk.tally for chunk in chunks])
    verify_counts(int(tally.rows.sum()), int(tally.copies.sum()), source.scan, placed_rows.copies)
    return WrittenFiles([], [chunk.file for chunk in chunks], tally)


def _write_evaluation(context: SparkContext, staging: str, evaluation: ScannedInput) -> WrittenFiles:
    """Write the evaluation rows as one shard beside the others."""
    counts = np.array([[high - low] for low, high in evaluation.bounds], np.int64)
    placement = deal(FitResult(OneGroup(), counts), 1, None).placement
    files = write_all(context, staging, evaluation, placement, folder="_eval")
    verify_chunks(files.chunks, evaluation.scan, 0)
    return files


def write_all(
    context: SparkContext,
    staging: str,
    source: ScannedInput,
    placement: Placement,
    folder: str = SHARD_FOLDER,
    first: int = 0,
) -> WrittenFiles:
    """Write all shard files and the assignment.

    There is one task per chunk, or two rounds of tasks for very many workers. Every try of a task writes to its own
    folder, and only files of tries that return are used.

    Args:
        context: runs the tasks.
        staging: the attempt's folder.
        source: the scanned rows.
        placement: decides which workers get a row.
        folder: pattern of a worker's folder under OUTPUT.
        first: number of the first chunk.
    """
    job = ChunkJob(source.dataset, placement, source.bounds, staging, source.scan.num_classes, folder, first)
    if source.width is None:
        chunks = _run_tries(context, job, job.write)
        return WrittenFiles(chunks, [chunk.assignment for chunk in chunks if chunk.assignment])
    spilling = SpillJob(job, source.width, source.parts)
    spills = _run_tries(context, job, spilling.spill)
    chunks = _run_tries(context, job, partial(_gather, spilling, spills), spilling.tasks())
    return WrittenFiles(chunks, [piece.assignment for piece in spills if piece.assignment])


def _gather(job: SpillJob, spills: list[SpillFiles], where: tuple[int, int], task: str) -> WrittenChunk:
    return job.gather(spills, *where, task)


def _run_tries(
    context: SparkContext, job: ChunkJob, work: Callable[[Any, str], T], pieces: Sequence[Any] | None = None
) -> list[T]:
    """Return the results of ``work(piece, task)`` in one task per piece; by default, pieces are the numbers of chunks."""
    numbers = range(len(job.bounds)) if pieces is None else pieces
    return run_on(context)(with_retries(partial(_one_try, job, work)), numbers)


def _one_try(job: ChunkJob, work: Callable[[Any, str], T], piece: Any) -> T:
    """Run one try of a task and delete its files if it fails."""
    task = uuid.uuid4().hex
    try:
        return work(piece, task)
    except BaseException:
        with suppress(OSError):  # the end of the run deletes it otherwise
            job.dataset.store.delete(f"{job.staging}/{task}")
        raise


def verify_chunks(written_chunks: list[WrittenChunk], scan: Scan, expected_copies: int) -> None:
    """Check that no row was lost, altered, or repeated except for the declared copies.

    Raises JobError, and nothing is then committed."""
    rows = sum(chunk.rows for chunk in written_chunks)
    fingerprint = sum(chunk.fingerprint for chunk in written_chunks) & WORD
    if (rows, fingerprint) != (scan.rows, scan.fingerprint):
        raise JobError(
            f"the input changed while it was sharded: {scan.rows} rows ({scan.fingerprint:016x}) were scanned,"
            f" {rows} ({fingerprint:016x}) written; nothing was committed, {_next_step(written_chunks, scan)}"
        )
    if (sum(chunk.attribute_sum for chunk in written_chunks) & WORD) != scan.attribute_sum:
        raise JobError("the kept columns changed while the input was sharded: rerun on a settled input")
    copies = sum(file.copies for chunk in written_chunks for file in chunk.files)
    total = sum(file.rows for chunk in written_chunks for file in chunk.files)
    verify_counts(total, copies, scan, expected_copies)


def _next_step(written_chunks: list[WrittenChunk], scan: Scan) -> str:
    """Return advice about rows that changed between scan and write.

    Other library versions can decode the same image file to other pixels."""
    driver_versions = decoder_versions()
    elsewhere = scan.versions.union(*(chunk.versions for chunk in written_chunks))
    if elsewhere <= {driver_versions}:
        return "rerun on a settled input"
    return (
        f"and hosts that decode images otherwise may be why: the driver has {driver_versions}, executors have"
        f" {' and '.join(sorted(elsewhere))}; install the same versions on all hosts, or rerun on a settled input"
    )


def verify_counts(total: int, copies: int, scan: Scan, expected_copies: int) -> None:
    """Check that every row and the declared number of copies were written. Raises JobError."""
    if (copies, total) != (expected_copies, scan.rows + expected_copies):
        raise JobError(
            f"{total} rows with {copies} copies were written, not {scan.rows} + {expected_copies}; nothing was committed"
        )


def save_models(context: SparkContext, store: Store, models: dict[str, Any], staging: str) -> list[Move]:
    """Save fitted models in the attempt's folder and return the files to move."""
    if not models:
        return []
    from pipeline.clustering.persistence import save_model  # loads spark.ml

    moves = []
    for name, model in models.items():
        path = f"_model/{name}"
        staged = f"{staging}/{path}"
        save_model(model, store, staged, context)
        moves += [(file, path + file[len(staged) :]) for file in store.walk(staged)]
    return moves


def check_models(store: Store, models: tuple[tuple[str, str], ...]) -> None:
    """Raise DataError if a saved model of another set is missing: ``copy_models`` finds that after all other work."""
    for source, _ in models:
        if not store.exists(source):
            raise DataError(f"{source} is missing; the set is damaged")


def copy_models(store: Store, models: tuple[tuple[str, str], ...], staging: str) -> list[Move]:
    """Copy saved models from another set and return the files to move. Raises DataError if one is missing."""
    moves = []
    for source, name in models:
        path = f"_model/{name}"
        store.makedirs(f"{staging}/{path}".rpartition("/")[0])
        try:
            store.write_new(f"{staging}/{path}", store.read(source))
        except FileNotFoundError:
            raise DataError(f"{source} is missing; the set is damaged") from None
        moves.append((f"{staging}/{path}", path))
    return moves
