"""The two ways in which Spark tasks descend together without one job per mini-batch. Pure except for the all-gather.

all-reduce: gradients are summed at every step, with the same result as MLlib's own gradient descent. averaging: MLlib*
(Zhang et al. 2019): every task takes LOCAL_STEPS steps on its own model, then the models are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from pipeline.core.arrays import Floats
from trainer.benchmark import arithmetic
from trainer.benchmark.configurations import Configuration

LOCAL_STEPS = 10
Gather = Callable[[Floats], Floats]  # takes a rank's row [k], returns the rows of all ranks [ranks, k]


@dataclass(frozen=True)
class TaskRows:
    """The rows of one task, x [rows, d] and y [rows], and the generator that samples them."""

    configuration: Configuration
    x: Floats
    y: Floats
    rng: np.random.Generator

    def draw_gradient(self, weights: Floats) -> tuple[Floats, int]:
        """Return the gradient summed over this task's rows of the next mini-batch, and their number.

        Each row is in a mini-batch independently of all others (Bernoulli sampling)."""
        x = self.x
        y = self.y
        if self.configuration.is_stochastic:
            count = self.rng.binomial(len(y), self.configuration.fraction)
            batch = self.rng.choice(len(y), count, replace=False, shuffle=False)
            x = x[batch]
            y = y[batch]
        return arithmetic.gradient(self.configuration.model, weights, x, y), len(y)

    def step(self, weights: Floats, gradient: Floats, number: int) -> Floats:
        """Return the weights after step ``number`` with a mean gradient."""
        hyperparameters = self.configuration.hyperparameters
        return weights - hyperparameters.learning_rate(number) * (gradient + hyperparameters.decay * weights)


@dataclass(frozen=True)
class Descent:
    """The state of a descent. The weights are the same in every task."""

    weights: Floats
    mini_batches: int = 0  # so far
    updates: int = 0  # of the common model
    examples: int = 0  # drawn by this task
    converged: bool = False  # whether MLlib's stop rule has ended it


def reduce_gradients(part: TaskRows, weights: Floats, gather: Gather) -> Iterator[Descent]:
    """Yield the state of all-reduce after every mini-batch.

    All tasks take the same step with the mean gradient over the examples of all tasks. Only the examples of this task
    are counted.

    Args:
        part: this task's rows and configuration.
        weights: initial weights.
        gather: all-gather between the tasks.
    """
    examples = 0
    for number in range(1, part.configuration.max_mini_batches + 1):
        gradient, count = part.draw_gradient(weights)
        examples += count
        total = gather(np.append(gradient, count)).sum(axis=0)
        weights = part.step(weights, total[:-1] / max(1.0, total[-1]), number)
        yield Descent(weights, mini_batches=number, updates=number, examples=examples)


def average_models(part: TaskRows, weights: Floats, gather: Gather) -> Iterator[Descent]:
    """Yield the state of averaging after every LOCAL_STEPS mini-batches, and at the end.

    A model's weight in the average is the number of examples that it has used since the last average. For the arguments
    see ``reduce_gradients``."""
    examples = updates = rows_since_average = 0
    last = part.configuration.max_mini_batches
    for number in range(1, last + 1):
        gradient, count = part.draw_gradient(weights)
        examples = examples + count
        rows_since_average = rows_since_average + count
        weights = part.step(weights, gradient / max(1, count), number)
        # Also after the last mini-batch, because a run must end with the same model in every task.
        if number % LOCAL_STEPS == 0 or number == last:
            # The weights travel with the sums: under Bernoulli sampling every task draws another number of examples.
            total = gather(np.append(weights * rows_since_average, rows_since_average)).sum(axis=0)
            # If no task has drawn a row, all have only decayed the same model by the same steps.
            if total[-1]:
                weights = total[:-1] / total[-1]
            rows_since_average = 0
            updates = updates + 1
            yield Descent(weights, mini_batches=number, updates=updates, examples=examples)


# Each method, and its mini-batches per update.
METHODS: dict[str, tuple[Callable[[TaskRows, Floats, Gather], Iterator[Descent]], int]] = {
    "averaging": (average_models, LOCAL_STEPS),
    "all-reduce": (reduce_gradients, 1),
}


def descend(system: str, part: TaskRows, start: Floats, gather: Gather) -> Descent:
    """Run the mini-batches of one task and return the last state.

    The run ends after the configuration's ``max_mini_batches``. Without a fixed length it ends earlier if MLlib's stop
    rule is met: the rule compares the common model before and after each update, from the second one on. If an update
    consists of K mini-batches, the tolerance is multiplied by K, because the update is the sum of K steps. All tasks
    end together, because they have the same weights after each update.

    Args:
        system: "averaging" or "all-reduce".
        part: this task's rows and configuration.
        start: initial weights.
        gather: all-gather between the tasks.
    """
    method, steps = METHODS[system]
    tolerance = steps * part.configuration.tolerance
    now = Descent(start)
    for after in method(part, start, gather):
        before = now
        now = after
        if before.updates and part.configuration.length is None and _is_close(before.weights, now.weights, tolerance):
            return replace(now, converged=True)
    return now


def _is_close(before: Floats, after: Floats, tolerance: float) -> bool:
    """True if MLlib's stop rule is met."""
    return float(np.linalg.norm(after - before)) < tolerance * max(float(np.linalg.norm(after)), 1.0)
