"""The two ways in which Spark tasks descend together without a job for each mini-batch. Pure but for the all-gather.

all-reduce: gradients are summed at every step, so the result is that of MLlib's own gradient descent. averaging: MLlib*
(Zhang et al. 2019): every task takes LOCAL_STEPS steps on a model of its own, then the models are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trainer.benchmark import arithmetic
from trainer.benchmark.configurations import Configuration

LOCAL_STEPS = 10
Floats = npt.NDArray[np.float64]
Gather = Callable[[Floats], Floats]  # a rank's row [k] to the rows of all ranks [ranks, k]


@dataclass(frozen=True)
class Part:
    """One task's rows, x [rows, d] and y [rows], and the generator that draws from them."""

    configuration: Configuration
    x: Floats
    y: Floats
    rng: np.random.Generator

    def draw_gradient(self, weights: Floats) -> tuple[Floats, int]:
        """The gradient summed over the next mini-batch's rows, and how many of them are here.

        Each row is in a mini-batch independently of all others (Bernoulli sampling)."""
        x, y = self.x, self.y
        if self.configuration.is_stochastic:
            count = self.rng.binomial(len(y), self.configuration.fraction)
            chosen = self.rng.choice(len(y), count, replace=False, shuffle=False)
            x, y = x[chosen], y[chosen]
        return arithmetic.gradient(self.configuration.model, weights, x, y), len(y)

    def step(self, weights: Floats, gradient: Floats, number: int) -> Floats:
        """The weights after step ``number`` with a mean gradient."""
        given = self.configuration.hyperparameters
        return weights - given.learning_rate(number) * (gradient + given.decay * weights)


@dataclass(frozen=True)
class Descent:
    """How far a descent has come. The weights are the same in every task."""

    weights: Floats
    mini_batches: int = 0
    updates: int = 0  # of the common model
    examples: int = 0  # drawn by this task
    converged: bool = False


def reduce_gradients(part: Part, weights: Floats, gather: Gather) -> Iterator[Descent]:
    """Where all-reduce is after every mini-batch."""
    examples = 0
    for number in range(1, part.configuration.max_mini_batches + 1):
        gradient, count = part.draw_gradient(weights)
        examples += count
        total = gather(np.append(gradient, count)).sum(axis=0)
        weights = part.step(weights, total[:-1] / max(1.0, total[-1]), number)
        yield Descent(weights, number, number, examples)


def average_models(part: Part, weights: Floats, gather: Gather) -> Iterator[Descent]:
    """Where averaging is after every LOCAL_STEPS mini-batches, and at the end.

    A model's weight in the average is the number of examples that it has seen since the last."""
    examples = updates = seen = 0
    last = part.configuration.max_mini_batches
    for number in range(1, last + 1):
        gradient, count = part.draw_gradient(weights)
        examples, seen = examples + count, seen + count
        weights = part.step(weights, gradient / max(1, count), number)
        if number % LOCAL_STEPS == 0 or number == last:
            total = gather(np.append(weights * seen, seen)).sum(axis=0)
            weights, seen, updates = total[:-1] / max(1.0, total[-1]), 0, updates + 1
            yield Descent(weights, number, updates, examples)


# The method, and how many mini-batches lie between two of its updates.
METHODS: dict[str, tuple[Callable[[Part, Floats, Gather], Iterator[Descent]], int]] = {
    "averaging": (average_models, LOCAL_STEPS),
    "all-reduce": (reduce_gradients, 1),
}


def descend(system: str, part: Part, start: Floats, gather: Gather) -> Descent:
    """One task's run to its end.

    MLlib's stop rule looks at the common model after each update but the first. An update of K mini-batches is held to K
    tolerances, since it sees the sum of K moves."""
    method, steps = METHODS[system]
    tolerance = steps * part.configuration.tolerance
    now = Descent(start)
    for after in method(part, start, gather):
        before, now = now, after
        if before.updates and part.configuration.length is None and _is_close(before.weights, now.weights, tolerance):
            return replace(now, converged=True)
    return now


def _is_close(before: Floats, after: Floats, tolerance: float) -> bool:
    """MLlib's stop rule."""
    return float(np.linalg.norm(after - before)) < tolerance * max(float(np.linalg.norm(after)), 1.0)
