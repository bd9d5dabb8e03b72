"""One run, end to end: discover, scan, fit, count, write, verify, commit.

The decisions are made by small pure functions elsewhere; this module executes them."""

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
from pipeline.core.shardset.contract import Manifest, Neighbourhood, Worker
from pipeline.core.shardset.damage import first_damage
from pipeline.core.shardset.manifest import ShardSet, missing_file, read_committed
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

MOST_SHARES = 1 << 24  # limit of workers x groups that the driver sums: 128 MiB


@dataclass(frozen=True)
class ShardingResult:
    """The result of a run.

    shards: the set; fresh: True if this run committed it; report: path of its report, or None."""

    shards: ShardSet
    fresh: bool
    report: str | None = None


def shard(context: SparkContext, request: Request, strategy: Strategy, progress: PhaseLog) -> ShardingResult:
    """Shard an input and commit the result, or return the set if it is committed already.

    Raises UsageError, DataError and JobError, after which nothing is left behind. The driver holds O(files + chunks x
    groups), never O(rows)."""
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
    """Return the rows to shard and the evaluation rows.

    Raises DataError for broken inputs, and if the two have different layouts; UsageError if they share files."""

    def find(uri: str, evaluation: bool) -> Dataset:
        return discover(
            store,
            uri,
            run=run_on(context),
            read_options=request.read_options,
            evaluation=evaluation,
        )

    given = {"--input": request.input, "--eval-input": request.eval_input}
    beforehand.check_inputs(context, store, {flag: uri for flag, uri in given.items() if uri})
    dataset = find(request.input, False)
    if not request.eval_input:
        return dataset, None
    beside = find(request.eval_input, True)
    # The number of classes may differ: evaluation rows need not contain every class.
    if replace(beside.layout, num_classes=dataset.layout.num_classes) != dataset.layout:
        raise DataError(
            f"{beside.uri} holds {beside.layout.describe()}, the input {dataset.layout.describe()}; they must match"
        )
    if {file.path for file in beside.files} & {file.path for file in dataset.files}:
        raise UsageError(f"--eval-input {beside.uri} and --input read the same files; name the evaluation files")
    return dataset, beside


def file_names(dataset: Dataset) -> str:
    """Return the names of the first and the last file, which show which split of the input is read."""
    names = list(dict.fromkeys(dataset.files[at].path.rpartition("/")[2] for at in (0, -1)))
    return (" and " if len(dataset.files) == 2 else " to ").join(names)


def check_num_workers(request: Request, dataset: Dataset) -> None:
    """Raise UsageError if there are more workers than rows."""
    if request.num_workers > dataset.rows and not request.allow_empty:
        raise UsageError(f"--workers {request.num_workers} is more than the {dataset.rows} rows; use fewer workers")


@dataclass(frozen=True)
class Inputs:
    """Both inputs after their scan."""

    source: Source
    evaluation: Source | None

    def fingerprints(self) -> tuple[str, str | None]:
        return self.source.fingerprint(), self.evaluation.fingerprint() if self.evaluation else None


@dataclass(frozen=True)
class Placed:
    """The placement of the rows, and its description for the manifest.

    Attributes:
        placement: decides which workers get a row.
        copies: number of copies.
        params: parameters that the fit decided.
        neighbourhoods: the manifest's entries, or None.
        histogram: int64 [workers, neighbourhoods], rows of each by worker, or None.
        shares: int64 [workers], rows by worker, if they are known before the write.
        models: fitted models by name.
    """

    placement: Placement
    copies: int
    params: dict[str, Any]
    neighbourhoods: list[Neighbourhood] | None = None
    histogram: Ints | None = None
    shares: Ints | None = None
    models: dict[str, Any] = field(default_factory=dict)


def deal(fitted: Fitted, num_workers: int, ratios: Sequence[int] | None) -> Placed:
    """Deal the groups of a fit to workers. ratios: shares of the workers; None: equal."""
    grouping = fitted.grouping
    table = group_table(
        fitted.counts.sum(axis=0), num_workers, fitted.start, fitted.sparse_if, tuple(ratios) if ratios else None
    )
    # A histogram with too many entries is left out of the manifest.
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

    Returns None if the grouping deals rows by a rule that it does not count, or if there are very many groups."""
    kind = type(grouping)
    counted = kind.workers is Grouping.workers or kind.rows_by_worker is not Grouping.rows_by_worker
    if not counted or table.num_workers * len(table.sizes) > MOST_SHARES:
        return None
    rows: Ints = grouping.rows_by_worker(table).sum(axis=1)
    return rows


@dataclass(frozen=True)
class Dealt:
    """The placed and written rows, before the commit."""

    placed: Placed
    written: Written
    written_eval: Written | None


@dataclass(frozen=True)
class ShardingRun:
    """A run from a discovered input to a committed set; each method is a step.

    Attributes:
        context: runs the tasks.
        request: configuration of the run.
        strategy: decides the groups.
        progress: times the phases.
        store: reaches the input and the output.
        output: folder of the set, resolved.
        dataset: the rows to shard.
        evaluation: the evaluation rows, or None.
        fit: replaces the strategy's fit.
        place: replaces fit and dealing.
        models: fitted models to copy: (current path, path under _model).
    """

    context: SparkContext
    request: Request
    strategy: Strategy
    progress: PhaseLog
    store: Store
    output: str
    dataset: Dataset
    evaluation: Dataset | None = None
    fit: Callable[[Context], Fitted] | None = None
    place: Callable[[Context, Source], Placed] | None = None
    models: tuple[tuple[str, str], ...] = ()

    @cached_property
    def identity(self) -> str:
        return identity(self.request, self.strategy)

    def carry_out(self) -> ShardingResult:
        """Commit the set, or return it if it is committed already; see ``shard``."""
        before = read_committed(self.store, self.output)
        # A listing is cheap: an unchanged input needs no scan.
        looks_current = before is not None and not self.request.rescan and self._is_current(before, None)
        if before and looks_current and not self._is_damaged(before):
            return self._found(before)
        beforehand.check_output(self.context, self.store, self.output)
        inputs = self._scan()
        if before and not looks_current and self._is_current(before, inputs) and not self._is_damaged(before):
            return self._found(before)
        damaged = before and before.manifest.identity == self.identity and missing_file(before)
        if before and not damaged:  # a set with missing files is repaired without --overwrite
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
        """Return the committed set, after files of killed runs beside it are deleted.

        Such files would repeat rows for a reader of all files of a worker's folder."""
        if has_leftovers(self.store, committed):
            with Attempt(self.store, self.output) as attempt:
                removed = tidy(attempt)
            self.progress.report(f"{removed} files that a killed run had left are deleted")
        return ShardingResult(committed, fresh=False)

    def _is_damaged(self, committed: ShardSet) -> bool:
        """True if --overwrite is set and a listed file has changed; the set is then made again."""
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
        source = inputs.source
        progress = self.progress
        num_workers = self.request.num_workers
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
        if placed.shares is not None:  # refuse empty workers before any row is written
            check_empty(placed.shares.tolist(), self.request.allow_empty)
        with progress.phase("write"):
            written = self._write(source, placed, staging)
            if placed.neighbourhoods is not None:
                sparse = sum(entry.sparse for entry in placed.neighbourhoods)
                progress.report(f"{placed.copies:,} copies of {sparse:,} sparse groups")
        written_eval = None
        if inputs.evaluation:
            with progress.phase("eval"):
                written_eval = self._write_evaluation(inputs.evaluation, staging)
        return Dealt(placed, written, written_eval)

    def _write(self, source: Source, placed: Placed, staging: str) -> Written:
        """Write and verify every row, or its assignment alone. Raises JobError."""
        if self.request.assignment_only:
            written = write_assignment(self.context, staging, source, placed.placement)
            assert written.tally, "of all chunks"
            total = int(written.tally.rows.sum())
            copies = int(written.tally.copies.sum())
            verify_counts(total, copies, source.scan, placed.copies)
            return written
        written = write_all(self.context, staging, source, placed.placement)
        verify(written.chunks, source.scan, placed.copies)
        return written

    def _write_evaluation(self, evaluation: Source, staging: str) -> Written:
        """Write the evaluation rows as one shard beside the others."""
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
        return ShardingResult(committed, fresh=committed.manifest.generation.endswith(attempt.id))

    def _describe(self, inputs: Inputs, dealt: Dealt, models: list[str]) -> Manifest:
        """Return the manifest."""
        source = inputs.source
        evaluation = inputs.evaluation
        placed = dealt.placed
        return Manifest(
            strategy=self.strategy.name,
            params={**self.strategy.params(), **placed.params},
            asked=self.strategy.params(),
            seed=self.strategy.seed,
            num_workers=self.request.num_workers,
            ratios=list(self.request.ratios) if self.request.ratios else None,
            rows=source.scan.rows,
            copies=placed.copies,
            interval=self.request.interval,
            input=source.describe(),
            image=describe_image(source),
            labels=describe_labels(source),
            chunks=[list(part) for part in source.parts],
            workers=self._describe_workers(dealt),
            neighbourhoods=placed.neighbourhoods,
            evaluation=describe_eval(evaluation, dealt.written_eval.chunks)
            if evaluation and dealt.written_eval
            else None,
            model=models or None,
            assignment=describe_assignment(dealt.written.assignment),
            assignment_only=self.request.assignment_only,
            identity=self.identity,
            seconds=dict(self.progress.seconds),
            versions=versions(),
        )

    def _describe_workers(self, dealt: Dealt) -> list[Worker]:
        allowed = self.request.allow_empty
        histogram = dealt.placed.histogram
        if dealt.written.tally:
            return describe_assigned_workers(dealt.written.tally, allowed, histogram)
        return describe_workers(dealt.written.chunks, self.request.num_workers, allowed, histogram)

    def _is_current(self, before: ShardSet, inputs: Inputs | None) -> bool:
        """True if the committed set equals the result of this run.

        Inputs are compared by listing if they are not scanned yet, else by content."""
        manifest = before.manifest
        if manifest.identity != self.identity or missing_file(before):
            return False
        if self.request.overwrite and "assignment" in manifest.absent:  # made by an older version
            return False
        beside = manifest.evaluation.input if manifest.evaluation else None
        if inputs is None:
            listings = self.dataset.listing(), self.evaluation.listing() if self.evaluation else None
            return (manifest.input.listing, beside.listing if beside else None) == listings
        return (manifest.input.fingerprint, beside.fingerprint if beside else None) == inputs.fingerprints()

    def _supersedes(self, theirs: ShardSet, inputs: Inputs) -> bool:
        """True if this run may replace a set that another run committed in the meantime. Raises UsageError."""
        if self._is_current(theirs, inputs):
            return False
        refuse_unless(self.request.overwrite, theirs, "run, committed while this one worked")
        return True
