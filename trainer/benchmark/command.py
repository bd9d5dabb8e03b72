"""The command line of jobs/benchmark.py and ``sharding benchmark``, and its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.core import command_line
from pipeline.core.atomic import write_durably
from pipeline.core.command_line import Parser, add_config_flag
from pipeline.core.errors import UsageError
from pipeline.core.extras import require
from pipeline.core.reporting.tables import table
from pipeline.core.storage.objects import is_object
from pipeline.core.storage.store import Store
from pipeline.core.storage.uri import PATTERN_SIGNS, is_remote, split_uri
from pipeline.spark.package import TRAINER
from pipeline.spark.progress import PhaseLog
from pipeline.spark.session import spark_context
from pipeline.spark.shipping import ship_package
from trainer.benchmark.experiment import add_experiment_flags, experiment_from_flags
from trainer.benchmark.results.summary import SystemSummary, judge_goals, summarise

REPORT = "report.html"
EPILOG = """\
Exit codes: 0 done, also if some runs failed (the report contains their errors),
2 wrong usage, 1 other errors."""
COLUMNS = ("model", "rows", "mini-batch", "system", "mini-batches", "seconds", "ms each", "MLlib / system")
NUMBERS = (1, 2, 4, 5, 6, 7)  # columns


def build_parser(description: str | None, prog: str = "benchmark.py") -> Parser:
    parser = command_line.parser(prog, description, EPILOG)
    parser.conf = "benchmark"
    group = parser.add_argument_group("benchmark")
    group.add_argument("--output", required=True, metavar="DIR", help="local folder of measurements and report")
    group.add_argument("--data", metavar="URI", help="folder of the data sets, local or hdfs:// (default: OUTPUT/data)")
    group.add_argument(
        "--quick",
        action="store_true",
        help="run every configuration once on little data, which takes about three minutes",
    )
    # The fields of Experiment define these flags, so that a run records every value that changes its measurements.
    add_experiment_flags(group)
    run_group = parser.add_argument_group("run")
    run_group.add_argument(
        "--overwrite", action="store_true", help="delete earlier measurements in --output and start again"
    )
    add_config_flag(run_group, "benchmark")
    run_group.add_argument("--quiet", action="store_true", help="print only results")
    return parser


def run_benchmark(flags: Parser, argv: Sequence[str] | None = None) -> int:
    """Run the benchmark of a command line and return the exit code. Raises UsageError.

    The exit code is 0 even if runs failed; their records contain the errors."""
    args = command_line.parse(flags, argv)
    experiment = experiment_from_flags(args)
    output = _check_output(args.output)
    if is_object(args.data or ""):
        raise UsageError(
            f"--data {args.data}: the readers of Spark and MLlib do not support object stores here; use hdfs://"
        )
    _refuse_patterns({f"--{flag}": getattr(args, flag) or "" for flag in ("output", "data", "higgs", "year")})
    require("benchmark", flags.prog)
    # These need the packages of the extra that was just checked.
    from trainer.benchmark.results.report import render
    from trainer.benchmark.run import run_experiment

    with spark_context(debug=args.debug) as context:
        ship_package(context, TRAINER)
        progress = PhaseLog(context, quiet=args.quiet, title="benchmark")
        data = args.data or f"{output}/data"
        data = data if is_remote(data) else Store().resolve(data)
        results = run_experiment(context, experiment, output, data, progress, overwrite=args.overwrite)
    write_durably(output / REPORT, render(results).encode())
    print_summaries(summarise(results["records"]))
    print(f"report: {output}/{REPORT}")
    return 0


def _refuse_patterns(uris: Mapping[str, str]) -> None:
    """Raise UsageError for a URI that Spark reads as a pattern or a list. uris: by flag."""
    for flag, uri in uris.items():
        if signs := (PATTERN_SIGNS | {","}) & set(uri):
            raise UsageError(
                f"{flag} {uri}: Spark reads a name with {min(signs)} as a pattern or a list: choose another"
            )


def _check_output(uri: str) -> Path:
    """Return the local folder of --output. Raises UsageError for another store."""
    if split_uri(uri)[0] not in ("", "file"):
        raise UsageError(f"--output {uri} must be a local folder: the trainer writes there; --data may be hdfs://")
    return Path(Store().resolve(uri))


def print_summaries(summaries: Sequence[SystemSummary]) -> None:
    """Print all runs as a table, then the goals."""
    print(table([format_summary(summary) for summary in summaries], COLUMNS, right=NUMBERS))
    for goal in judge_goals(summaries):
        result = "not measured" if goal.speedup is None else f"MLlib takes {goal.speedup:.1f} times as long to converge"
        print(f"{goal.text}: {result} (goal {goal.target:g})")


def format_summary(summary: SystemSummary) -> list[str]:
    """Return the cells of a line, in the order of COLUMNS.

    A plus after the mini-batches marks runs that ended without convergence."""
    first = [summary.model, f"{summary.rows:,}", summary.size, summary.label]
    if not summary.metrics:
        return [*first, "failed: " + "; ".join(summary.errors)[:60], "", "", ""]
    to_converge = summary.length is None
    count = f"{summary.metrics['mini_batches'].median:,.0f}" + ("+" if to_converge and not summary.converged else "")
    speedup = summary.speedup if to_converge else summary.mini_batch_speedup
    ms = 1e3 * summary.metrics["compute_s"].median
    ratio = "-" if speedup is None else f"{speedup:.2f}"
    return [*first, count, f"{summary.metrics['seconds'].median:.2f}", f"{ms:.2f}", ratio]
