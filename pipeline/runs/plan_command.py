"""``python -m pipeline plan``: an estimate of the cost of a run before it starts."""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.core import command_line
from pipeline.core.command_line import image_shape
from pipeline.core.errors import UsageError
from pipeline.core.machine import usable_cores
from pipeline.core.program import execute
from pipeline.core.reporting.tables import table, two_column_table
from pipeline.core.sizes import bytes_in_words
from pipeline.runs.plan import CostEstimate, PhaseCost, Shape, plan, warnings
from pipeline.strategies import STRATEGIES
from pipeline.strategies.hash import FUNCTIONS, Hash
from pipeline.strategies.neighbourhoods import NeighbourhoodStrategy, count_or_word, is_fit_rows
from pipeline.strategies.submodular import Submodular

# Spark's start; minimum of a stage
START_S = 4.0
STAGE_S = 0.1


@dataclass(frozen=True)
class Rates:
    """The speed of one core of this machine.

    Attributes:
        flop32: float32 operations per second.
        flop64: float64 operations per second.
        read: bytes read and hashed per second.
        write: bytes written per second.
    """

    flop32: float
    flop64: float
    read: float
    write: float


def measure_rates() -> Rates:
    """Measure the rates of this machine. Takes about a second."""
    rng = np.random.default_rng(0)
    single = rng.random((1024, 1024), np.float32)
    double = rng.random((2048, 64))
    other = rng.random((64, 256))
    data = rng.bytes(32 << 20)

    def best(work: Callable[[], object], amount: float) -> float:
        """Return the amount of work per second, in the fastest of three tries."""
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return amount / min(seconds)

    def write() -> None:
        with tempfile.TemporaryFile() as file:
            hashlib.sha256(data).digest()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1):
        # Half the operations of a general product, because a Gram matrix is symmetric.
        return Rates(
            best(lambda: single @ single.T, 1024.0**3),
            best(lambda: double @ other, 2.0 * 2048 * 64 * 256),
            best(lambda: np.frombuffer(data, np.uint64).sum() + np.frombuffer(data, np.uint8).sum(), len(data)) / 4,
            best(write, len(data)),
        )


def seconds_of(phase: PhaseCost, rates: Rates, cores: int) -> float:
    """Return the duration of a phase on ``cores`` cores, if it is limited by them alone."""
    flop = rates.flop32 if phase.name == "pca" else rates.flop64
    work = phase.flop / flop + phase.read_bytes / rates.read + phase.write_bytes / rates.write
    return work / min(cores, phase.tasks) + phase.stages * STAGE_S


def parse_count(text: str) -> int:
    """Parse an integer, also in the forms 1e6 and 1_000_000."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, such as 50000 or 1e9") from None
    if not (1 <= value < 1e15) or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(value)


def gigabytes(text: str) -> float:
    """Parse a positive number of gigabytes."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of gigabytes, such as 2")
    return value


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def format_plan(estimate: CostEstimate, rates: Rates, memory_a_task: int) -> str:
    """Return the plan as a page of text: a table of phases, the totals, and warnings.

    Args:
        estimate: the plan.
        rates: speeds of one core.
        memory_a_task: bytes of memory that an executor has per task.
    """
    shape = estimate.shape
    spent = [seconds_of(phase, rates, shape.cores) for phase in estimate.phases]
    rows = [
        (
            phase.name + (f" x {phase.stages}" if phase.stages > 1 else ""),
            f"{phase.tasks:,}",
            bytes_in_words(phase.driver_bytes),
            bytes_in_words(phase.task_bytes),
            bytes_in_words(phase.read_bytes) if phase.read_bytes else "",
            bytes_in_words(phase.write_bytes) if phase.write_bytes else "",
            duration(seconds),
        )
        for phase, seconds in zip(estimate.phases, spent, strict=True)
    ]
    header = ("phase", "tasks", "to the driver", "per task", "read", "written", "time")
    decoded_size = bytes_in_words(shape.rows * shape.record_bytes)
    per_file = shape.rows / max(1, estimate.files)
    through = " (rows are first written to files by range of workers)" if estimate.spills else ""
    lines = [
        ("input", f"{shape.rows:,} rows, {decoded_size}"),
        ("files", f"{estimate.files:,} of about {per_file:,.0f} rows{through}"),
        ("manifest", bytes_in_words(estimate.manifest_bytes)),
        (
            "local disk",
            f"{decoded_size} on all executors together, if images are pickled, encoded or in large row groups",
        ),
        ("driver", f"{bytes_in_words(estimate.driver_bytes)} in addition to its libraries"),
        # Phases run one after another, so their times add up; Spark starts once.
        ("time", f"{duration(START_S + sum(spent))} on {shape.cores} cores as fast as this machine's"),
    ]
    texts = warnings(estimate, memory_a_task)
    return "\n".join(
        [
            table(rows, header, right=range(1, len(header))),
            "",
            two_column_table(lines),
            *(f"warning: {line}" for line in texts),
        ]
    )


def default_components(strategy: str) -> int:
    """Return the number of principal components that a strategy computes by default; 1 if it computes none."""
    kind = STRATEGIES[strategy]
    if issubclass(kind, NeighbourhoodStrategy):
        return int(kind().components)
    return 64 if kind is Submodular else 1


def main(argv: Sequence[str]) -> None:
    """Estimate the tasks, files, memory and seconds of a sharding run, at the speed of this machine."""
    flags = command_line.parser(
        "python -m pipeline plan", main.__doc__, "The command reads and writes no data, and needs no Spark."
    )
    flags.add_argument(
        "--rows", type=parse_count, required=True, metavar="INT", help="rows to shard, such as 50000 or 1e9"
    )
    flags.add_argument("--workers", type=parse_count, required=True, metavar="INT", help="number of workers")
    flags.add_argument(
        "--image", type=image_shape, default="3x32x32", metavar="CxHxW", help="shape of images (default: %(default)s)"
    )
    names = ", ".join(STRATEGIES)
    flags.add_argument(
        "--strategy",
        default="distribution_aware",
        metavar="NAME",
        help=f"strategy, from {names} (default: %(default)s)",
    )
    # The defaults depend on --strategy and --classes, so they are resolved after parsing.
    flags.add_argument(
        "--clusters",
        type=parse_count,
        metavar="INT",
        help="number of neighbourhoods (default: twice the number of classes; 256 for hash)",
    )
    flags.add_argument(
        "--components",
        type=parse_count,
        metavar="INT",
        help="principal components (default: the strategy's, 160 for distribution_aware)",
    )
    flags.add_argument(
        "--fit-rows",
        default="auto",
        metavar="INT|all",
        type=count_or_word,
        help="rows that the PCA or the hash functions are fitted to (default: %(default)s)",
    )
    flags.add_argument(
        "--classes", type=parse_count, default=10, metavar="INT", help="number of classes (default: %(default)s)"
    )
    flags.add_argument(
        "--cores",
        type=parse_count,
        default=usable_cores(),
        metavar="INT",
        help="cores of all executors together (default: the cores that this machine or container gives)",
    )
    flags.add_argument(
        "--task-memory-gb",
        type=gigabytes,
        default=2.0,
        metavar="GB",
        help="gigabytes of memory per task (default: %(default)g)",
    )

    def run() -> int:
        args = command_line.parse(flags, argv)
        # The plan makes no strategy, so it repeats the checks that a strategy makes of its own parameters.
        if args.strategy not in STRATEGIES:
            raise UsageError(f"--strategy {args.strategy!r} is unknown; choose one of {names}")
        if not is_fit_rows(args.fit_rows):
            raise UsageError(f"--fit-rows must be all, auto or a whole number of at least 100, got {args.fit_rows}")
        grouped = issubclass(STRATEGIES[args.strategy], NeighbourhoodStrategy)
        functions = FUNCTIONS if args.strategy == Hash.name else 0
        num_clusters = args.clusters or (2**FUNCTIONS if functions else 2 * args.classes)
        clusters = num_clusters if grouped or functions else 0
        blocks = args.workers if args.strategy == Submodular.name else 0
        components = args.components or min(default_components(args.strategy), math.prod(args.image))
        shape = Shape(
            rows=args.rows,
            workers=args.workers,
            record_bytes=math.prod(args.image),
            classes=args.classes,
            clusters=clusters,
            components=components,
            cores=args.cores,
            fit_rows=args.fit_rows,
            blocks=blocks,
            functions=functions,
        )
        print(format_plan(plan(shape), measure_rates(), int(args.task_memory_gb * 1e9)))
        return 0

    execute(run, interrupted="run it again")
