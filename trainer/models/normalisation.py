"""A test whether BatchNorm can normalise a mini-batch, by a forward pass of the model."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.models.devices import preserve_generator


class _OneValue(Exception):
    """The error of a layer whose input has a single value per channel, which has no variance."""


def normalises(model: nn.Module, shape: tuple[int, int, int], examples: int) -> bool:
    """Return whether the BatchNorm layers of a model can train on ``examples`` images; True without such layers.

    Costs one forward pass of a copy, and changes neither the model nor torch's generator. Other errors in that pass are
    ignored, because they say nothing about BatchNorm."""
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return True
    trial = copy.deepcopy(model).train()
    for module in trial.modules():
        if isinstance(module, _BatchNorm):
            module.register_forward_pre_hook(_refuse_one_value)
    with preserve_generator(), torch.no_grad(), suppress(Exception):
        try:
            trial(torch.zeros(examples, *shape))
        except _OneValue:
            return False
    return True


def _refuse_one_value(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Raise _OneValue if a BatchNorm layer gets a single value per channel."""
    values = inputs[0]
    if values.numel() <= values.shape[1]:
        raise _OneValue
