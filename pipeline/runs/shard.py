"""One run, end to end: discover, scan, fit, count, write, verify, commit. Small pure parts decide; this carries out."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from pyspark import SparkContext

from pipeline.arrays import Ints
from pipeline.assignment.chunks import offsets_by_chunk
from pipeline.assignment.groups import GroupTable, group_table
from pipeline.clustering.persistence import save_model
from pipeline.errors import DataError, JobError, UsageError
from pipeline.input.dataset import Dataset, discover
from pipeline.input.scan import WORD, Scan
from pipeline.output.entries import (
    describe_eval,
    describe_image,
    describe_labels,
    describe_neighbourhoods,
    describe_workers,
    versions,
)
from pipeline.output.writer import SHARD_FOLDER, ChunkJob, WrittenChunk
from pipeline.runs.request import Request, check_output, identity
from pipeline.shardset.commit import Attempt, refuse_unless
from pipeline.shardset.manifest import FORMAT_VERSION, ShardSet, missing_file, read_committed
from pipeline.spark.images import Images, run_on
from pipeline.spark.progress import PhaseLog
from pipeline.spark.source import Source, scanned
from pipeline.spark.store import open_store
from pipeline.storage.retries import with_retries
from pipeline.storage.store import Store
from pipeline.strategies import Context, Fitted, Grouping, Strategy


@dataclass(frozen=True)
class ShardingResult:
    """fresh: whether this run committed the set, or found it."""

    shards: ShardSet
    fresh: bool


def shard(context: SparkContext, request: Request, strategy: Strategy, progress: PhaseLog) -> ShardingResult:
    """Shard an input and commit the result, or find it committed already.

    Raises UsageError, DataError, JobError; nothing is left behind then. The driver holds O(files + chunks x groups),
    never O(rows)."""
    store = open_store(context)
    output = check_output(store, request)

    def find(uri: str, evaluation: bool) -> Dataset:
        return discover(
            store,
            uri,
            run=run_on(context),
            format=request.format,
            shape=request.shape,
            num_classes=request.num_classes,
            evaluation=evaluation,
        )

    with progress.phase("discover"):
        dataset = find(request.input, False)
        beside = find(request.eval_input, True) if request.eval_input else None
        if beside and replace(beside.layout, num_classes=dataset.layout.num_classes) != dataset.layout:
            raise DataError(
                f"{beside.uri} holds {beside.layout.describe()}, the input {dataset.layout.describe()}; they must match"
            )
        if beside and {file.path for file in beside.files} & {file.path for file in dataset.files}:
            raise UsageError(f"--eval-input {beside.uri} and --input read the same files; name the evaluation files")
        size = "x".join(map(str, dataset.layout.shape))
        progress.report(f"{dataset.rows:,} rows of {size} in {len(dataset.files)} {dataset.format} files")
    if strategy.looks_at_pixels and dataset.layout.dtype != "uint8":
        raise UsageError(
            f"{strategy.name} looks at pixels, and {dataset.uri} holds {dataset.layout.describe()}; use stratified,"
            " round_robin or random"
        )
    if request.num_workers > dataset.rows and not request.allow_empty:
        raise UsageError(f"--workers {request.num_workers} is more than the {dataset.rows} rows; use fewer workers")
    return run(context, request, strategy, progress, Job(store, output, dataset, beside))


@dataclass(frozen=True)
class Job:
    """Where a run reads and writes. fit: how to get the grouping where the strategy is not to fit it (resharding).
    models: files of a fitted model to carry over, (where, path under _model)."""

    store: Store
    output: str
    dataset: Dataset
    beside: Dataset | None = None
    fit: Callable[[Context], Fitted] | None = None
    models: tuple[tuple[str, str], ...] = ()


def run(context: SparkContext, request: Request, strategy: Strategy, progress: PhaseLog, job: Job) -> ShardingResult:
    """From a found input to a committed set; see ``shard``."""
    mark = identity(request, strategy)
    before = read_committed(job.store, job.output)
    if before and _is_current(before, mark, job, None):
        return ShardingResult(before, fresh=False)
    with progress.phase("scan"):
        source = scanned(context, job.dataset, request.num_workers)
        beside = scanned(context, job.beside, 1) if job.beside else None
        progress.report(f"{source.scan.num_classes} classes, fingerprint {source.fingerprint()}")
    if before and _is_current(before, mark, job, (source, beside)):
        return ShardingResult(before, fresh=False)
    if before and not (before.manifest.get("identity") == mark and missing_file(before)):  # a damaged set is mended
        refuse_unless(request.overwrite, before, "configuration or input")

    with Attempt(job.store, job.output) as attempt:
        generation = _generation(mark, source, beside, before, attempt.id)
        images = Images(context, job.dataset)
        fitting = Context(images, source.scan, source.bounds, request.num_workers, progress.phase, progress.report)
        fitted = job.fit(fitting) if job.fit else strategy.fit(fitting)
        table = group_table(fitted.counts.sum(axis=0), request.num_workers, fitted.start, fitted.sparse_if)
        write = partial(write_all, context, attempt.folder, generation)
        with progress.phase("write"):
            written = write(source, fitted.grouping, table, fitted.counts)
            progress.report(f"{table.copies:,} copies of {int(table.sparse.sum())} sparse groups")
        written_eval = []
        if beside:
            with progress.phase("eval"):
                whole = np.array([[high - low] for low, high in beside.bounds], np.int64)
                written_eval = write(beside, Grouping(), group_table(whole.sum(axis=0), 1), whole, folder="_eval")
        with progress.phase("commit"):
            models = save_models(context, job.store, fitted.models, attempt.folder, generation)
            models += copy_models(job.store, job.models, attempt.folder, generation)
            manifest = {
                "format_version": FORMAT_VERSION,
                "strategy": strategy.name,
                "params": {**strategy.params(), **fitted.params},
                "asked": strategy.params(),
                "seed": strategy.seed,
                "num_workers": request.num_workers,
                "rows": source.scan.rows,
                "copies": table.copies,
                "interval": request.interval,
                "input": source.describe(),
                "image": describe_image(source),
                "labels": describe_labels(source),
                "chunks": [list(bound) for bound in source.bounds],
                "workers": describe_workers(written, request.num_workers, request.allow_empty),
                "neighbourhoods": describe_neighbourhoods(table) if fitted.grouping.neighbourhoods else None,
                "eval": describe_eval(beside, written_eval) if beside else None,
                "model": {"files": [{"path": path} for _, path in models]} if models else None,
                "identity": mark,
                "generation": generation,
                "seconds": dict(progress.seconds),
                "versions": versions(),
            }
            moves = [(file.staged, file.path) for chunk in [*written, *written_eval] for file in chunk.files]
            committed = attempt.publish(
                manifest,
                moves + models,
                before=before,
                supersedes=lambda theirs: _supersedes(theirs, request, mark, job, (source, beside)),
            )
    return ShardingResult(committed, fresh=committed.manifest is manifest)


def _is_current(before: ShardSet, mark: str, job: Job, sources: tuple[Source, Source | None] | None) -> bool:
    """Whether the committed set is what this run would make: by listing alone, or by content once it was scanned."""
    manifest = before.manifest
    if manifest.get("identity") != mark or missing_file(before):
        return False
    beside = (manifest.get("eval") or {}).get("input", {})
    if sources is None:
        eval_listing = job.beside.listing() if job.beside else None
        return (manifest["input"]["listing"], beside.get("listing")) == (job.dataset.listing(), eval_listing)
    source, evaluation = sources
    eval_mark = evaluation.fingerprint() if evaluation else None
    return (manifest["input"]["fingerprint"], beside.get("fingerprint")) == (source.fingerprint(), eval_mark)


def _supersedes(theirs: ShardSet, request: Request, mark: str, job: Job, sources: tuple[Source, Source | None]) -> bool:
    """Whether this run may replace what another run committed in the meantime."""
    if _is_current(theirs, mark, job, sources):
        return False
    refuse_unless(request.overwrite, theirs, "run, committed while this one worked")
    return True


def _generation(mark: str, source: Source, evaluation: Source | None, before: ShardSet | None, attempt: str) -> str:
    """The part of file names that tells sets apart: the same for the same configuration and content."""
    parts = [mark, source.fingerprint(), evaluation.fingerprint() if evaluation else ""]
    name = hashlib.sha256("|".join(parts).encode()).hexdigest()[:8]
    if before and before.manifest.get("generation") == name:  # a damaged set is being replaced by its like
        name = hashlib.sha256(f"{name}|{attempt}".encode()).hexdigest()[:8]
    return name


def write_all(
    context: SparkContext,
    staging: str,
    generation: str,
    source: Source,
    grouping: Grouping,
    table: GroupTable,
    counts: Ints,
    folder: str = SHARD_FOLDER,
) -> list[WrittenChunk]:
    """One task a chunk, verified. Every try of a task writes into a folder of its own; only what returns is used."""
    job = ChunkJob(
        source.dataset,
        grouping,
        table,
        offsets_by_chunk(counts),
        source.bounds,
        staging,
        generation,
        source.scan.num_classes,
        folder,
    )
    write = with_retries(lambda chunk: job.write(chunk, f"{chunk:05d}-{uuid.uuid4().hex[:8]}"))
    written = run_on(context)(write, list(range(len(job.bounds))))
    verify(written, source.scan, table)
    return written


def verify(written: list[WrittenChunk], scan: Scan, table: GroupTable) -> None:
    """No row lost, altered, or doubled but for the declared copies. Raises JobError: then nothing is committed."""
    rows = sum(chunk.rows for chunk in written)
    mark = sum(chunk.fingerprint for chunk in written) & WORD
    copies = sum(file.copies for chunk in written for file in chunk.files)
    total = sum(file.rows for chunk in written for file in chunk.files)
    if (rows, mark) != (scan.rows, scan.fingerprint):
        raise JobError(
            f"the input changed while it was sharded: {scan.rows} rows ({scan.fingerprint:016x}) were scanned,"
            f" {rows} ({mark:016x}) written; nothing was committed, rerun on a settled input"
        )
    if (copies, total) != (table.copies, scan.rows + table.copies):
        raise JobError(
            f"{total} rows with {copies} copies were written, not {scan.rows} + {table.copies}; nothing was committed"
        )


def save_models(
    context: SparkContext, store: Store, models: dict[str, Any], staging: str, generation: str
) -> list[tuple[str, str]]:
    """Save fitted models in the attempt's folder; (staged, path under OUTPUT) of their files."""
    moves = []
    for name, model in models.items():
        path = f"_model/{generation}/{name}"
        staged = f"{staging}/{path}"
        save_model(model, store, staged, context)
        moves += [(file, path + file[len(staged) :]) for file in store.walk(staged)]
    return moves


def copy_models(
    store: Store, models: tuple[tuple[str, str], ...], staging: str, generation: str
) -> list[tuple[str, str]]:
    """Carry saved models over from another set; (staged, path under OUTPUT) of their files."""
    moves = []
    for source, name in models:
        path = f"_model/{generation}/{name}"
        store.makedirs(f"{staging}/{path}".rpartition("/")[0])
        store.write_new(f"{staging}/{path}", store.read(source))
        moves.append((f"{staging}/{path}", path))
    return moves
