"""Everything a run writes before its commit: shard files by tasks, verified, and fitted models."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from pyspark import SparkContext

from pipeline.arrays import Ints
from pipeline.assignment.chunks import offsets_by_chunk
from pipeline.assignment.groups import GroupTable
from pipeline.errors import JobError
from pipeline.input.scan import WORD, Scan
from pipeline.output.spill import Spilled, SpillJob
from pipeline.output.writer import SHARD_FOLDER, ChunkJob, WrittenChunk
from pipeline.shardset.commit import Move
from pipeline.spark.images import run_on
from pipeline.spark.source import Source
from pipeline.storage.retries import with_retries
from pipeline.storage.store import Store
from pipeline.strategies import Grouping

T = TypeVar("T")


def write_all(
    context: SparkContext,
    staging: str,
    source: Source,
    grouping: Grouping,
    table: GroupTable,
    counts: Ints,
    folder: str = SHARD_FOLDER,
) -> list[WrittenChunk]:
    """All files, verified. One task a chunk, or two rounds of tasks where there are very many workers. Every try of a task
    writes into a folder of its own; only what returns is used."""
    job = ChunkJob(
        source.dataset,
        grouping,
        table,
        offsets_by_chunk(counts),
        source.bounds,
        staging,
        source.scan.num_classes,
        folder,
    )
    run = run_on(context)
    if source.width is None:
        written = run(with_retries(partial(_one_try, job, job.write)), list(range(len(job.bounds))))
    else:
        spilling = SpillJob(job, source.width, source.parts)
        spilled = run(with_retries(partial(_one_try, job, spilling.spill)), list(range(len(job.bounds))))
        gather = partial(_gather, spilling, spilled)
        written = run(with_retries(partial(_one_try, job, gather)), spilling.tasks())
    verify(written, source.scan, table)
    return written


def _gather(job: SpillJob, spilled: list[Spilled], where: tuple[int, int], task: str) -> WrittenChunk:
    return job.gather(spilled, *where, task)


def _one_try(job: ChunkJob, work: Callable[[Any, str], T], what: Any) -> T:
    """One try of a task, which leaves nothing where it fails."""
    task = uuid.uuid4().hex
    try:
        return work(what, task)
    except BaseException:
        with suppress(OSError):  # then the end of the run deletes it
            job.dataset.store.delete(f"{job.staging}/{task}")
        raise


def verify(written: list[WrittenChunk], scan: Scan, table: GroupTable) -> None:
    """No row lost, altered, or doubled but for the declared copies. Raises JobError: then nothing is committed."""
    rows = sum(chunk.rows for chunk in written)
    fingerprint = sum(chunk.fingerprint for chunk in written) & WORD
    copies = sum(file.copies for chunk in written for file in chunk.files)
    total = sum(file.rows for chunk in written for file in chunk.files)
    if (rows, fingerprint) != (scan.rows, scan.fingerprint):
        raise JobError(
            f"the input changed while it was sharded: {scan.rows} rows ({scan.fingerprint:016x}) were scanned,"
            f" {rows} ({fingerprint:016x}) written; nothing was committed, rerun on a settled input"
        )
    if (copies, total) != (table.copies, scan.rows + table.copies):
        raise JobError(
            f"{total} rows with {copies} copies were written, not {scan.rows} + {table.copies}; nothing was committed"
        )


def save_models(context: SparkContext, store: Store, models: dict[str, Any], staging: str) -> list[Move]:
    """Save fitted models in the attempt's folder; what to move."""
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


def copy_models(store: Store, models: tuple[tuple[str, str], ...], staging: str) -> list[Move]:
    """Carry saved models over from another set; what to move."""
    moves = []
    for source, name in models:
        path = f"_model/{name}"
        store.makedirs(f"{staging}/{path}".rpartition("/")[0])
        store.write_new(f"{staging}/{path}", store.read(source))
        moves.append((f"{staging}/{path}", path))
    return moves
