"""The public functions, for notebooks and for the command lines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from pipeline.core.errors import UsageError, error_class
from pipeline.core.program import follows_interrupt
from pipeline.core.shardset.manifest import ShardSet, open_committed
from pipeline.core.specs import find
from pipeline.core.storage.store import Store
from pipeline.core.storage.uri import DATAFRAME
from pipeline.input.read_options import ReadOptions
from pipeline.runs import materialize as materializing
from pipeline.runs import reshard as resharding
from pipeline.runs import shard as sharding
from pipeline.runs.lineage import lineage_events
from pipeline.runs.program import cause
from pipeline.runs.report import REPORT, REPORT_MODULE, load_modules, try_report
from pipeline.runs.request import Request, input_path, preflight
from pipeline.runs.steps.run import ShardingResult
from pipeline.runs.tables import tables_as_files
from pipeline.spark.progress import PhaseLog
from pipeline.spark.session import context_of, spark_context
from pipeline.spark.store import open_store
from pipeline.strategies import STRATEGIES, Strategy


def shard(
    spark: SparkSession | None = None,
    *,
    input: str | DataFrame,
    output: str,
    strategy: Strategy | str,
    num_workers: int,
    eval_input: str | DataFrame | None = None,
    id_column: str | None = None,
    format: str | None = None,
    image_shape: tuple[int, int, int] | None = None,
    num_classes: int | None = None,
    unlabelled: bool = False,
    channels: int | None = None,
    keep_columns: Sequence[str] = (),
    resize: tuple[int, int] | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    max_bad_records: int | str | None = None,
    overwrite: bool = False,
    allow_empty: bool = False,
    interval: Mapping[str, str] | None = None,
    ratios: Sequence[int] | None = None,
    group_by: str | None = None,
    assignment_only: bool = False,
    report: bool = True,
    quiet: bool = False,
) -> ShardingResult:
    """Shard labelled images over workers and commit the set, or return it if it is committed already.

    The same arguments give the same bytes on any cluster. After an error nothing is left behind. The driver holds
    O(files + chunks x groups), with ratios also groups x workers bytes, never O(rows).

    Args:
        spark: the session to run on; None: the DataFrame's, the running one, else a local one for this call.
        input: a folder or file, local, hdfs:// or s3://; a DataFrame; or a table: "table:NAME", "delta:URI" or
            "iceberg:NAME".
        output: folder of the set.
        strategy: a spec, such as ``Stratified(start="carry")``, or the name of a strategy with default parameters.
        num_workers: number of shards.
        eval_input: evaluation images, as ``input``.
        id_column: column of a DataFrame or table whose values, all different, give the order of the rows; None: "id".
        format: format of the input; None: recognised.
        image_shape: (channels, height, width), if the files do not contain it.
        num_classes: labels must be in 0..num_classes-1; None: the layout's, or as found.
        unlabelled: the rows have no labels, or none that shards should contain.
        channels: 1 or 3, to convert RGB images to grey or grey ones to RGB; None: as they are.
        keep_columns: columns of the input that the shards keep beside image and label.
        resize: (height, width), to resize images; None: as they are.
        image_column: column or array of the images; None: a usual name.
        label_column: column or array of the labels; None: a usual name.
        max_bad_records: leave out at most so many broken records (10) or such a share ("0.1%"); None: none.
        overwrite: replace a committed set of another configuration.
        allow_empty: allow workers without rows.
        interval: {"ds": ...} or {"run_id": ...} of a batch run.
        ratios: shares of the workers, such as (4, 2, 1, 1); None: equal. ``pipeline.measured_ratios`` derives them
            from a training run, ``pipeline.named_ratios`` from a name such as "linear".
        group_by: column of the input whose rows with one value all go to one worker.
        assignment_only: write the worker of every row and no shards (``materialize`` makes them).
        report: also write report.html and quality.json, which takes about 2 s for 12 workers.
        quiet: print no progress.

    Raises:
        UsageError, DataError, JobError: see pipeline.core.errors.
    """
    # The command line makes the same Request, so both entries share all checks and give equal runs equal identities.
    frames = _frames(input=input, eval_input=eval_input)
    request = Request(
        input=_address(input, "input"),
        output=os.fspath(output),
        num_workers=num_workers,
        eval_input=None if eval_input is None else _address(eval_input, "eval_input"),
        read_options=ReadOptions(
            format=format,
            shape=image_shape,
            num_classes=num_classes,
            unlabelled=unlabelled,
            channels=channels,
            columns=_names(keep_columns),
            resize=resize,
            image_column=image_column,
            label_column=label_column,
        ),
        max_bad_records=None if max_bad_records is None else str(max_bad_records),
        overwrite=overwrite,
        allow_empty=allow_empty,
        interval=interval,
        ratios=ratios,
        assignment_only=assignment_only,
        group_by=group_by,
        id_column=id_column,
    )
    spec = strategy if isinstance(strategy, Strategy) else find(STRATEGIES, "strategy", strategy)()
    return shard_request(request, spec, spark=spark, report=report, progress=PhaseLog(quiet=quiet), frames=frames)


def reshard(
    spark: SparkSession | None = None,
    *,
    input: str | os.PathLike[str],
    output: str,
    num_workers: int,
    overwrite: bool = False,
    allow_empty: bool = False,
    interval: Mapping[str, str] | None = None,
    ratios: Sequence[int] | None = None,
    report: bool = True,
    quiet: bool = False,
) -> ShardingResult:
    """Divide a committed set over another number of workers.

    The result is, file for file, equal to the output of ``shard`` for that number.

    Args:
        spark, output, overwrite, allow_empty, interval, ratios, report, quiet: as in ``shard``.
        input: folder of the committed set.
        num_workers: the new number of shards.
    """
    request = Request(
        input=input_path(input, "input"),
        output=os.fspath(output),
        num_workers=num_workers,
        overwrite=overwrite,
        allow_empty=allow_empty,
        interval=interval,
        ratios=ratios,
    )
    return reshard_request(request, spark=spark, report=report, progress=PhaseLog(quiet=quiet))


def materialize(
    spark: SparkSession | None = None,
    *,
    assignment: str,
    input: str | DataFrame,
    output: str,
    num_workers: int | None = None,
    eval_input: str | DataFrame | None = None,
    id_column: str | None = None,
    format: str | None = None,
    image_shape: tuple[int, int, int] | None = None,
    num_classes: int | None = None,
    unlabelled: bool = False,
    channels: int | None = None,
    keep_columns: Sequence[str] = (),
    resize: tuple[int, int] | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    max_bad_records: int | str | None = None,
    overwrite: bool = False,
    allow_empty: bool = False,
    interval: Mapping[str, str] | None = None,
    report: bool = True,
    quiet: bool = False,
) -> ShardingResult:
    """Write the shards that an assignment describes, with the checks and the commit of ``shard``.

    The rows of the assignment go through a shuffle, 32 bytes each; images are not shuffled. With the assignment of a
    set, the files equal the output of the set's own job. For the other arguments see ``shard``.

    Args:
        assignment: a committed set, or any Parquet or CSV table with the columns id (position of a row in the input,
            from 0) and worker, and copy if a row goes to several workers.
        id_column: None: the column that gave the ids of the assignment's own table, else "id".
        num_workers: None: as many as the assignment has.
    """
    # Without a number of workers, the assignment decides it, after it has been read.
    frames = _frames(input=input, eval_input=eval_input)
    request = Request(
        input=_address(input, "input"),
        output=os.fspath(output),
        num_workers=1 if num_workers is None else num_workers,
        eval_input=None if eval_input is None else _address(eval_input, "eval_input"),
        read_options=ReadOptions(
            format=format,
            shape=image_shape,
            num_classes=num_classes,
            unlabelled=unlabelled,
            channels=channels,
            columns=_names(keep_columns),
            resize=resize,
            image_column=image_column,
            label_column=label_column,
        ),
        max_bad_records=None if max_bad_records is None else str(max_bad_records),
        overwrite=overwrite,
        allow_empty=allow_empty,
        interval=interval,
        id_column=id_column,
    )
    progress = PhaseLog(quiet=quiet)
    return materialize_request(
        request, assignment, num_workers, spark=spark, report=report, progress=progress, frames=frames
    )


def _names(keep_columns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of columns. Raises UsageError for a text, which would be read letter by letter."""
    if isinstance(keep_columns, str):
        raise UsageError(f"keep_columns is a list of names, got the text {keep_columns!r}; write [{keep_columns!r}]")
    return tuple(keep_columns)


def _address(data: str | DataFrame, argument: str) -> str:
    """Return the address of an input; a DataFrame is named after its argument. Raises UsageError for other objects."""
    return f"{DATAFRAME}{argument}" if isinstance(data, DataFrame) else input_path(data, argument)


def _frames(**inputs: str | DataFrame | None) -> dict[str, DataFrame]:
    """Return the DataFrames among the inputs, by their addresses."""
    return {_address(data, name): data for name, data in inputs.items() if isinstance(data, DataFrame)}


def open_shards(uri: str, spark: SparkSession | None = None) -> ShardSet:
    """Return the committed set in a folder: its manifest and its files. Raises DataError if there is none.

    spark: needed for hdfs:// and s3:// addresses that require Spark's Hadoop settings."""
    return open_committed(open_store(context_of(spark)) if spark else Store(), uri)


def shard_request(
    request: Request,
    strategy: Strategy,
    *,
    spark: SparkSession | None = None,
    report: bool,
    progress: PhaseLog,
    debug: bool = False,
    frames: Mapping[str, DataFrame] | None = None,
) -> ShardingResult:
    """Run ``shard`` for a request, from the command line or from Python.

    Args:
        request: input, output and options.
        strategy: the strategy with its parameters.
        spark: the session (default: as in ``shard``).
        report: as in ``shard``.
        progress: shows the progress, and has the seconds of each phase afterwards.
        debug: show Spark's logs.
    """
    session = spark or _session_of(frames)

    def work(context: SparkContext, progress: PhaseLog) -> ShardingResult:
        with tables_as_files(context, request, progress, strategy, spark=session, frames=frames) as on_files:
            return sharding.shard(context, on_files, strategy, progress)

    preflight(request, strategy)
    return _run(strategy.name, request, work, session, report, progress, debug, strategy.modules)


def reshard_request(
    request: Request, *, spark: SparkSession | None = None, report: bool, progress: PhaseLog, debug: bool = False
) -> ShardingResult:
    """Run ``reshard`` for a request; for the arguments see ``shard_request``."""

    def work(context: SparkContext, progress: PhaseLog) -> ShardingResult:
        return resharding.reshard(context, request, progress)

    preflight(request)
    return _run("reshard", request, work, spark, report, progress, debug)


def materialize_request(
    request: Request,
    assignment: str,
    num_workers: int | None,
    *,
    spark: SparkSession | None = None,
    report: bool,
    progress: PhaseLog,
    debug: bool = False,
    frames: Mapping[str, DataFrame] | None = None,
) -> ShardingResult:
    """Run ``materialize`` for a request, from the command line or from Python.

    Args:
        request: input, output and options; its num_workers is ignored.
        assignment: path of a committed set, or of a table of (id, worker).
        num_workers: number of shards; None: the number of workers in the assignment.
        spark, report, progress, debug: as in ``shard_request``.
    """
    session = spark or _session_of(frames)

    def work(context: SparkContext, progress: PhaseLog) -> ShardingResult:
        ordered = materializing.with_id_column(context, request, assignment)
        with tables_as_files(context, ordered, progress, spark=session, frames=frames) as on_files:
            return materializing.materialize(context, on_files, assignment, num_workers, progress)

    preflight(request)
    return _run("materialize", request, work, session, report, progress, debug)


def _session_of(frames: Mapping[str, DataFrame] | None) -> SparkSession | None:
    """Return the session of the first DataFrame, or None without DataFrames."""
    return next((data.sparkSession for data in (frames or {}).values()), None)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Raise the error of a task or of Spark as UsageError, DataError or JobError, with the line that commands print."""
    try:
        yield
    except (Py4JError, PySparkException) as error:
        if follows_interrupt(error):
            raise
        line, code = cause(error)
        raise error_class(code)(line) from error


def _run(
    name: str,
    request: Request,
    work: Callable[[SparkContext, PhaseLog], ShardingResult],
    spark: SparkSession | None,
    report: bool,
    progress: PhaseLog,
    debug: bool,
    modules: Sequence[str] = (),
) -> ShardingResult:
    """Run ``work`` on a Spark context, write the report, and return the result with the report's place.

    Args:
        name: what the run does, for its title and the events of OpenLineage.
        request: its input and output.
        work: makes or finds the set.
        spark: the session to use; None: the running one, else a new one.
        report: write the report unless the set has one, or is an assignment without shards.
        progress: shows the progress.
        debug: show Spark's logs.
        modules: names of modules that ``work`` imports and that load slowly.
    """
    # In a thread, as the start of Spark leaves a core free.
    names = [*modules, REPORT_MODULE] if report else modules
    Thread(target=load_modules, args=(names,), daemon=True).start()
    with (
        _errors_in_one_line(),
        spark_context(spark, debug=debug) as context,
        lineage_events(context, open_store(context), name, request) as lineage,
    ):
        progress.begin(context, f"{name} to {request.output}")
        result = work(context, progress)
        lineage.set_result(result.shards)
        report = report and not result.shards.manifest.assignment_only
        place = f"{result.shards.uri}/{REPORT}"
        # A set that was committed already may have its report too.
        reported = not result.fresh and result.shards.store.exists(place)
        if report and not reported:
            with progress.phase("report"):
                reported = try_report(context, result.shards) is not None
        return replace(result, report=place if reported else None)
