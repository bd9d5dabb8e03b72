"""Learning-rate recipes: the epochs at which the rate falls to a tenth."""

from __future__ import annotations

# The printed drops disagree by an epoch or two between chapters; these are the ones that the code ran (SPEC 3).
RECIPES: dict[str, tuple[float, ...]] = {"ch6": (91, 136), "ch4": (82, 133), "constant": ()}


def learning_rate(recipe: str, base: float, epoch: float) -> float:
    """The rate at a global epoch (accepted gradients / gradients an epoch, so a fraction), counted from 0.

    A drop holds from its epoch on. Raises KeyError for a name that RECIPES does not hold."""
    drops = sum(epoch >= drop for drop in RECIPES[recipe])
    return base / 10.0**drops  # dividing gives the 0.01 and 0.001 that a reader types; multiplying by 0.1 does not
