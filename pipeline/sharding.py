"""One run, end to end: discover, scan, fit, count, write, verify, commit. Small pure parts decide; this carries out."""

from __future__ import annotations

import hashlib
import json
import platform
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
from pyspark import SparkContext

from pipeline.assign import GroupTable, Ints, chunk_bounds, group_table, offsets_by_chunk
from pipeline.commit import Attempt, refuse_unless
from pipeline.dataset import Dataset, discover
from pipeline.errors import DataError, JobError, UsageError
from pipeline.images import Images, run_on
from pipeline.manifest import FORMAT_VERSION, ShardSet, missing_file, read_committed
from pipeline.modelfile import save_model, store_of
from pipeline.progress import Progress
from pipeline.scan import WORD, Scan, scan
from pipeline.storage import Store, patiently
from pipeline.strategies import Context, Fitted, Grouping, Strategy
from pipeline.writer import ChunkJob, WrittenChunk, WrittenFile

LIBRARIES = ("pyspark", "numpy", "scipy", "pyarrow")


@dataclass(frozen=True)
class Request:
    """What a job asks for, whatever the strategy. interval: {"ds": ...} or {"run_id": ...} of a batch run, or None."""

    input: str
    output: str
    num_workers: int
    eval_input: str | None = None
    format: str | None = None
    shape: tuple[int, int, int] | None = None
    num_classes: int | None = None
    overwrite: bool = False
    allow_empty: bool = False
    interval: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise UsageError(f"--workers must be at least 1, got {self.num_workers}")


@dataclass(frozen=True)
class Outcome:
    """fresh: whether this run committed the set, or found it."""

    shards: ShardSet
    fresh: bool


@dataclass(frozen=True)
class Source:
    """A scanned input. bounds: the id ranges of the write tasks."""

    dataset: Dataset
    scan: Scan
    bounds: list[tuple[int, int]]

    def fingerprint(self) -> str:
        return f"{self.scan.rows}-{self.scan.fingerprint:016x}"

    def describe(self) -> dict[str, Any]:
        return {
            "uri": self.dataset.uri,
            "format": self.dataset.format,
            "files": len(self.dataset.files),
            "bytes": self.dataset.bytes,
            "rows": self.dataset.rows,
            "fingerprint": self.fingerprint(),
            "listing": self.dataset.listing(),
        }


def check_output(store: Store, request: Request) -> str:
    """The resolved output, once it is clear that writing there can make sense. Raises UsageError."""
    output = store.resolve(request.output)
    for given in filter(None, (request.input, request.eval_input)):
        source = store.resolve(given)
        if output == source or source.startswith(output + "/") or output.startswith(source + "/"):
            raise UsageError(f"--output {output} and the input {source} overlap; choose a folder of its own")
    try:
        if not store.info(output).is_dir:
            raise UsageError(f"--output {output} is a file; choose a folder")
    except FileNotFoundError:
        pass
    return output


def identity(request: Request, strategy: Strategy) -> str:
    """A digest of everything but the input that decides the shards: equal runs have equal ones."""
    asked = {
        "format_version": FORMAT_VERSION,
        "strategy": strategy.name,
        "params": strategy.params(),
        "seed": strategy.seed,
        "num_workers": request.num_workers,
        "interval": request.interval,
        "classes": request.num_classes,
        "eval": bool(request.eval_input),
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def shard(context: SparkContext, request: Request, strategy: Strategy, progress: Progress) -> Outcome:
    """Shard an input and commit the result, or find it committed already.

    Raises UsageError, DataError, JobError; nothing is left behind then. The driver holds O(files + chunks x groups),
    never O(rows)."""
    store = store_of(context)
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
        if beside and (beside.layout.shape, beside.layout.coarse) != (
            dataset.layout.shape,
            dataset.layout.coarse,
        ):
            raise DataError(
                f"{beside.uri} holds {beside.layout.describe()}, the input {dataset.layout.describe()}; they must match"
            )
        size = "x".join(map(str, dataset.layout.shape))
        progress.report(f"{dataset.rows:,} rows of {size} in {len(dataset.files)} {dataset.format} files")
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


def run(context: SparkContext, request: Request, strategy: Strategy, progress: Progress, job: Job) -> Outcome:
    store, output = job.store, job.output
    mark = identity(request, strategy)
    before = read_committed(store, output)
    if before and _is_current(before, mark, job, None):
        return Outcome(before, fresh=False)
    with progress.phase("scan"):
        source = scanned(context, job.dataset, request.num_workers)
        evaluation = scanned(context, job.beside, 1) if job.beside else None
        progress.report(f"{source.scan.num_classes} classes, fingerprint {source.fingerprint()}")
    if before and _is_current(before, mark, job, (source, evaluation)):
        return Outcome(before, fresh=False)
    if before:
        refuse_unless(request.overwrite, before, "configuration or input")

    with Attempt(store, output) as attempt:
        generation = _generation(mark, source, evaluation, before, attempt.id)
        images = Images(context, job.dataset)
        fitting = Context(images, source.scan, source.bounds, request.num_workers, progress.phase, progress.report)
        fitted = job.fit(fitting) if job.fit else strategy.fit(fitting)
        table = group_table(fitted.counts.sum(axis=0), request.num_workers, fitted.start, fitted.sparse_if)
        with progress.phase("write"):
            chunk_job = ChunkJob(
                job.dataset,
                fitted.grouping,
                table,
                offsets_by_chunk(fitted.counts),
                source.bounds,
                attempt.folder,
                generation,
                source.scan.num_classes,
            )
            written = write_all(context, chunk_job)
            progress.report(f"{table.copies:,} copies of {int(table.sparse.sum())} sparse groups")
        verify(written, source.scan, table)
        workers = describe_workers(written, table, request)
        written_eval = None
        if evaluation:
            with progress.phase("eval"):
                written_eval = write_beside(context, evaluation, attempt.folder, generation, source.scan.num_classes)
                verify(written_eval, evaluation.scan, _one_worker(evaluation))
        with progress.phase("commit"):
            models = save_models(context, store, fitted.models, attempt.folder, generation)
            models += copy_models(store, job.models, attempt.folder, generation)
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
                "image": {
                    "shape": list(job.dataset.layout.shape),
                    "dtype": "uint8",
                    "layout": "CHW",
                    "mean": source.scan.channel_means(job.dataset.record_bytes // job.dataset.layout.shape[0]),
                },
                "labels": {
                    "columns": ["label", *(["coarse_label"] if job.dataset.layout.coarse else [])],
                    "num_classes": source.scan.num_classes,
                },
                "chunks": [list(bound) for bound in source.bounds],
                "workers": workers,
                "neighbourhoods": _neighbourhoods(fitted.grouping, table),
                "eval": _describe_eval(evaluation, written_eval),
                "model": {"files": [{"path": path} for _, path in models]} if models else None,
                "identity": mark,
                "generation": generation,
                "seconds": dict(progress.seconds),
                "versions": {
                    "python": platform.python_version(),
                    **{name: version(name) for name in LIBRARIES},
                },
            }
            moves = [
                (file.staged, file.path) for part in (written, written_eval or []) for c in part for file in c.files
            ]
            committed = attempt.publish(
                manifest,
                moves + models,
                before=before,
                supersedes=lambda theirs: _supersedes(theirs, request, mark, job, source, evaluation),
            )
    return Outcome(committed, fresh=committed.manifest is manifest)


def scanned(context: SparkContext, dataset: Dataset, num_workers: int) -> Source:
    bounds = chunk_bounds(dataset.rows, num_workers, dataset.record_bytes)
    pieces = len(Images(context, dataset).pieces())
    return Source(dataset, scan(dataset, bounds, pieces, run_on(context)), bounds)


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


def _supersedes(
    theirs: ShardSet, request: Request, mark: str, job: Job, source: Source, evaluation: Source | None
) -> bool:
    """Whether this run may replace what another run committed in the meantime."""
    if _is_current(theirs, mark, job, (source, evaluation)):
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


def write_all(context: SparkContext, job: ChunkJob) -> list[WrittenChunk]:
    """One task a chunk. Every try of a task writes into a folder of its own; only what returns is used."""
    chunks = list(range(len(job.bounds)))
    write = patiently(lambda chunk: job.write(chunk, f"{chunk:05d}-{uuid.uuid4().hex[:8]}"))
    return run_on(context)(write, chunks)


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


def describe_workers(written: list[WrittenChunk], table: GroupTable, request: Request) -> list[dict[str, Any]]:
    by_worker: list[list[WrittenFile]] = [[] for _ in range(table.num_workers)]
    for chunk in written:
        for file in chunk.files:
            by_worker[file.worker].append(file)
    empty = [index for index, files in enumerate(by_worker) if not files]
    if empty and not request.allow_empty:
        raise UsageError(
            f"{len(empty)} of {table.num_workers} workers would get no rows (the first is {empty[0]});"
            f" use fewer workers, --start carry where the strategy has it, or --allow-empty"
        )
    return [
        {
            "index": index,
            "rows": sum(file.rows for file in files),
            "copies": sum(file.copies for file in files),
            "files": _files(files),
            "label_histogram": _histogram(files),
        }
        for index, files in enumerate(by_worker)
    ]


def _files(files: list[WrittenFile]) -> list[dict[str, Any]]:
    return [{"path": f.path, "rows": f.rows, "bytes": f.bytes, "sha256": f.sha256} for f in files]


def _histogram(files: list[WrittenFile]) -> list[int]:
    return np.sum([file.label_counts for file in files], axis=0).tolist() if files else []


def _neighbourhoods(grouping: Grouping, table: GroupTable) -> list[dict[str, Any]] | None:
    if not grouping.neighbourhoods:
        return None
    return [{"size": int(size), "sparse": bool(sparse)} for size, sparse in zip(table.sizes, table.sparse, strict=True)]


def _one_worker(source: Source) -> GroupTable:
    return group_table(np.array([source.dataset.rows]), 1)


def write_beside(
    context: SparkContext, source: Source, staging: str, generation: str, num_classes: int
) -> list[WrittenChunk]:
    """The evaluation rows, in id order, under OUTPUT/_eval: a name that table readers pass over."""
    counts: Ints = np.array([[high - low] for low, high in source.bounds], np.int64)
    classes = max(num_classes, source.scan.num_classes)
    return write_all(
        context,
        ChunkJob(
            source.dataset,
            Grouping(),
            _one_worker(source),
            offsets_by_chunk(counts),
            source.bounds,
            staging,
            generation,
            classes,
            folder="_eval",
        ),
    )


def _describe_eval(source: Source | None, written: list[WrittenChunk] | None) -> dict[str, Any] | None:
    if source is None or written is None:
        return None
    files = [file for chunk in written for file in chunk.files]
    return {
        "rows": source.dataset.rows,
        "files": _files(files),
        "label_histogram": _histogram(files),
        "input": source.describe(),
    }


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
