"""A check that a model has learned anything: its loss is below the loss of guessing by more than the noise."""

from __future__ import annotations

from trainer.config import Config

NOTHING_LEARNED = "nothing was learned"
NOISES = 2.0  # standard errors by which the loss must be lower


def has_learned(loss: float, noise: float, guessing: float) -> bool:
    """Return whether a loss is significantly below the loss of guessing; False for NaN.

    Args:
        loss: mean cross entropy of training rows, without the L2 term.
        noise: standard error of the loss.
        guessing: the loss of a model that knows only the number of classes.
    """
    return loss + NOISES * noise < guessing


def nothing_learned(config: Config, loss: float, noise: float, guessing: float) -> str:
    """Return the warning that nothing was learned, with advice. loss, noise, guessing: as for ``has_learned``."""
    measured = f"the loss on training rows is {loss:.3f} (give or take {NOISES * noise:.3f})"
    comparison = f"{measured}, and guessing costs {guessing:.3f}"
    return f"{NOTHING_LEARNED}: {comparison}; {_next_step(config)}"


def _next_step(config: Config) -> str:
    """Return advice against a run that learns nothing: the likeliest cause that the configuration shows."""
    own = config.default_rate
    if config.learning_rate > own:
        return f"--learning-rate is {config.learning_rate:g}: leave it out, and it is {own:g}"
    if not config.protocol.synchronous and config.optimiser.momentum_rule == "heavy-ball":
        return "--momentum-rule is heavy-ball, which diverges with stale gradients except at low rates: leave it out"
    return f"give a lower --learning-rate than {config.learning_rate:g}, or more epochs"
