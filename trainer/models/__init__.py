"""The registry of models. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.core import json_values
from pipeline.core.errors import UsageError
from pipeline.core.specs import registry
from trainer.models.base import ModelInput, ModelSpec
from trainer.models.cnn import CNN
from trainer.models.linear import Linear, Logistic, Perceptron
from trainer.models.own import OwnModel, is_reference
from trainer.models.published_resnet import ResNet18, ResNet34, ResNet50
from trainer.models.resnet import ResNet20, ResNet32, ResNet56
from trainer.models.wide_resnet import WideResNet16x4, WideResNet28x10

MODELS: dict[str, type[ModelSpec]] = registry(
    ResNet20,
    ResNet32,
    ResNet56,
    ResNet18,
    ResNet34,
    ResNet50,
    WideResNet16x4,
    WideResNet28x10,
    CNN,
    Logistic,
    Linear,
    Perceptron,
)

__all__ = ["MODELS", "ModelInput", "ModelSpec", "OwnModel", "model_from_json"]


def model_from_json(values: Mapping[str, Any]) -> ModelSpec:
    """Return the model, built-in or own, that ``to_json`` wrote.

    Raises UsageError for unknown models, KeyError without a name, ValueError for unknown or ill-typed parameters."""
    options = dict(values)
    name = options.pop("name")
    if isinstance(name, str) and name in MODELS:
        return json_values.build(MODELS[name], options)  # qualified, because ``build`` is a module of this package
    if not isinstance(name, str) or not is_reference(name):
        raise UsageError(f"--model {name} is neither one of {', '.join(MODELS)} nor a module:function")
    return OwnModel(reference=name, **options)
