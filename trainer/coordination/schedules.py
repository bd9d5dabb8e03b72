"""Learning-rate recipes: the epochs at which the rate falls to a tenth, or the decay of MLlib's gradient descent."""

from __future__ import annotations

import math

INVERSE_SQRT = "inverse-sqrt"
# The thesis prints drops that disagree by an epoch or two between its chapters 4 and 6 (82 and 133 against 81; 90 and 135);
# these are the ones that TensorFlow's official ResNet, which it ran, has.
RECIPES: dict[str, tuple[float, ...]] = {"ch6": (91, 136), "ch4": (82, 133), "constant": (), INVERSE_SQRT: ()}


def learning_rate(recipe: str, base: float, epoch: float, mini_batches: float = 0.0) -> float:
    """The rate at a global epoch (accepted gradients / gradients an epoch, so a fraction) and after so many global
    mini-batches, both counted from 0.

    A drop holds from its epoch on; inverse-sqrt is base / sqrt(t) in the t-th mini-batch, as in MLlib. Raises KeyError for a
    name that RECIPES does not hold."""
    if recipe == INVERSE_SQRT:
        return base / math.sqrt(1 + mini_batches)
    drops = sum(epoch >= drop for drop in RECIPES[recipe])
    return base / 10.0**drops  # dividing gives the 0.01 and 0.001 that a reader types; multiplying by 0.1 does not
