"""The extent of a benchmark, and its flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from pipeline.core.command_line import seed as parse_seed
from pipeline.core.errors import UsageError
from pipeline.core.specs import Spec, add_flags, option
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
QUICK_HIGGS_ROWS = 160 * BLOCK_ROWS
# YearPredictionMSD has 463,715 rows for training
YEAR_ROWS = 463_715
QUICK_YEAR_ROWS = 20_000
TASKS = (published.NODES * published.CORES_A_NODE, 70, MAX_WORKERS, 8)


def _parse_sizes(text: str) -> tuple[int, ...]:
    """Parse the value of --batches, --sizes or --tasks: distinct numbers, largest first."""
    if not all(part.isdigit() and int(part) for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, such as 2000,500")
    return tuple(sorted({int(part) for part in text.split(",")}, reverse=True))


def _parse_names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Return the type of a flag that takes a comma-separated list of some of these names."""

    def parse(text: str) -> tuple[str, ...]:
        given = tuple(filter(None, text.split(",")))
        if not given or set(given) - set(known):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(known)}")
        return tuple(name for name in known if name in given)

    return parse


@dataclass(frozen=True)
class Experiment(Spec):
    """The systems, models, rows and mini-batches that are compared. The defaults describe the full experiment.

    Raises UsageError for a value out of range, and for a number of generated rows beside a real file."""

    higgs: str | None = option(None, "the real HIGGS.csv instead of rows like it", metavar="URI")
    year: str | None = option(None, "the real YearPredictionMSD.txt instead of rows like it", metavar="URI")
    higgs_rows: int | None = option(
        HIGGS_ROWS,
        "generated rows of higgs-like",
        metavar="N",
        least=MIN_ROWS,
        shown=f"{HIGGS_ROWS:,}; quick {QUICK_HIGGS_ROWS:,}",
    )
    year_rows: int | None = option(
        YEAR_ROWS,
        "generated rows of year-like",
        metavar="N",
        least=MIN_ROWS,
        shown=f"{YEAR_ROWS:,}; quick {QUICK_YEAR_ROWS:,}",
    )
    repeats: int = option(3, "runs to convergence of each configuration", metavar="R", least=1, shown="3; quick 1")
    sizes: tuple[int, ...] | None = option(
        None,
        "numbers of rows on which single mini-batches are timed, too",
        metavar="LIST",
        parse=_parse_sizes,
        shown="the most that memory holds, a tenth, a hundredth; quick: none",
    )
    tasks: tuple[int, ...] = option(
        TASKS,
        f"numbers of tasks, and of workers up to {MAX_WORKERS}, with which mini-batches are timed for the cost model of"
        " many nodes, and to validate it",
        metavar="LIST",
        parse=_parse_sizes,
        shown=f"{','.join(map(str, TASKS))}; quick: none",
    )
    mini_batches: int = option(100, "mini-batches that are timed there", metavar="K", least=1, shown="100; quick 20")
    batches: tuple[int, ...] = option(
        (2000, 500), "mini-batches to converge with", metavar="LIST", parse=_parse_sizes, shown="2000,500"
    )
    models: tuple[Model, ...] = option(
        MODELS, f"of {', '.join(MODELS)}", metavar="LIST", parse=_parse_names(MODELS), shown="all"
    )
    systems: tuple[System, ...] = option(
        SYSTEMS, f"of {', '.join(SYSTEMS)}", metavar="LIST", parse=_parse_names(SYSTEMS), shown="all"
    )
    seed: int = option(0, "seed of data and sampling", metavar="S", parse=parse_seed, shown="0")
    tolerance: float = TOLERANCE  # of the stop rule

    def __post_init__(self) -> None:
        super().__post_init__()
        for problem in (HIGGS, YEAR):
            rows = self.rows(problem)
            file = self.file(problem)
            if rows is not None and file:
                raise UsageError(
                    f"{problem.flag}-rows {rows} is of generated rows, and {problem.flag} gives real ones; leave one out"
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


def add_experiment_flags(group: argparse._ArgumentGroup) -> None:
    """Add a flag for each field of Experiment. Absent flags are None, because --quick changes the defaults."""
    add_flags(group, Experiment)
    group.add_argument(
        "--arms", dest="systems", type=_parse_names(SYSTEMS), metavar="LIST", help="another name of --systems"
    )
    group.set_defaults(**dict.fromkeys(field.name for field in fields(Experiment)))


def experiment_from_flags(args: argparse.Namespace) -> Experiment:
    """Return the full or the quick experiment, changed by the given flags. Raises UsageError."""
    given = {field.name: getattr(args, field.name, None) for field in fields(Experiment)}
    given = {name: value for name, value in given.items() if value not in (None, "")}
    # A real file replaces the generated rows, whose default number would contradict it.
    real = {f"{name}_rows": None for name in ("higgs", "year") if name in given}
    return replace(QUICK if args.quick else Experiment(), **real | given)
