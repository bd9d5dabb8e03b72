"""Makes tests/support/allocation_vectors.json: the rows of each worker by importance, which the tests hold ours against.

    python -m tests.support.allocation_vectors

The script follows the text of Sheikholeslami et al. (DAIS 2023, section 3) with plain loops over exact fractions, and
imports nothing of this project:

1. In the warm-up, the loss of each example is stored in every epoch. The first E_ignore epochs are left out.
2. The importance of an example is the average or the variance of its losses. Of a single loss, the authors' program takes
   the average in place of the variance.
3. The examples are sorted by importance, the most important one first; examples of equal importance by their number.
4. Stripes: the sorted examples are dealt to the workers in turn. Blocks: each worker gets consecutive examples. For a
   number of examples that the workers do not divide, the paper's blocks leave the rest out; here the first workers get
   one example more.
5. After an interval, the same is done with the losses of this interval alone, of which no epoch is left out.

Losses are multiples of L/8, where L is divided by 1 to the number of epochs. So running means and variances are exact in
float32 too, and examples of equal importance are equal in any arithmetic."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
NUMBER_OF_CASES = 42
MOST_EPOCHS = 5
LEVELS = 6  # different losses of a case, so few that examples tie


def importance_of(losses: list[Fraction], measure: str) -> Fraction:
    """Return the average or the unbiased variance of the losses of an example."""
    total = Fraction(0)
    for loss in losses:
        total += loss
    average = total / len(losses)
    if measure == "average" or len(losses) == 1:
        return average
    squares = Fraction(0)
    for loss in losses:
        squares += (loss - average) * (loss - average)
    return squares / (len(losses) - 1)


def sort_examples(importance: list[Fraction]) -> list[int]:
    """Return the examples by falling importance, one after the other."""
    remaining = list(range(len(importance)))
    order = []
    while remaining:
        top = remaining[0]
        for example in remaining:
            if importance[example] > importance[top]:
                top = example
        remaining.remove(top)
        order.append(top)
    return order


def allocate(losses: list[list[Fraction]], ignored: int, workers: int, measure: str, heuristic: str) -> list[int]:
    """Return the worker of each example. losses: of each example, by epoch. ignored: number of first epochs left out."""
    importance = []
    for losses_of_example in losses:
        importance.append(importance_of(losses_of_example[ignored:], measure))
    owners = [-1] * len(losses)
    worker = 0
    room = block_size(worker, len(losses), workers)
    for rank, example in enumerate(sort_examples(importance)):
        if heuristic == "stripes":
            owners[example] = rank % workers
            continue
        if room == 0:
            worker += 1
            room = block_size(worker, len(losses), workers)
        owners[example] = worker
        room -= 1
    return owners


def block_size(worker: int, examples: int, workers: int) -> int:
    """Return the number of examples in a worker's block."""
    size = examples // workers
    return size + 1 if worker < examples % workers else size


def make_phase(
    generator: random.Random, examples: int, ignored: int, counted: int, workers: int, measure: str, heuristic: str
) -> dict[str, Any]:
    """Return random losses of a warm-up or of an interval, and the workers of the examples after it."""
    unit = Fraction(lcm(*range(1, counted + 1)), 8)
    losses = [[unit * generator.randrange(LEVELS) for _ in range(ignored + counted)] for _ in range(examples)]
    owners = allocate(losses, ignored, workers, measure, heuristic)
    return {"losses": [[float(loss) for loss in row] for row in losses], "owners": owners}


def make_vectors() -> dict[str, Any]:
    """Return the content of the file: 1 to 7 workers with both heuristics and both measures, at different lengths."""
    generator = random.Random(39)
    cases = []
    for number in range(NUMBER_OF_CASES):
        workers = 1 + number % 7
        measure = ("average", "variance")[number // 2 % 2]
        heuristic = ("stripes", "blocks")[number % 2]
        ignored = number % 4
        counted = 1 + number % MOST_EPOCHS
        interval = 1 + number // 3 % MOST_EPOCHS
        examples = 2 * workers + generator.randrange(16)
        about = {"workers": workers, "measure": measure, "heuristic": heuristic, "ignored": ignored}
        warmup = make_phase(generator, examples, ignored, counted, workers, measure, heuristic)
        after_interval = make_phase(generator, examples, 0, interval, workers, measure, heuristic)
        cases.append(about | {"phases": [warmup, after_interval]})
    return {"made_by": "python -m tests.support.allocation_vectors", "cases": cases}


def main() -> None:
    FILE.write_text(json.dumps(make_vectors()) + "\n")


if __name__ == "__main__":
    main()
