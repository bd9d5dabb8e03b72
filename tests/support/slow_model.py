"""A model for runs that a test disturbs: logistic regression whose workers pause before every step.

Such a run waits for the test without loading the cores. It has the bits of ``--model logistic``."""

from __future__ import annotations

import time
from pathlib import Path

from torch import nn

from trainer.models.networks.linear import logistic

SLOW = ("--model", "tests.support.slow_model:build")
PAUSE_S = 0.02


def build(image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Return the model. It pauses in processes of workers only: not in an evaluator, a replay or in virtual time."""
    model = logistic(image_shape, num_classes, intercept=True)
    if Path("/proc/self/comm").read_text().startswith("worker-"):
        model.register_forward_pre_hook(_pause)
    return model


def _pause(module: nn.Module, inputs: object) -> None:
    time.sleep(PAUSE_S)
