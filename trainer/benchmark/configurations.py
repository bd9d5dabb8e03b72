"""The settings that are the same for every system: model, rows, mini-batch and length of a run. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

System = Literal["mllib", "ps-sync", "ps-async", "averaging", "all-reduce"]
SYSTEMS: tuple[System, ...] = ("mllib", "ps-sync", "ps-async", "averaging", "all-reduce")
Model = Literal["logistic", "linear", "perceptron"]
HIDDEN_LAYERS = (15, 15)
MAX_WORKERS = 32  # workers of a parameter server, each a process; may exceed the cores
TOLERANCE = 1e-3  # MLlib's default
BLOCK_ROWS = 128  # MLlib's default block size of the perceptron: rows in one matrix


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters of gradient descent on one model, the same in every system."""

    problem: str  # name of the problem that the model learns
    step_size: float  # a0 of the learning rate a0/sqrt(t), or the constant rate
    decay: float  # L2 factor
    max_mini_batches: int  # at which a run ends without convergence
    constant_rate: bool = False  # whether the learning rate is step_size in every step

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return self.step_size if self.constant_rate else self.step_size / math.sqrt(step)


# Regularisation and tolerance are pyspark's defaults for the regressions. The thesis gives no step sizes. Among 0.05,
# 0.1, 0.2, 0.5, 1 and 2 these converge after some hundreds of mini-batches when MLlib's descent is simulated in numpy
# on 20,000 generated rows. pyspark's defaults for its perceptron, a step of 0.03 and a tolerance of 1e-6, do not
# converge in 8,000 mini-batches there: a step then still has a length of 1e-4.
HYPERPARAMETERS: dict[Model, Hyperparameters] = {
    "logistic": Hyperparameters("higgs-like", step_size=1.0, decay=0.01, max_mini_batches=20_000),
    "linear": Hyperparameters("year-like", step_size=0.1, decay=0.0, max_mini_batches=20_000),
    "perceptron": Hyperparameters("higgs-like", step_size=0.5, decay=0.0, max_mini_batches=1_000, constant_rate=True),
}


@dataclass(frozen=True)
class Configuration:
    """A training task on which all systems are compared.

    Attributes:
        model: the model to train.
        rows: of the training set.
        batch: examples of the global mini-batch; all rows for gradient descent.
        length: mini-batches to time; None to run until MLlib's stop rule is met.
        tolerance: of the stop rule.
        tasks: tasks of an MLlib job, or workers of a parameter server; None for one per core.
    """

    model: Model
    rows: int
    batch: int
    length: int | None = None
    tolerance: float = TOLERANCE
    tasks: int | None = None

    @property
    def hyperparameters(self) -> Hyperparameters:
        return HYPERPARAMETERS[self.model]

    @property
    def is_stochastic(self) -> bool:
        return self.batch < self.rows

    @property
    def fraction(self) -> float:
        """Return the probability of a row to be in a mini-batch."""
        return min(1.0, self.batch / self.rows)

    @property
    def max_mini_batches(self) -> int:
        return self.length or self.hyperparameters.max_mini_batches

    @property
    def name(self) -> str:
        """Return a name such as ``linear, 500 of 4,000, 3 tasks, 2 times``."""
        size = f"{self.batch:,}" if self.is_stochastic else "all rows"
        tasks = f", {self.tasks} tasks" if self.tasks else ""
        return f"{self.model}, {size} of {self.rows:,}{tasks}" + (f", {self.length} times" if self.length else "")


def configurations_to_converge(
    model: Model, rows: int, batches: tuple[int, ...], tolerance: float = TOLERANCE
) -> list[Configuration]:
    """Return runs to convergence (thesis, figures 2.12 and 2.13): gradient descent, and descent with mini-batches.

    The perceptron has gradient descent only, because MLlib's perceptron has no mini-batches.

    Args:
        model: the model to train.
        rows: of the training set.
        batches: examples of the mini-batches; sizes of at least ``rows`` are left out.
        tolerance: of the stop rule.
    """
    smaller = [batch for batch in batches if batch < rows and model != "perceptron"]
    return [Configuration(model, rows, batch, None, tolerance) for batch in (rows, *smaller)]


def configurations_of_fixed_length(model: Model, rows: int, length: int) -> list[Configuration]:
    """Return runs of ``length`` mini-batches (thesis, figures 2.7, 2.9 and 2.10).

    A mini-batch has all rows or, for the regressions, also a hundredth and a thousandth of them. A perceptron's run has
    a fifth of the mini-batches."""
    parts = (1,) if model == "perceptron" else (1, 100, 1000)
    mini_batches = length if model != "perceptron" else max(1, length // 5)
    return [Configuration(model, rows, rows // part, mini_batches) for part in parts]


def configuration_with_tasks(
    model: Model, rows: int, batch: int, length: int, tasks: int, system: System
) -> Configuration:
    """Return a run whose mini-batches are split over more tasks or workers than there are cores.

    Such runs measure the fixed cost per task, which dominates the time of a mini-batch on many nodes. The parameter
    server runs five times ``length`` mini-batches, because each takes little time compared with the start of its
    processes. MLlib runs a fifth of ``length``, because each of its mini-batches is slow.

    Args:
        model: the model to train.
        rows: of the training set.
        batch: examples of the global mini-batch.
        length: mini-batches, before the factor of the system.
        tasks: tasks of an MLlib job, or workers of a parameter server.
        system: "mllib", or a parameter server ("ps-sync", "ps-async").
    """
    mini_batches = max(1, length // 5) if system == "mllib" else 5 * length
    return Configuration(model, rows, batch, mini_batches, tasks=tasks)
