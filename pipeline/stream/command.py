"""The command of jobs/hash_stream.py: reads the flags, runs the stream and prints a short table."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from pipeline.core.command_line import Parser, parse
from pipeline.core.errors import DataError, UsageError
from pipeline.core.reporting.tables import two_column_table
from pipeline.core.shardset.commit import check_reports, tidy
from pipeline.core.shardset.manifest import ShardSet, read_committed
from pipeline.core.specs import AdvancedHelp, add_flags, from_flags
from pipeline.core.storage.objects import is_object
from pipeline.core.storage.store import Store
from pipeline.core.storage.uri import PATTERN_SIGNS, spark_path
from pipeline.doctor import beforehand
from pipeline.input.files import check_apart
from pipeline.runs import flags as cli
from pipeline.runs.lineage import lineage_events
from pipeline.runs.metrics_file import JobRecord, job_metrics
from pipeline.runs.program import execute
from pipeline.runs.report import REPORT, try_report
from pipeline.runs.request import Request, only_spark_knows
from pipeline.spark.progress import PhaseLog
from pipeline.spark.session import spark_context
from pipeline.spark.store import open_store
from pipeline.strategies.hash import Hash
from pipeline.stream import files, kafka, kafka_options, topic
from pipeline.stream.checkpoint import check_checkpoint
from pipeline.stream.generation import GenerationRun, check_configuration, check_source
from pipeline.stream.inbox import Inbox
from pipeline.stream.query import Running, StreamTotals, say, start, watch
from pipeline.stream.request import WINDOW_ROWS, StreamRequest
from pipeline.upkeep.contents import describe

CHECKPOINT = "_checkpoint"
# Spark's intervals: a unit apart from its number, which is whole but for seconds.
TRIGGER = re.compile(r"\d{1,9} +milliseconds?|\d{1,6}(\.\d{1,6})? +seconds?|\d{1,6} +(minutes?|hours?|days?)")
MOST_FILES = 2**31 - 1  # of a batch, in Spark's file source


def stream_parser(prog: str, description: str | None) -> Parser:
    """Return the parser of jobs/hash_stream.py."""
    flags = cli.parser(prog, description)
    group = flags.add_argument_group("input")
    group.add_argument(
        "--source",
        required=True,
        metavar="URI",
        help="folder in which files arrive, local or hdfs://, or a topic kafka://HOST:PORT/TOPIC, whose messages are raw"
        " records",
    )
    group.add_argument(
        kafka_options.FLAG,
        action="append",
        metavar="KEY=VALUE",
        help=AdvancedHelp(
            "property of Kafka's consumer, such as security.protocol=SASL_SSL, which can be repeated; put secrets into the"
            " file of --kafka-options, because other users of the machine can see command lines"
        ),
    )
    group.add_argument(
        kafka_options.FILE_FLAG,
        metavar="FILE",
        help="local file of properties of Kafka's consumer, in the format of client.properties",
    )
    cli.add_layout_flags(group)
    group.add_argument(
        "--late-after",
        type=float,
        metavar="SECONDS",
        help="seconds behind the newest file or message after which rows are quarantined as late (default: never)",
    )
    group = flags.add_argument_group("batches")
    group.add_argument(
        "--trigger",
        default="30 seconds",
        metavar="TIME|once",
        help="time between batches, or once to process all available rows and end (default: '%(default)s')",
    )
    group.add_argument(
        "--batch-limit",
        type=int,
        metavar="INT",
        help="maximum number of files or messages per batch (default: unlimited)",
    )
    group.add_argument(
        "--checkpoint",
        metavar="URI",
        help="folder of Spark's checkpoint, local or hdfs:// (default: OUTPUT/_checkpoint)",
    )
    group.add_argument(
        "--allow-data-loss",
        action="store_true",
        help=AdvancedHelp(
            "continue if messages of the topic were deleted before they were read, instead of exit code 3"
        ),
    )
    group = flags.add_argument_group("output")
    group.add_argument("--output", required=True, metavar="URI", help="folder of the growing shard set")
    group.add_argument("--workers", type=int, required=True, metavar="INT", help="number of shards, a shard per worker")
    group.add_argument(
        "--window-rows",
        type=int,
        default=WINDOW_ROWS,
        metavar="INT",
        help="rows per window, at whose end sparse buckets are copied to every worker; 0 disables windows"
        " (default: %(default)s)",
    )
    group.add_argument(
        "--no-report", action="store_true", help=AdvancedHelp("skip report.html and the measures of quality")
    )
    cli.add_run_flags(flags)
    group = flags.add_argument_group("strategy")
    # A stream has rules of its own for first workers, sparse buckets and the sample that functions are fitted to.
    add_flags(group, Hash, only=("family", "functions", "width"))
    group.add_argument(
        "--model",
        metavar="URI",
        help="committed set whose hash functions are used (default: functions fitted to the first batch)",
    )
    return flags


def main(argv: Sequence[str]) -> None:
    """Shard a stream of images by buckets of hash functions, on the running Spark or on a local Spark."""
    execute(lambda: run_stream("python -m pipeline stream", main.__doc__, argv))


def run_stream(prog: str, description: str | None, argv: Sequence[str] | None = None) -> int:
    """Stream, write the report and print the set. Returns the exit code.

    prog, description: name and help of the command; argv: its arguments (default: the process's own)."""
    args = parse(stream_parser(prog, description), argv)
    args.source = cli.fill_in(args.source, args)
    args.checkpoint = args.checkpoint and cli.fill_in(args.checkpoint, args)
    request = read_request(args)
    trigger = read_trigger(args.trigger)
    if args.batch_limit is not None and not 1 <= args.batch_limit <= MOST_FILES:
        raise UsageError(f"--batch-limit must be from 1 to {MOST_FILES:,}, got {args.batch_limit}")
    interval = cli.read_interval(args)
    record = JobRecord({})
    metrics = job_metrics(args.metrics_file, "stream", request.output, interval, record)
    options = preflight(args, request)
    with metrics as write_metrics, spark_context(debug=args.debug) as context:
        store = open_store(context)
        output = store.resolve(request.output)
        folder = None if topic.is_topic(args.source) else store.resolve(args.source)
        checkpoint = checkpoint_of(store, args.checkpoint, output, folder)
        spark = SparkSession(context)
        run = GenerationRun(context, request, store, output, "")
        before = record.shards = read_committed(store, output)
        # Before Spark plans a batch, which its checkpoint would hold for ever.
        check_configuration(before, request)
        inbox = None
        if topic.is_topic(args.source):
            stream = kafka.stream_of_topic(spark, args.source, args.batch_limit, args.allow_data_loss, options)
            # Only --allow-data-loss can lose messages; the checkpoint then shows which.
            watched = checkpoint if args.allow_data_loss else None
            arrive = kafka.arrivals(store, args.source, request, output, watched)
        else:
            source = source_of(store, args.source, output)
            check_source(before, source)
            beforehand.check_inputs(context, store, {"--source": source})
            stream = files.stream_of_files(spark, spark_path(source), args.batch_limit)
            inbox = Inbox(store, source, output)
            arrive = files.arrivals(inbox, checkpoint, request.late_after_s)
        # Before the first batch, because a checkpoint that does not fit the set loses rows silently.
        check_checkpoint(store, checkpoint, before, output)
        beforehand.check_output(context, store, output)
        if before:
            tidy(store, before)  # of a run that was killed after its commit
        for text in inbox.check_at_start(first=before is None) if inbox else ():
            say(f"warning: {text}")
        described = Request(args.source, output, request.num_workers, interval=interval)
        with lineage_events(context, store, "stream", described, processing="STREAMING") as lineage:

            def tell(shards: ShardSet) -> None:
                record.shards = shards
                record.fresh = True
                write_metrics()
                lineage.set_result(shards)
                lineage.send("RUNNING")

            running = Running(run, arrive, (lambda text: None) if args.quiet else say, say, tell)
            try:
                tally = watch(running, start(running, stream, checkpoint, trigger))
            except StreamingQueryException as error:
                raise kafka.error_with_next_step(error, args.source, output) from error
            # If nothing new arrived, tell() was not called.
            shards = tally.last.shards if tally.last else before
            if shards:
                lineage.set_result(shards)
        return report_totals(args, run, tally, shards)


def preflight(args: argparse.Namespace, request: StreamRequest) -> dict[str, str]:
    """Check everything that can be refused before Spark starts, and return the properties of Kafka's consumer.

    Raises UsageError and DataError."""
    store = Store()
    options: dict[str, str] = {}
    places = [request.output]
    if topic.is_topic(args.source):
        topic.address(args.source)
        topic.record_bytes(request)
        options = kafka_options.consumer_options(args.kafka_option or (), args.kafka_options)
    else:
        flags_and_values = {
            "--allow-data-loss": args.allow_data_loss,
            kafka_options.FLAG: args.kafka_option,
            kafka_options.FILE_FLAG: args.kafka_options,
        }
        if flag := next((flag for flag, value in flags_and_values.items() if value), None):
            raise UsageError(f"{flag} applies to messages, but --source {args.source} is a folder: leave it out")
        places.append(args.source)
    # Places that need Spark's settings are checked after its start.
    if any(only_spark_knows(uri) and not is_object(store.resolve(uri)) for uri in places):
        return options
    output = store.resolve(request.output)
    source = None if topic.is_topic(args.source) else source_of(store, args.source, output)
    checkpoint_of(store, args.checkpoint, output, source)
    check_reports(store, output)
    return options


def read_request(args: argparse.Namespace) -> StreamRequest:
    """Return the request that the flags describe. Raises UsageError."""
    # A file of defaults may have them, as it may have other settings that a command does not use.
    for name in ("family", "functions", "width"):
        if args.model and name in args.names_in_argv:
            raise UsageError(f"--model {args.model} has functions already: leave out --{name} {getattr(args, name)}")
    options = cli.layout_options(args)
    record_format = topic.FORMAT if topic.is_topic(args.source) else None
    return StreamRequest(
        output=cli.fill_in(args.output, args),
        num_workers=args.workers,
        strategy=from_flags(Hash, args),
        model=args.model,
        read_options=replace(options, format=options.format or record_format),
        window_rows=args.window_rows,
        late_after_s=args.late_after,
    )


def read_trigger(text: str) -> dict[str, Any]:
    """Return the trigger options of Structured Streaming. Raises UsageError."""
    if text == "once":
        return {"availableNow": True}
    if not TRIGGER.fullmatch(text):
        raise UsageError(f"--trigger must be a time such as '30 seconds', or once, got {text!r}")
    return {"processingTime": text}


def source_of(store: Store, uri: str, output: str) -> str:
    """Return the resolved source folder.

    Raises UsageError if Spark's file source cannot reach it or reads its name as a pattern, or if it overlaps the
    output, and DataError if it does not exist."""
    source = store.resolve(uri)
    if is_object(source):
        raise UsageError(f"--source {source}: a stream reads files from local folders and hdfs://; copy them there")
    if PATTERN_SIGNS & set(source):
        raise UsageError(
            f"--source {source}: Spark reads a name with one of {{}}[]*?\\ as a pattern; choose a folder without them"
        )
    check_apart(store, output, source)
    # A file would leave Spark's checkpoint behind before Spark refuses it.
    if not store.exists(source):
        raise DataError(f"{source} does not exist; check --source, or create the folder in which files will arrive")
    if not store.info(source).is_dir:
        raise UsageError(f"--source {source} is a file; name the folder in which files arrive")
    return source


def checkpoint_of(store: Store, folder: str | None, output: str, source: str | None) -> str:
    """Return the checkpoint's folder as Spark needs it.

    Raises UsageError if Spark cannot reach it, or if Spark's files would lie in the source or in the set's own folder.

    source: the resolved folder of files; None for a topic."""
    place = store.resolve(folder) if folder else f"{output}/{CHECKPOINT}"
    if is_object(place):
        raise UsageError(f"Spark writes its checkpoint to a local disk or hdfs://, not to {place}: give --checkpoint")
    if folder and source:
        check_apart(store, place, source, "--checkpoint")
    if place == output:
        raise UsageError(f"--checkpoint {place} is the set itself; choose a folder of its own")
    return spark_path(place)


def report_totals(args: argparse.Namespace, run: GenerationRun, tally: StreamTotals, shards: ShardSet | None) -> int:
    """Print the totals and the set, write its report if it has grown or has none, and return the exit code.

    shards: the set at the end, or None."""
    summary = f"{tally.committed:,} generations, {tally.rows:,} rows"
    speed = f", {tally.rows / tally.seconds:,.0f} rows per second" if tally.committed else ""
    aside = f", {tally.quarantined:,} quarantined" if tally.quarantined else ""
    print(f"{run.output}: {summary}{speed}{aside}")
    if shards is None:
        return 0
    print(two_column_table(describe(shards)))
    # An unchanged set keeps its report, which it lacks if an earlier start was killed before the end.
    is_stale = tally.committed or not run.store.exists(f"{shards.uri}/{REPORT}")
    if is_stale and not args.no_report:
        with PhaseLog(run.context, quiet=args.quiet, title=f"report of {run.output}").phase("report"):
            if try_report(run.context, shards):
                print(f"  report    {shards.uri}/{REPORT}")
    return 0
