"""Which comparisons are made, and what both sides are told to do: the same in every arm. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Arm = Literal["mllib", "ps-sync", "ps-async", "averaging", "all-reduce"]
ARMS: tuple[Arm, ...] = ("mllib", "ps-sync", "ps-async", "averaging", "all-reduce")
Model = Literal["logistic", "linear", "perceptron"]
HIDDEN = (15, 15)
MOST_WORKERS = 8  # more than cores, for each of which a program is started
TOLERANCE = 1e-3  # MLlib's default


@dataclass(frozen=True)
class Settings:
    """step: a0 of the rate a0/sqrt(t), or the constant rate of the perceptron; decay: L2 factor; most: mini-batches after
    which a run that has not converged is ended."""

    problem: str
    step: float
    decay: float
    most: int
    constant: bool = False


# pyspark's defaults for regularisation and tolerance. Steps are this project's (the thesis names none): from 0.05, 0.1,
# 0.2, 0.5, 1 and 2 those that end after some hundreds of mini-batches in a simulation of MLlib's descent in numpy, on
# 20,000 generated rows; every arm is given the same.
SETTINGS: dict[Model, Settings] = {
    "logistic": Settings("higgs-like", step=1.0, decay=0.01, most=20_000),
    "linear": Settings("year-like", step=0.1, decay=0.0, most=20_000),
    "perceptron": Settings("higgs-like", step=0.5, decay=0.0, most=1_000, constant=True),
}


@dataclass(frozen=True)
class Cell:
    """batch: the global mini-batch, at most ``rows``, which is gradient descent. mini_batches: how many are timed, or None
    for a run until MLlib's stop rule, with this tolerance, ends it. tasks: of an MLlib job, or workers; None: one a core."""

    model: Model
    rows: int
    batch: int
    mini_batches: int | None = None
    tolerance: float = TOLERANCE
    tasks: int | None = None

    @property
    def settings(self) -> Settings:
        return SETTINGS[self.model]

    @property
    def is_stochastic(self) -> bool:
        return self.batch < self.rows

    @property
    def fraction(self) -> float:
        """Probability of a row to be in a mini-batch."""
        return min(1.0, self.batch / self.rows)

    @property
    def name(self) -> str:
        size = f"{self.batch:,}" if self.is_stochastic else "all rows"
        tasks = f", {self.tasks} tasks" if self.tasks else ""
        return f"{self.model}, {size} of {self.rows:,}{tasks}" + (
            f", {self.mini_batches} times" if self.mini_batches else ""
        )


def to_converge(model: Model, rows: int, batches: tuple[int, ...], tolerance: float = TOLERANCE) -> list[Cell]:
    """Runs until the stop rule ends them: gradient descent, and mini-batches of the regressions, the only ones that MLlib
    has (SPEC 9, "real")."""
    smaller = [batch for batch in batches if batch < rows and model != "perceptron"]
    return [Cell(model, rows, batch, None, tolerance) for batch in (rows, *smaller)]


def of_a_length(model: Model, rows: int, count: int) -> list[Cell]:
    """Runs of a fixed number of mini-batches: of all rows, and for a regression of a hundredth and a thousandth (SPEC 9,
    "synthetic")."""
    parts = (1,) if model == "perceptron" else (1, 100, 1000)
    return [Cell(model, rows, rows // part, count if model != "perceptron" else max(1, count // 5)) for part in parts]


def of_many_tasks(model: Model, rows: int, batch: int, count: int, tasks: int, arm: Arm) -> Cell:
    """Mini-batches that are cut into more tasks, or for more workers, than there are cores: what each adds is most of what
    a mini-batch costs on many nodes. More for a server, whose pushes are short beside its start."""
    return Cell(model, rows, batch, max(1, count // 5) if arm == "mllib" else 5 * count, tasks=tasks)


@dataclass(frozen=True)
class Plan:
    """rows: of each problem, to converge on, ``repeats`` times; batches: of those runs. sizes: numbers of rows on which
    ``count`` mini-batches are timed, once, for that is a mean already; None: up to what memory holds. tasks: numbers of
    them, more than cores, with which a regression's mini-batches are timed."""

    rows: dict[str, int]
    batches: tuple[int, ...]
    sizes: tuple[int, ...] | None
    tasks: tuple[int, ...]
    count: int
    repeats: int
    seed: int
    tolerance: float
    models: tuple[Model, ...]
    arms: tuple[Arm, ...]
    csv: dict[str, str]

    def learners(self, problem: str) -> tuple[Model, ...]:
        """Which models learn a problem."""
        return tuple(model for model in self.models if SETTINGS[model].problem == problem)


@dataclass(frozen=True)
class Outcome:
    """One run of one arm. seconds: from the first mini-batch to the end of the last; compute_s and read_s: of one
    mini-batch, read_s None where none is drawn apart; updates: of the model; cpu: share of all cores that was busy; load_s:
    reading all rows into memory; start_s: that and, of the server, all else before the first mini-batch; server_s: CPU of
    the parameter server a push; driver_s: CPU of Spark's driver a mini-batch, without tasks; step_s: of compute_s, what a
    worker's step takes, the rest being messages; weights: where it ended, in MLlib's order."""

    mini_batches: int
    updates: int
    examples: int
    converged: bool
    seconds: float
    compute_s: float
    read_s: float | None
    cpu: float
    load_s: float
    start_s: float
    server_s: float | None = None
    driver_s: float | None = None
    step_s: float | None = None
    weights: tuple[float, ...] = ()
