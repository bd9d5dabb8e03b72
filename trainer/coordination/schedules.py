"""Learning-rate schedules: drops to a tenth at the epochs of a recipe or of --drops, a cosine, or the decay of MLlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from pipeline.core.errors import UsageError

AUTO = "auto"
COSINE = "cosine"
INVERSE_SQRT = "inverse-sqrt"
SHARES = (0.75, 0.9)  # of a run, after which "auto" drops the rate; earlier drops stop short runs from learning
# ch6: TensorFlow's official ResNet, which the thesis used, drops at 91 and 136; chapter 6 prints these as 90 and 135.
# ch4: 82 and 133, as chapter 4 prints them (81 in its section 4.4.3).
RECIPES: dict[str, tuple[float, ...]] = {
    AUTO: (),
    "ch6": (91, 136),
    "ch4": (82, 133),
    "constant": (),
    COSINE: (),
    INVERSE_SQRT: (),
}


def parse_drops(text: str) -> tuple[float, ...]:
    """Parse a list of epochs such as 100,150. Raises UsageError for other text; ``are_drops`` checks the numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--drops {text!r} is not a list of epochs, such as 100,150") from None


def are_drops(epochs: Sequence[float]) -> bool:
    """True for finite, positive epochs, each later than the one before. Fractions of an epoch are valid."""
    return all(before < epoch < math.inf for before, epoch in pairwise((0.0, *epochs)))


def drops(recipe: str, epochs: float, listed: Sequence[float] = ()) -> tuple[float, ...]:
    """Return the epochs at which the rate drops in a run of ``epochs`` epochs. Raises KeyError for an unknown recipe.

    listed: the epochs of --drops, which replace the recipe's; empty if it was not given."""
    at = tuple(share * epochs for share in SHARES) if recipe == AUTO else RECIPES[recipe]
    return tuple(epoch for epoch in listed or at if epoch < epochs)


def learning_rate(
    recipe: str, base: float, epoch: float, mini_batches: float, epochs: float, listed: Sequence[float] = ()
) -> float:
    """Return the learning rate at a point of a run. Raises KeyError for an unknown recipe.

    Args:
        recipe: a key of RECIPES. A drop applies from its epoch on; cosine falls to 0 at the end of the run (Loshchilov and
            Hutter, "SGDR", 2017, without restarts); inverse-sqrt is base / sqrt(t) in the t-th mini-batch, as in MLlib.
        base: the rate at the start.
        epoch: global epoch (accepted gradients / gradients per epoch), a fraction, counted from 0.
        mini_batches: global mini-batches so far.
        epochs: length of the run.
        listed: see ``drops``.
    """
    if recipe == INVERSE_SQRT:
        return base / math.sqrt(1 + mini_batches)
    if recipe == COSINE:
        return base * (1 + math.cos(math.pi * min(epoch / epochs, 1.0))) / 2
    fallen = sum(epoch >= drop for drop in drops(recipe, epochs, listed))
    return base / 10.0**fallen  # dividing gives the 0.01 and 0.001 that a reader types; multiplying by 0.1 does not


def warm_up(epoch: float, length: float, steps_per_epoch: int) -> float:
    """Return the factor of the rate at a point of a run: it rises linearly, and reaches 1 in the last warm-up step.

    Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017, section 2.2.

    Args:
        epoch: see ``learning_rate``.
        length: epochs of the warm-up, 0 for none.
        steps_per_epoch: mini-batches per worker and epoch.
    """
    return min(1.0, (epoch + 1 / steps_per_epoch) / length) if length else 1.0
