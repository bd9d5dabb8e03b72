"""Which comparisons are made, and what both sides are told to do: the same in every arm. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Arm = Literal["mllib", "ps-sync", "ps-async", "averaging", "all-reduce"]
ARMS: tuple[Arm, ...] = ("mllib", "ps-sync", "ps-async", "averaging", "all-reduce")
Model = Literal["logistic", "linear", "perceptron"]
HIDDEN = (15, 15)
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
    for a run until MLlib's stop rule, with this tolerance, ends it."""

    model: Model
    rows: int
    batch: int
    mini_batches: int | None = None
    tolerance: float = TOLERANCE

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
        return f"{self.model}, {size} of {self.rows:,}" + (f", {self.mini_batches} times" if self.mini_batches else "")


def to_converge(rows: dict[Model, int], batches: tuple[int, ...], tolerance: float = TOLERANCE) -> list[Cell]:
    """Runs until the stop rule ends them: gradient descent of every model, and mini-batches of the regressions, the only
    ones that MLlib has (SPEC 9, "real")."""
    cells = [Cell(model, count, count, None, tolerance) for model, count in rows.items()]
    for model in rows.keys() - {"perceptron"}:
        cells += [Cell(model, rows[model], batch, None, tolerance) for batch in batches if batch < rows[model]]
    return sorted(cells, key=lambda cell: (list(rows).index(cell.model), -cell.batch))


def per_mini_batch(rows: dict[Model, int], parts: tuple[int, ...], count: int) -> list[Cell]:
    """Runs of a fixed number of mini-batches, which are these parts of all rows (SPEC 9, "synthetic")."""
    cells = [Cell(model, total, total // part, count) for model, total in rows.items() for part in parts]
    return [cell for cell in cells if cell.model != "perceptron" or not cell.is_stochastic]


@dataclass(frozen=True)
class Plan:
    """rows: of each problem; batches: of the runs to convergence; parts and count: of those of a fixed length."""

    rows: dict[str, int]
    batches: tuple[int, ...]
    parts: tuple[int, ...]
    count: int
    repeats: int
    seed: int
    tolerance: float
    models: tuple[Model, ...]
    arms: tuple[Arm, ...]
    csv: dict[str, str]

    def of_models(self) -> dict[Model, int]:
        return {model: self.rows[SETTINGS[model].problem] for model in self.models}

    def cells(self) -> list[Cell]:
        of_models = self.of_models()
        return to_converge(of_models, self.batches, self.tolerance) + per_mini_batch(of_models, self.parts, self.count)


@dataclass(frozen=True)
class Outcome:
    """One run of one arm. seconds: from the first mini-batch to the end of the last; compute_s and read_s: of one
    mini-batch; updates: of the model; cpu: share of all cores that was busy; start_s: before the first mini-batch, reading
    all rows into memory included; server_s: CPU of the parameter server a push; weights: where it ended, in MLlib's
    order."""

    mini_batches: int
    updates: int
    examples: int
    converged: bool
    seconds: float
    compute_s: float
    read_s: float
    cpu: float
    start_s: float
    server_s: float = 0.0
    weights: tuple[float, ...] = ()
