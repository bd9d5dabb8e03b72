"""The command line of jobs/benchmark.py, and what it prints."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.benchmark import published, summary
from pipeline.benchmark.cells import ARMS, MOST_WORKERS, SETTINGS, TOLERANCE, Plan
from pipeline.benchmark.mllib import BLOCK_ROWS
from pipeline.benchmark.problems import HIGGS, YEAR
from pipeline.benchmark.summary import Line
from pipeline.command_line import Parser
from pipeline.command_line import seed as seed_type
from pipeline.errors import UsageError
from pipeline.runs import flags as cli
from pipeline.spark.progress import PhaseLog
from pipeline.spark.session import spark_context
from pipeline.storage.store import Store
from pipeline.storage.uri import split_uri

REPORT = "report.html"
# MLlib's perceptron takes the mean over blocks of 128 rows, in which a smaller last one weighs too much: there is none.
QUICK = {HIGGS.name: 160 * BLOCK_ROWS, YEAR.name: 20_000}
FULL = {HIGGS.name: 4_000 * BLOCK_ROWS, YEAR.name: 463_715}  # as many as YearPredictionMSD has for training
LEAST_ROWS = 4_000
NEEDED = ("torch", "zmq", "safetensors", "psutil")
TIMED, QUICK_TIMED = 100, 20
TASKS = (published.NODES * published.CORES_A_NODE, 70, MOST_WORKERS)
QUICK_TOLERANCE = 2 * TOLERANCE  # which takes a fraction of the mini-batches


def flags(description: str | None) -> Parser:
    parser = cli.parser("benchmark.py", description)
    group = parser.add_argument_group("benchmark")
    group.add_argument("--output", required=True, metavar="DIR", help="local folder of figures and report")
    group.add_argument("--data", metavar="URI", help="folder of the data sets, local or hdfs:// (default: OUTPUT/data)")
    group.add_argument("--quick", action="store_true", help="every cell on little data, once: three minutes")
    group.add_argument("--higgs", metavar="URI", help="the real HIGGS.csv instead of rows like it")
    group.add_argument("--year", metavar="URI", help="the real YearPredictionMSD.txt instead of rows like it")
    for problem in (HIGGS, YEAR):
        group.add_argument(
            f"--{problem.name.split('-')[0]}-rows",
            type=int,
            metavar="N",
            help=f"generated rows of {problem.name} (default {FULL[problem.name]:,}; quick {QUICK[problem.name]:,})",
        )
    group.add_argument("--repeats", type=int, metavar="R", help="runs of every cell (default 3; quick 1)")
    group.add_argument(
        "--sizes",
        type=_sizes,
        metavar="LIST",
        help="numbers of rows on which single mini-batches are timed, too (default: the most that memory holds, a tenth,"
        " a hundredth; quick: none)",
    )
    group.add_argument(
        "--tasks",
        type=_sizes,
        metavar="LIST",
        help=f"numbers of tasks, and of workers up to {MOST_WORKERS}, with which mini-batches are timed for the model of"
        f" many nodes, and to test it (default {','.join(map(str, TASKS))}; quick: none)",
    )
    group.add_argument(
        "--mini-batches", type=int, metavar="K", help=f"that are timed there (default {TIMED}; quick {QUICK_TIMED})"
    )
    group.add_argument(
        "--batches", type=_sizes, default=(2000, 500), metavar="LIST", help="mini-batches to converge with (2000,500)"
    )
    group.add_argument(
        "--models", type=_names(tuple(SETTINGS)), metavar="LIST", help=f"of {', '.join(SETTINGS)} (default all)"
    )
    group.add_argument("--arms", type=_names(ARMS), metavar="LIST", help=f"of {', '.join(ARMS)} (default: all)")
    run_group = parser.add_argument_group("run")
    run_group.add_argument("--seed", type=seed_type, default=0, metavar="S", help="of data and sampling (default 0)")
    run_group.add_argument(
        "--overwrite", action="store_true", help="start anew; without, rows already measured are kept"
    )
    run_group.add_argument("--config", type=Path, metavar="TOML", help="defaults file (default: conf/benchmark.toml)")
    run_group.add_argument("--quiet", action="store_true", help="print results only")
    run_group.add_argument("--debug", action="store_true", help="show stack traces and Spark's logs")
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    """The type of --batches, --sizes and --tasks."""
    if not all(part.isdigit() and int(part) for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, such as 2000,500")
    return tuple(sorted({int(part) for part in text.split(",")}, reverse=True))


def _names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """The type of a flag that takes some of these names, apart by commas."""

    def parse(text: str) -> tuple[str, ...]:
        given = tuple(filter(None, text.split(",")))
        if not given or set(given) - set(known):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(known)}")
        return tuple(name for name in known if name in given)

    return parse


def plan_of(args: argparse.Namespace) -> Plan:
    """Raises UsageError."""
    rows = dict(QUICK if args.quick else FULL)
    for problem, given, real in ((HIGGS, args.higgs_rows, args.higgs), (YEAR, args.year_rows, args.year)):
        flag = f"--{problem.name.split('-')[0]}"
        if given is not None and real:
            raise UsageError(f"{flag}-rows {given} is of generated rows, and {flag} gives real ones; leave one out")
        if given is not None and given < LEAST_ROWS:
            raise UsageError(f"{flag}-rows must be at least {LEAST_ROWS}, got {given}")
        rows[problem.name] = given or rows[problem.name]
    small = [size for size in args.sizes or () if size < LEAST_ROWS]
    if small:
        raise UsageError(f"--sizes must be at least {LEAST_ROWS}, got {small[0]}")
    for name in ("repeats", "mini_batches"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    files = {HIGGS.name: args.higgs, YEAR.name: args.year}
    return Plan(
        rows=rows,
        batches=args.batches,
        sizes=args.sizes or (() if args.quick else None),
        tasks=args.tasks or (() if args.quick else TASKS),
        count=args.mini_batches or (QUICK_TIMED if args.quick else TIMED),
        repeats=args.repeats or (1 if args.quick else 3),
        seed=args.seed,
        models=args.models or tuple(SETTINGS),
        arms=args.arms or ARMS,
        tolerance=QUICK_TOLERANCE if args.quick else TOLERANCE,
        csv={name: uri for name, uri in files.items() if uri},
    )


def run_benchmark(args: argparse.Namespace) -> int:
    """Returns the exit code: 0 also where cells failed, which their rows say."""
    plan, store = plan_of(args), Store()
    if split_uri(args.output)[0] not in ("", "file"):
        raise UsageError(
            f"--output {args.output} must be a local folder: the trainer writes there; --data may be hdfs://"
        )
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"the benchmark needs {', '.join(missing)} beside the pipeline: pip install '.[benchmark]'")
    from pipeline.benchmark import report
    from pipeline.benchmark.run import clean, run

    output = Path(store.resolve(args.output).removeprefix("file:"))
    folder = args.data or f"{output}/data"
    if args.overwrite:
        clean(output)
    with spark_context(debug=args.debug) as context:
        if not str(context.master).startswith("local"):
            print(f"note: MLlib runs on {context.master}, the servers and their workers on this host alone", flush=True)
        result = run(context, plan, output, folder, PhaseLog(context, quiet=args.quiet))
    (output / REPORT).write_text(report.render(result))
    found = summary.lines(result["rows"])
    print(table(found))
    for goal in summary.goals(found):
        came = "not measured" if goal.found is None else f"{goal.found:.1f} times faster than MLlib"
        print(f"{goal.text}: {came} (goal {goal.wanted:g})")
    print(f"report: {output}/{REPORT}")
    return 0


def table(found: Sequence[Line]) -> str:
    """The runs as aligned text."""
    cells = [["model", "rows", "mini-batch", "arm", "mini-batches", "seconds", "ms each", "MLlib / arm"]]
    for line in found:
        first = [line.model, f"{line.rows:,}", line.size, line.who]
        if line.figures:
            count = f"{line.figures['mini_batches'].median:,.0f}" + ("" if line.converged or line.length else "+")
            ratio = "-" if line.ratio is None else f"{line.ratio if line.length is None else line.ratio_each:.2f}"
            each = 1e3 * line.figures["compute_s"].median
            cells.append([*first, count, f"{line.figures['seconds'].median:.2f}", f"{each:.2f}", ratio])
        else:
            cells.append([*first, "failed: " + "; ".join(line.errors)[:60], "", "", ""])
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if at in (0, 3) else cell.rjust(w)
            for at, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
