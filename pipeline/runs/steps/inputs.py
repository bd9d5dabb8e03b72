"""The steps that find the rows and read them for the first time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.parts import Repeats
from pipeline.core.shardset.schema import unreadable_in_spark
from pipeline.doctor import beforehand
from pipeline.input.arrivals import BadRecord
from pipeline.input.bad_records import leave_out_bad, parse_limit
from pipeline.input.dataset import Dataset, discover
from pipeline.input.evaluation import check_evaluation
from pipeline.input.quarantine import path_of
from pipeline.runs.request import Request
from pipeline.runs.steps.run import ShardingRun
from pipeline.spark.images import Images, run_on
from pipeline.spark.source import ScannedInput, scan_for_repeats

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """The rows of a run before their scan.

    dataset: the rows to shard; evaluation: the evaluation rows, or None."""

    dataset: Dataset
    evaluation: Dataset | None = None

    def listings(self) -> tuple[str, str | None]:
        return self.dataset.listing(), self.evaluation.listing() if self.evaluation else None

    def remarks(self) -> list[str]:
        """Return lines about how files are read, for the progress log."""
        return [line for dataset in (self.dataset, self.evaluation) if dataset for line in dataset.remarks()]

    def describe(self) -> str:
        """Return rows, shape and files in one line, for the progress log."""
        dataset = self.dataset
        size = "x".join(map(str, dataset.layout.shape))
        files = f"{len(dataset.files)} {dataset.format} files ({file_names(dataset)})"
        evaluation = ""
        if self.evaluation:
            evaluation = f"; {self.evaluation.rows:,} evaluation rows ({file_names(self.evaluation)})"
        return f"{dataset.rows:,} rows of {size} in {files}{evaluation}"


@dataclass(frozen=True)
class ScannedInputs:
    """The rows of a run after their scan.

    Attributes:
        source: the rows to shard.
        evaluation: the evaluation rows, or None.
        repeats: images that occur twice.
        bad_records: the rows that are left out.
        quarantined: how many of them are from the input, not the evaluation.
    """

    source: ScannedInput
    evaluation: ScannedInput | None = None
    repeats: Repeats | None = None
    bad_records: Sequence[BadRecord] = ()
    quarantined: int = 0

    def fingerprints(self) -> tuple[tuple[str | None, str | None], ...]:
        """Return the fingerprints of the rows and of their kept columns, for the rows and the evaluation rows."""
        inputs = (self.source, self.evaluation) if self.evaluation else (self.source,)
        return tuple((each.fingerprint(), each.attributes()) for each in inputs)


def discover_inputs(run: ShardingRun) -> Inputs:
    """Find the files of the rows to shard and of the evaluation rows.

    Raises DataError for broken inputs, and if the two have different layouts; UsageError if they share files."""
    request = run.request
    places = {"--input": request.input} | ({"--eval-input": request.eval_input} if request.eval_input else {})
    beforehand.check_inputs(run.context, run.store, places)

    def find(uri: str, evaluation: bool, names: tuple[str, ...] = ()) -> Dataset:
        # Kept columns describe the rows that are divided; evaluation rows have none.
        options = replace(request.read_options, counts_broken=request.max_bad_records is not None)
        options = replace(options, columns=()) if evaluation else options
        if uri in request.tables:
            options = replace(options, format=None)  # --format is the format of the other input
        dataset = discover(
            run.store, uri, run=run_on(run.context), read_options=options, evaluation=evaluation, class_names=names
        )
        return replace(dataset, uri=request.tables.get(uri, uri))

    for column in unreadable_in_spark(request.read_options.columns):
        logger.warning(
            f"warning: Spark does not read the kept column {column} in shards, where the names of folders or another column"
            " take its place; rename it to read it there"
        )
    dataset = find(request.input, False)
    if not request.eval_input:
        return Inputs(dataset)
    evaluation = find(request.eval_input, True, dataset.layout.class_names)
    check_evaluation(dataset, evaluation)
    return Inputs(dataset, evaluation)


def file_names(dataset: Dataset) -> str:
    """Return the names of the first and the last file, which show which split of the input is read."""
    names = list(dict.fromkeys(dataset.files[at].path.rpartition("/")[2] for at in (0, -1)))
    return (" and " if len(dataset.files) == 2 else " to ").join(names)


def check_num_workers(request: Request, dataset: Dataset) -> None:
    """Raise UsageError if there are more workers than rows."""
    if request.num_workers > dataset.rows and not request.allow_empty:
        raise UsageError(
            f"--workers {request.num_workers} is more than the {dataset.rows} rows; use fewer workers, or --allow-empty"
        )


def scan_inputs(run: ShardingRun, inputs: Inputs) -> ScannedInputs:
    """Read all rows: leave out broken ones within --max-bad-records, count and fingerprint the rest, and find images
    that occur twice.

    Costs one pass over the rows, and another one with --max-bad-records. Raises DataError for more broken rows, and for
    an evaluation label beyond the input's classes."""
    with run.progress.phase("scan"):
        bad_records: list[BadRecord] = []
        dataset = _leave_out_bad(run, inputs.dataset, bad_records)
        quarantined = inputs.dataset.rows - dataset.rows
        evaluation_dataset = _leave_out_bad(run, inputs.evaluation, bad_records) if inputs.evaluation else None
        source, evaluation, repeats = scan_for_repeats(
            run.context, dataset, run.request.num_workers, evaluation_dataset
        )
        classes = f"{source.scan.num_classes} classes" if inputs.dataset.layout.labelled else "no labels"
        run.progress.report("; ".join([f"{classes}, fingerprint {source.fingerprint()}", *repeats.sentences()]))
        # Only a scan finds the number of classes where no layout declares it.
        if evaluation and evaluation.scan.num_classes > source.scan.num_classes:
            raise DataError(
                f"{evaluation.dataset.uri} has the label {evaluation.scan.num_classes - 1}, the input has only"
                f" {source.scan.num_classes} classes; correct the labels, or declare more with --num-classes"
            )
    return ScannedInputs(source, evaluation, repeats, bad_records, quarantined)


def _leave_out_bad(run: ShardingRun, dataset: Dataset, bad_records: list[BadRecord]) -> Dataset:
    """Return the rows without broken ones if --max-bad-records is set, and append these to ``bad_records``."""
    if run.request.max_bad_records is None:
        return dataset
    limit = parse_limit(run.request.max_bad_records)
    rest, broken_rows = leave_out_bad(dataset, limit, len(Images(run.context, dataset).pieces()), run_on(run.context))
    if broken_rows:
        count = sum(entry.records for entry in broken_rows)
        run.progress.report(f"{count:,} broken records are left out: {path_of(run.request.output, 0)}")
    bad_records += broken_rows
    return rest
