"""The extent of a benchmark, and its flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from pipeline.core.argparse_internals import FlagGroup
from pipeline.core.command_line import seed as parse_seed
from pipeline.core.errors import UsageError
from pipeline.core.specs import AdvancedHelp, Spec, add_flags, option
from trainer.benchmark.configurations import (
    BLOCK_ROWS,
    HYPERPARAMETERS,
    MAX_WORKERS,
    SYSTEMS,
    TOLERANCE,
    Model,
    System,
)
from trainer.benchmark.problems import HIGGS, YEAR, Problem
from trainer.benchmark.results import published

MIN_ROWS = 4_000
MODELS = tuple(HYPERPARAMETERS)
# Multiples of a block: MLlib's perceptron takes the mean over blocks, so a smaller last one would weigh too much.
HIGGS_ROWS = 4_000 * BLOCK_ROWS
QUICK_HIGGS_ROWS = 64 * BLOCK_ROWS
# YearPredictionMSD has 463,715 rows for training
YEAR_ROWS = 463_715
QUICK_YEAR_ROWS = 8_000
TASKS = (published.NODES * published.CORES_PER_NODE, 70, MAX_WORKERS, 8)


def _parse_sizes(text: str) -> tuple[int, ...]:
    """Parse the value of --batches, --sizes or --tasks: distinct numbers, largest first."""
    if not all(part.isdigit() and int(part) for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, such as 2000,500")
    return tuple(sorted({int(part) for part in text.split(",")}, reverse=True))


def _parse_names(choices: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Return the type of a flag that takes a comma-separated list of some of these names."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(filter(None, text.split(",")))
        if not names or set(names) - set(choices):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(choices)}")
        return tuple(name for name in choices if name in names)

    return parse


@dataclass(frozen=True)
class Experiment(Spec):
    """The systems, models, rows and mini-batches that are compared. The defaults describe the full experiment.

    Raises UsageError for a value out of range, and for a number of generated rows beside a real file."""

    higgs: str | None = option(
        None, "file HIGGS.csv, all rows of which are read instead of generated rows", metavar="URI"
    )
    year: str | None = option(
        None, "file YearPredictionMSD.txt, all rows of which are read instead of generated rows", metavar="URI"
    )
    higgs_rows: int | None = option(
        HIGGS_ROWS,
        "generated rows that resemble HIGGS",
        least=MIN_ROWS,
        shown=f"{HIGGS_ROWS:,}; with --quick {QUICK_HIGGS_ROWS:,}",
        advanced=True,
    )
    year_rows: int | None = option(
        YEAR_ROWS,
        "generated rows that resemble YearPredictionMSD",
        least=MIN_ROWS,
        shown=f"{YEAR_ROWS:,}; with --quick {QUICK_YEAR_ROWS:,}",
        advanced=True,
    )
    repeats: int = option(3, "runs to convergence per configuration", least=1, shown="3; with --quick 1")
    sizes: tuple[int, ...] | None = option(
        None,
        "numbers of rows on which single mini-batches are timed",
        metavar="LIST",
        parse=_parse_sizes,
        shown="as many as fit into memory, and a tenth and a hundredth of that; with --quick none",
        advanced=True,
    )
    tasks: tuple[int, ...] = option(
        TASKS,
        f"numbers of tasks, and of workers up to {MAX_WORKERS}, with which mini-batches are timed to fit and validate the"
        " cost model of many nodes",
        metavar="LIST",
        parse=_parse_sizes,
        shown=f"{','.join(map(str, TASKS))}; with --quick none",
        advanced=True,
    )
    mini_batches: int = option(
        100, "timed mini-batches for --sizes and --tasks", least=1, shown="100; with --quick 20", advanced=True
    )
    batches: tuple[int, ...] = option(
        (2000, 500),
        "mini-batch sizes of the runs to convergence, in rows",
        metavar="LIST",
        parse=_parse_sizes,
        shown="2000,500",
    )
    models: tuple[Model, ...] = option(
        MODELS, f"models to train, from {', '.join(MODELS)}", metavar="LIST", parse=_parse_names(MODELS), shown="all"
    )
    systems: tuple[System, ...] = option(
        SYSTEMS,
        f"systems to compare, from {', '.join(SYSTEMS)}",
        metavar="LIST",
        parse=_parse_names(SYSTEMS),
        shown="all",
    )
    seed: int = option(0, "seed of generated rows and sampling", parse=parse_seed, shown="0")
    tolerance: float = TOLERANCE  # of the stop rule

    def __post_init__(self) -> None:
        super().__post_init__()
        for problem in (HIGGS, YEAR):
            rows = self.rows(problem)
            file = self.file(problem)
            if rows is not None and file:
                raise UsageError(
                    f"{problem.flag}-rows {rows} generates rows, and {problem.flag} reads real rows; leave one of them out"
                )
        small = [size for size in self.sizes or () if size < MIN_ROWS]
        if small:
            raise UsageError(f"--sizes must be at least {MIN_ROWS}, got {small[0]}")

    def rows(self, problem: Problem) -> int | None:
        """Return the number of rows to generate, or None if a real file is read."""
        return {HIGGS.name: self.higgs_rows, YEAR.name: self.year_rows}[problem.name]

    def file(self, problem: Problem) -> str | None:
        """Return the real file to read, or None if rows are generated."""
        return {HIGGS.name: self.higgs, YEAR.name: self.year}[problem.name]

    def models_of(self, problem: Problem) -> tuple[Model, ...]:
        """Return the models that learn a problem."""
        return tuple(model for model in self.models if HYPERPARAMETERS[model].problem == problem.name)


QUICK = Experiment(
    higgs_rows=QUICK_HIGGS_ROWS,
    year_rows=QUICK_YEAR_ROWS,
    repeats=1,
    sizes=(),
    tasks=(),
    mini_batches=20,
    tolerance=2 * TOLERANCE,  # needs a fraction of the mini-batches
)


def add_experiment_flags(group: FlagGroup) -> None:
    """Add a flag for each field of Experiment. Absent flags are None, because --quick changes the defaults."""
    add_flags(group, Experiment)
    group.add_argument(
        "--arms", dest="systems", type=_parse_names(SYSTEMS), metavar="LIST", help=AdvancedHelp("alias of --systems")
    )
    group.set_defaults(**dict.fromkeys(field.name for field in fields(Experiment)))


def experiment_from_flags(args: argparse.Namespace) -> Experiment:
    """Return the full or the quick experiment, changed by the given flags. Raises UsageError."""
    changes = {field.name: getattr(args, field.name, None) for field in fields(Experiment)}
    changes = {name: value for name, value in changes.items() if value not in (None, "")}
    # A real file replaces the generated rows, whose default number would contradict it.
    real = {f"{name}_rows": None for name in ("higgs", "year") if name in changes}
    return replace(QUICK if args.quick else Experiment(), **real | changes)
