"""What every system is given: a model, rows, a mini-batch and a length. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

System = Literal["mllib", "ps-sync", "ps-async", "averaging", "all-reduce"]
SYSTEMS: tuple[System, ...] = ("mllib", "ps-sync", "ps-async", "averaging", "all-reduce")
Model = Literal["logistic", "linear", "perceptron"]
HIDDEN_LAYERS = (15, 15)
MAX_WORKERS = 32  # more than cores; each is a process
TOLERANCE = 1e-3  # MLlib's default
BLOCK_ROWS = 128  # rows that MLlib's perceptron stacks into one matrix: its default


@dataclass(frozen=True)
class Hyperparameters:
    """What gradient descent on one model is given, the same in every system."""

    problem: str  # name of the problem that the model learns
    step_size: float  # a0 of the learning rate a0/sqrt(t), or the constant rate
    decay: float  # L2 factor
    max_mini_batches: int  # after which a run that has not converged ends
    constant_rate: bool = False

    def learning_rate(self, step: int) -> float:
        """The rate of a step, counted from 1."""
        return self.step_size if self.constant_rate else self.step_size / math.sqrt(step)


# Regularisation and tolerance are pyspark's defaults of the regressions. The thesis names no step sizes. Of 0.05, 0.1, 0.2,
# 0.5, 1 and 2 these are the ones that converge after some hundreds of mini-batches when MLlib's descent is simulated in
# numpy on 20,000 generated rows. pyspark's own for its perceptron, 0.03 down to a tolerance of 1e-6, do not end in 8,000
# mini-batches there: a step is then still 1e-4 long.
HYPERPARAMETERS: dict[Model, Hyperparameters] = {
    "logistic": Hyperparameters("higgs-like", step_size=1.0, decay=0.01, max_mini_batches=20_000),
    "linear": Hyperparameters("year-like", step_size=0.1, decay=0.0, max_mini_batches=20_000),
    "perceptron": Hyperparameters("higgs-like", step_size=0.5, decay=0.0, max_mini_batches=1_000, constant_rate=True),
}


@dataclass(frozen=True)
class Configuration:
    """One comparison: every system runs it."""

    model: Model
    rows: int
    batch: int  # examples of the global mini-batch; all rows: gradient descent
    length: int | None = None  # mini-batches to time; None: until MLlib's stop rule ends the run
    tolerance: float = TOLERANCE  # of the stop rule
    tasks: int | None = None  # of an MLlib job, or workers of a server; None: one for each core

    @property
    def hyperparameters(self) -> Hyperparameters:
        return HYPERPARAMETERS[self.model]

    @property
    def is_stochastic(self) -> bool:
        return self.batch < self.rows

    @property
    def fraction(self) -> float:
        """The probability of a row to be in a mini-batch."""
        return min(1.0, self.batch / self.rows)

    @property
    def max_mini_batches(self) -> int:
        return self.length or self.hyperparameters.max_mini_batches

    @property
    def name(self) -> str:
        """``linear, 500 of 4,000, 3 tasks, 2 times``."""
        size = f"{self.batch:,}" if self.is_stochastic else "all rows"
        tasks = f", {self.tasks} tasks" if self.tasks else ""
        return f"{self.model}, {size} of {self.rows:,}{tasks}" + (f", {self.length} times" if self.length else "")


def configurations_to_converge(
    model: Model, rows: int, batches: tuple[int, ...], tolerance: float = TOLERANCE
) -> list[Configuration]:
    """Runs that the stop rule ends: gradient descent, and the regressions' mini-batches (thesis, figures 2.12 and
    2.13).

    MLlib's perceptron has no mini-batches."""
    smaller = [batch for batch in batches if batch < rows and model != "perceptron"]
    return [Configuration(model, rows, batch, None, tolerance) for batch in (rows, *smaller)]


def configurations_of_fixed_length(model: Model, rows: int, length: int) -> list[Configuration]:
    """Runs of ``length`` mini-batches: of all rows and, of a regression, of a hundredth and a thousandth of them (thesis,
    figures 2.7, 2.9 and 2.10). A perceptron's run has a fifth as many."""
    parts = (1,) if model == "perceptron" else (1, 100, 1000)
    mini_batches = length if model != "perceptron" else max(1, length // 5)
    return [Configuration(model, rows, rows // part, mini_batches) for part in parts]


def configuration_with_tasks(
    model: Model, rows: int, batch: int, length: int, tasks: int, system: System
) -> Configuration:
    """Mini-batches cut into more tasks, or computed by more workers, than there are cores.

    What a task adds is most of what a mini-batch costs on many nodes. A server gets five times ``length``, since its
    pushes are short beside its start; MLlib a fifth."""
    mini_batches = max(1, length // 5) if system == "mllib" else 5 * length
    return Configuration(model, rows, batch, mini_batches, tasks=tasks)
