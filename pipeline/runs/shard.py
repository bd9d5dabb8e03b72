"""One run, end to end: discover, scan, fit, count, write, verify, commit. Small pure parts decide; this carries out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from pyspark import SparkContext

from pipeline.assignment.chunks import offsets_by_chunk
from pipeline.assignment.groups import MOST_COUNTS, GroupTable, group_table
from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.attempt import Attempt
from pipeline.core.shardset.commit import has_leftovers, publish, refuse_unless, tidy
from pipeline.core.shardset.damage import first_damage
from pipeline.core.shardset.manifest import FORMAT_VERSION, ShardSet, missing_file, read_committed
from pipeline.core.storage.store import Store
from pipeline.doctor import beforehand
from pipeline.input.dataset import Dataset, discover
from pipeline.output.entries import (
    check_empty,
    describe_assigned_workers,
    describe_assignment,
    describe_eval,
    describe_image,
    describe_labels,
    describe_neighbourhoods,
    describe_workers,
    versions,
)
from pipeline.output.placement import Dealing, Placement
from pipeline.runs.request import Request, check_output, difference, identity
from pipeline.runs.write import (
    Written,
    copy_models,
    save_models,
    verify,
    verify_counts,
    write_all,
    write_assignment,
)
from pipeline.spark.images import Images, run_on
from pipeline.spark.progress import PhaseLog
from pipeline.spark.source import Source, scanned
from pipeline.spark.store import open_store
from pipeline.strategies import Context, Fitted, Strategy
from pipeline.strategies.base import Grouping, OneGroup

MOST_SHARES = 1 << 24  # numbers of groups by worker that the driver adds up: 128 MiB


@dataclass(frozen=True)
class ShardingResult:
    """fresh: whether this run committed the set, or found it committed. report: where its report stands, or None."""

    shards: ShardSet
    fresh: bool
    report: str | None = None


def shard(context: SparkContext, request: Request, strategy: Strategy, progress: PhaseLog) -> ShardingResult:
    """Shard an input and commit the result, or find it committed already.

    Raises UsageError, DataError, JobError; nothing is left behind then. The driver holds O(files + chunks x groups),
    never O(rows)."""
    store = open_store(context)
    output = check_output(store, request)
    with progress.phase("discover"):
        dataset, evaluation = discover_inputs(context, store, request)
        size = "x".join(map(str, dataset.layout.shape))
        files = f"{len(dataset.files)} {dataset.format} files ({file_names(dataset)})"
        beside = f"; {evaluation.rows:,} evaluation rows ({file_names(evaluation)})" if evaluation else ""
        progress.report(f"{dataset.rows:,} rows of {size} in {files}{beside}")
    strategy.check_input(dataset)
    check_num_workers(request, dataset)
    strategy = strategy.prepared(store, run_on(context))
    return ShardingRun(context, request, strategy, progress, store, output, dataset, evaluation).carry_out()


def discover_inputs(context: SparkContext, store: Store, request: Request) -> tuple[Dataset, Dataset | None]:
    """The rows to shard and the evaluation rows. Raises DataError, UsageError where the two do not go together."""

    def find(uri: str, evaluation: bool) -> Dataset:
        return discover(
            store,
            uri,
            run=run_on(context),
            format=request.format,
            shape=request.shape,
            num_classes=request.num_classes,
            unlabelled=request.unlabelled,
            evaluation=evaluation,
            channels=request.channels,
        )

    given = {"--input": request.input, "--eval-input": request.eval_input}
    beforehand.check_inputs(context, store, {flag: uri for flag, uri in given.items() if uri})
    dataset = find(request.input, False)
    if not request.eval_input:
        return dataset, None
    beside = find(request.eval_input, True)
    if replace(beside.layout, num_classes=dataset.layout.num_classes) != dataset.layout:
        raise DataError(
            f"{beside.uri} holds {beside.layout.describe()}, the input {dataset.layout.describe()}; they must match"
        )
    if {file.path for file in beside.files} & {file.path for file in dataset.files}:
        raise UsageError(f"--eval-input {beside.uri} and --input read the same files; name the evaluation files")
    return dataset, beside


def file_names(dataset: Dataset) -> str:
    """Return the names of the first and the last file, so that a reader sees which split of the input is read."""
    names = list(dict.fromkeys(dataset.files[at].path.rpartition("/")[2] for at in (0, -1)))
    return (" and " if len(dataset.files) == 2 else " to ").join(names)


def check_num_workers(request: Request, dataset: Dataset) -> None:
    """Raises UsageError for more workers than rows."""
    if request.num_workers > dataset.rows and not request.allow_empty:
        raise UsageError(f"--workers {request.num_workers} is more than the {dataset.rows} rows; use fewer workers")


@dataclass(frozen=True)
class Inputs:
    """Both inputs, scanned."""

    source: Source
    evaluation: Source | None

    def fingerprints(self) -> tuple[str, str | None]:
        return self.source.fingerprint(), self.evaluation.fingerprint() if self.evaluation else None


@dataclass(frozen=True)
class Placed:
    """Where the rows are to go, and what the manifest tells of it. neighbourhoods: its entries; histogram: rows of each by
    worker, int64 [workers, neighbourhoods]; shares: rows by worker, int64 [workers], where they are known before any is
    written; models: fitted ones by name."""

    placement: Placement
    copies: int
    params: dict[str, Any]
    neighbourhoods: list[dict[str, Any]] | None = None
    histogram: Ints | None = None
    shares: Ints | None = None
    models: dict[str, Any] = field(default_factory=dict)


def deal(fitted: Fitted, num_workers: int, ratios: Sequence[int] | None) -> Placed:
    """The groups of a fit, dealt."""
    grouping = fitted.grouping
    table = group_table(
        fitted.counts.sum(axis=0), num_workers, fitted.start, fitted.sparse_if, tuple(ratios) if ratios else None
    )
    told = grouping.neighbourhoods and num_workers * len(table.sizes) <= MOST_COUNTS
    return Placed(
        Dealing(grouping, table, offsets_by_chunk(fitted.counts)),
        table.copies,
        fitted.params,
        describe_neighbourhoods(table) if grouping.neighbourhoods else None,
        grouping.rows_by_worker(table) if told else None,
        shares(grouping, table),
        fitted.models,
    )


def shares(grouping: Grouping, table: GroupTable) -> Ints | None:
    """Return the rows of each worker, copies included, int64 [workers].

    None where a grouping deals rows in a way of its own that it does not count, or where there are very many groups."""
    kind = type(grouping)
    counted = kind.workers is Grouping.workers or kind.rows_by_worker is not Grouping.rows_by_worker
    if not counted or table.num_workers * len(table.sizes) > MOST_SHARES:
        return None
    rows: Ints = grouping.rows_by_worker(table).sum(axis=1)
    return rows


@dataclass(frozen=True)
class Dealt:
    """What was placed and written, not committed yet."""

    placed: Placed
    written: Written
    written_eval: Written | None


@dataclass(frozen=True)
class ShardingRun:
    """A run from a discovered input to a committed set; each method is a step."""

    context: SparkContext
    request: Request
    strategy: Strategy
    progress: PhaseLog
    store: Store
    output: str  # resolved
    dataset: Dataset
    evaluation: Dataset | None = None
    fit: Callable[[Context], Fitted] | None = None  # how to get the grouping where the strategy is not to fit it
    place: Callable[[Context, Source], Placed] | None = None  # where rows go that are not dealt by groups
    models: tuple[tuple[str, str], ...] = ()  # fitted ones to carry over: (where, path under _model)

    @cached_property
    def identity(self) -> str:
        return identity(self.request, self.strategy)

    def carry_out(self) -> ShardingResult:
        """Commit the set, or find it committed; see ``shard``."""
        before = read_committed(self.store, self.output)
        looks_current = before is not None and not self.request.rescan and self._is_current(before, None)
        if before and looks_current and not self._is_damaged(before):
            return self._found(before)
        beforehand.check_output(self.context, self.store, self.output)
        inputs = self._scan()
        if before and not looks_current and self._is_current(before, inputs) and not self._is_damaged(before):
            return self._found(before)
        damaged = before and before.manifest.get("identity") == self.identity and missing_file(before)
        if before and not damaged:  # a set that misses files is mended without --overwrite
            refuse_unless(
                self.request.overwrite,
                before,
                f"configuration or input ({difference(before, self.request, self.strategy)})",
            )
        with Attempt(self.store, self.output) as attempt:
            dealt = self._deal(inputs, attempt.folder)
            with self.progress.phase("commit"):
                return self._commit(attempt, before, inputs, dealt)

    def _found(self, committed: ShardSet) -> ShardingResult:
        """The set that is there, without what runs that were killed have left beside it: a reader of all files of a
        worker's folder would see rows twice."""
        if has_leftovers(self.store, committed):
            with Attempt(self.store, self.output) as attempt:
                removed = tidy(attempt)
            self.progress.report(f"{removed} files that a killed run had left are deleted")
        return ShardingResult(committed, fresh=False)

    def _is_damaged(self, committed: ShardSet) -> bool:
        """With --overwrite, whether a file that is listed is not what it was: then the set is made again."""
        if not self.request.overwrite:
            return False
        with self.progress.phase("verify"):
            found = first_damage(committed, run_on(self.context))
            if found:
                self.progress.report(f"{found}: the set is made again")
        return found is not None

    def _scan(self) -> Inputs:
        with self.progress.phase("scan"):
            source = scanned(self.context, self.dataset, self.request.num_workers)
            evaluation = scanned(self.context, self.evaluation, 1) if self.evaluation else None
            classes = f"{source.scan.num_classes} classes" if self.dataset.layout.labelled else "no labels"
            self.progress.report(f"{classes}, fingerprint {source.fingerprint()}")
            if evaluation and evaluation.scan.num_classes > source.scan.num_classes:
                raise DataError(
                    f"{evaluation.dataset.uri} has the label {evaluation.scan.num_classes - 1}, the input has only"
                    f" {source.scan.num_classes} classes; correct the labels, or declare more with --num-classes"
                )
        return Inputs(source, evaluation)

    def _deal(self, inputs: Inputs, staging: str) -> Dealt:
        """Fit, and write every row to the staging folder."""
        source, progress, num_workers = inputs.source, self.progress, self.request.num_workers
        images = Images(self.context, self.dataset)
        context = Context(
            images,
            source.scan,
            source.bounds,
            num_workers,
            progress.phase,
            progress.report,
            f"{staging}/groups",
            tuple(self.request.ratios) if self.request.ratios else None,
        )
        if self.place:
            placed = self.place(context, source)
        else:
            fitted = self.fit(context) if self.fit else self.strategy.fit(context)
            placed = deal(fitted, num_workers, self.request.ratios)
        if placed.shares is not None:  # told before any row is written
            check_empty(placed.shares.tolist(), self.request.allow_empty)
        with progress.phase("write"):
            written = self._write(source, placed, staging)
            if placed.neighbourhoods is not None:
                sparse = sum(entry["sparse"] for entry in placed.neighbourhoods)
                progress.report(f"{placed.copies:,} copies of {sparse:,} sparse groups")
        written_eval = None
        if inputs.evaluation:
            with progress.phase("eval"):
                written_eval = self._write_evaluation(inputs.evaluation, staging)
        return Dealt(placed, written, written_eval)

    def _write(self, source: Source, placed: Placed, staging: str) -> Written:
        """Every row, or what becomes of it, verified. Raises JobError."""
        if self.request.assignment_only:
            written = write_assignment(self.context, staging, source, placed.placement)
            assert written.tally, "of all chunks"
            total, copies = int(written.tally.rows.sum()), int(written.tally.copies.sum())
            verify_counts(total, copies, source.scan, placed.copies)
            return written
        written = write_all(self.context, staging, source, placed.placement)
        verify(written.chunks, source.scan, placed.copies)
        return written

    def _write_evaluation(self, evaluation: Source, staging: str) -> Written:
        """The evaluation rows as one shard beside the others."""
        counts = np.array([[high - low] for low, high in evaluation.bounds], np.int64)
        placement = deal(Fitted(OneGroup(), counts), 1, None).placement
        written = write_all(self.context, staging, evaluation, placement, folder="_eval")
        verify(written.chunks, evaluation.scan, 0)
        return written

    def _commit(self, attempt: Attempt, before: ShardSet | None, inputs: Inputs, dealt: Dealt) -> ShardingResult:
        if self.models:
            models = copy_models(self.store, self.models, attempt.folder)
        else:
            models = save_models(self.context, self.store, dealt.placed.models, attempt.folder)
        manifest = self._describe(inputs, dealt, [path for _, path in models])
        moves = dealt.written.moves() + (dealt.written_eval.moves() if dealt.written_eval else [])
        committed = publish(
            attempt, manifest, moves + models, before=before, supersedes=lambda theirs: self._supersedes(theirs, inputs)
        )
        return ShardingResult(committed, fresh=committed.manifest["generation"].endswith(attempt.id))

    def _describe(self, inputs: Inputs, dealt: Dealt, models: list[str]) -> dict[str, Any]:
        """The manifest."""
        source, evaluation, placed = inputs.source, inputs.evaluation, dealt.placed
        return {
            "format_version": FORMAT_VERSION,
            "strategy": self.strategy.name,
            "params": {**self.strategy.params(), **placed.params},
            "asked": self.strategy.params(),
            "seed": self.strategy.seed,
            "num_workers": self.request.num_workers,
            "ratios": self.request.ratios and list(self.request.ratios),
            "rows": source.scan.rows,
            "copies": placed.copies,
            "interval": self.request.interval,
            "input": source.describe(),
            "image": describe_image(source),
            "labels": describe_labels(source),
            "chunks": [list(part) for part in source.parts],
            "workers": self._describe_workers(dealt),
            "neighbourhoods": placed.neighbourhoods,
            "eval": describe_eval(evaluation, dealt.written_eval.chunks) if evaluation and dealt.written_eval else None,
            "model": {"files": [{"path": path} for path in models]} if models else None,
            "assignment": describe_assignment(dealt.written.assignment),
            "assignment_only": self.request.assignment_only,
            "identity": self.identity,
            "seconds": dict(self.progress.seconds),
            "versions": versions(),
        }

    def _describe_workers(self, dealt: Dealt) -> list[dict[str, Any]]:
        allowed, histogram = self.request.allow_empty, dealt.placed.histogram
        if dealt.written.tally:
            return describe_assigned_workers(dealt.written.tally, allowed, histogram)
        return describe_workers(dealt.written.chunks, self.request.num_workers, allowed, histogram)

    def _is_current(self, before: ShardSet, inputs: Inputs | None) -> bool:
        """Whether the committed set is what this run would make: by listing alone, or by content once it was scanned."""
        manifest = before.manifest
        if manifest.get("identity") != self.identity or missing_file(before):
            return False
        if self.request.overwrite and "assignment" not in manifest:  # of an older version
            return False
        beside = (manifest.get("eval") or {}).get("input", {})
        if inputs is None:
            listings = self.dataset.listing(), self.evaluation.listing() if self.evaluation else None
            return (manifest["input"]["listing"], beside.get("listing")) == listings
        return (manifest["input"]["fingerprint"], beside.get("fingerprint")) == inputs.fingerprints()

    def _supersedes(self, theirs: ShardSet, inputs: Inputs) -> bool:
        """Whether this run may replace what another run committed in the meantime."""
        if self._is_current(theirs, inputs):
            return False
        refuse_unless(self.request.overwrite, theirs, "run, committed while this one worked")
        return True
