"""A model for runs that a test disturbs: logistic regression whose workers pause before every step.

Such a run waits for the test without loading the cores. It has the bits of ``--model logistic``."""

from __future__ import annotations

import time
from pathlib import Path

from torch import nn

from trainer.models.networks.linear import logistic

SLOW = ("--model", "tests.support.slow_model:build")
SLOWLY_PREPARED = ("--model", "tests.support.slow_model:build_late")  # a test has the time to kill the preparation
PAUSE_S = 0.02
PREPARATION_S = 2.0


def build(image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Return the model. It pauses in processes of workers only: not in an evaluator, a replay or in virtual time."""
    model = logistic(image_shape, num_classes, intercept=True)
    if Path("/proc/self/comm").read_text().startswith("worker-"):
        model.register_forward_pre_hook(_pause)
    return model


def build_late(image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Return the model, in the process that prepares a run after a pause."""
    if Path("/proc/self/comm").read_text().strip() == "prepare":
        time.sleep(PREPARATION_S)
    return build(image_shape, num_classes)


def _pause(module: nn.Module, inputs: object) -> None:
    time.sleep(PAUSE_S)
