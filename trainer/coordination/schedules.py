"""Learning-rate recipes: the epochs at which the rate falls to a tenth, or the decay of MLlib's gradient descent."""

from __future__ import annotations

import math

AUTO, INVERSE_SQRT = "auto", "inverse-sqrt"
SHARES = (0.75, 0.9)  # of a run, after which auto lets the rate fall; earlier, short runs stop before they have learned
# The thesis prints drops that disagree by an epoch or two between its chapters 4 and 6 (82 and 133 against 81; 90 and 135);
# these are the ones that TensorFlow's official ResNet, which it ran, has.
RECIPES: dict[str, tuple[float, ...]] = {AUTO: (), "ch6": (91, 136), "ch4": (82, 133), "constant": (), INVERSE_SQRT: ()}


def drops(recipe: str, epochs: float) -> tuple[float, ...]:
    """The epochs at which the rate falls in a run of so many. Raises KeyError for a name that RECIPES does not hold."""
    at = tuple(share * epochs for share in SHARES) if recipe == AUTO else RECIPES[recipe]
    return tuple(epoch for epoch in at if epoch < epochs)


def learning_rate(recipe: str, base: float, epoch: float, mini_batches: float, epochs: float) -> float:
    """The rate at a global epoch (accepted gradients / gradients an epoch, so a fraction) and after so many global
    mini-batches, both counted from 0, in a run of so many epochs.

    A drop holds from its epoch on; inverse-sqrt is base / sqrt(t) in the t-th mini-batch, as in MLlib. Raises KeyError for a
    name that RECIPES does not hold."""
    if recipe == INVERSE_SQRT:
        return base / math.sqrt(1 + mini_batches)
    fallen = sum(epoch >= drop for drop in drops(recipe, epochs))
    return base / 10.0**fallen  # dividing gives the 0.01 and 0.001 that a reader types; multiplying by 0.1 does not
