"""The models a run can name, what each is trained to do, and the way to a model of one's own."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.errors import UsageError
from pipeline.seeds import Purpose, word
from trainer.config import Config
from trainer.data.shards import Shards
from trainer.models.cnn import CNN
from trainer.models.linear import linear, logistic, perceptron
from trainer.models.resnet import Norm, ResNet, Shortcut


class Task(Protocol):
    """What outputs [N, K] and labels [N] mean. loss: mean over examples; correct: how many are right, int64, 0-d."""

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor: ...

    def correct(self, outputs: Tensor, labels: Tensor) -> Tensor: ...


class Classification:
    """Cross entropy of logits: one a class, or a single one for the second of two classes."""

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if outputs.shape[1] == 1:
            return F.binary_cross_entropy_with_logits(outputs[:, 0], labels.to(outputs.dtype))
        return F.cross_entropy(outputs, labels)

    def correct(self, outputs: Tensor, labels: Tensor) -> Tensor:
        found = outputs[:, 0] > 0 if outputs.shape[1] == 1 else outputs.argmax(1)
        return (found == labels).sum()


CLASSIFICATION = Classification()


class LeastSquares:
    """Half the squared error, summed over outputs. Class labels (integers) are fitted one-hot, real ones as they are."""

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        real = labels.is_floating_point()
        targets = labels.view_as(outputs) if real else F.one_hot(labels, outputs.shape[1])
        return 0.5 * (outputs - targets).square().sum(1).mean()

    def correct(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """0 for real labels: a real number is never right."""
        if labels.is_floating_point():
            return torch.zeros((), dtype=torch.int64, device=outputs.device)
        return (outputs.argmax(1) == labels).sum()


@dataclass(frozen=True)
class ModelSpec:
    """make(image_shape, num_classes, **options) -> nn.Module; options name which of norm, shortcut and intercept it
    takes; regresses: it fits targets where rows have them."""

    make: Callable[..., nn.Module]
    task: Task = CLASSIFICATION
    options: tuple[str, ...] = ()
    regresses: bool = False


_RESNET = ("norm", "shortcut")
MODELS: dict[str, ModelSpec] = {
    "resnet20": ModelSpec(partial(ResNet, blocks=3), options=_RESNET),
    "resnet32": ModelSpec(partial(ResNet, blocks=5), options=_RESNET),
    "resnet56": ModelSpec(partial(ResNet, blocks=9), options=_RESNET),
    "cnn": ModelSpec(CNN, options=("norm",)),
    "logistic": ModelSpec(logistic, options=("intercept",)),
    "linear": ModelSpec(linear, task=LeastSquares(), options=("intercept",), regresses=True),
    "perceptron": ModelSpec(perceptron),
}


@dataclass(frozen=True)
class Built:
    """A model on the CPU in float32, in train mode, and its task. targets: whether that is to fit the rows' targets."""

    model: nn.Module
    task: Task
    targets: bool = False


def build_for(config: Config, shards: Shards) -> Built:
    """The model of a run. Raises UsageError."""
    return build(
        config.model,
        image_shape=shards.shape,
        num_classes=shards.num_classes,
        norm=config.norm,
        shortcut=config.shortcut,
        intercept=config.intercept,
        seed=config.seed,
        targets=shards.has_targets,
    )


def build(
    name: str,
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    norm: Norm = "batch",
    shortcut: Shortcut = "pad",
    intercept: bool = True,
    seed: int,
    targets: bool = False,
) -> Built:
    """Make a model of MODELS, or of a user's ``module:function``; image_shape is (C, H, W); targets: rows have them.

    The same seed gives the same bits whatever was drawn from torch's generator before, and leaves it as it was.
    Raises UsageError for a name that is not there, an option that the model does not have, and for what ``function``
    returns if it is no model of these images."""
    spec = MODELS.get(name) or _own(name)
    options = _options(name, spec, {"norm": norm, "shortcut": shortcut, "intercept": intercept})
    real = spec.regresses and targets
    with torch.random.fork_rng(devices=[]):
        # The CPU's generator only: torch.manual_seed would re-seed those of the devices, which the fork leaves out.
        torch.default_generator.manual_seed(word(seed, Purpose.INITIALISATION))
        model = spec.make(image_shape, 1 if real else num_classes, **options)
    return Built(model, spec.task, real)


_DEFAULTS = {"norm": "batch", "shortcut": "pad", "intercept": True}


def _options(name: str, spec: ModelSpec, given: dict[str, Any]) -> dict[str, Any]:
    for option, value in given.items():
        if option not in spec.options and value != _DEFAULTS[option]:
            have = [known for known, other in MODELS.items() if option in other.options]
            flag = f"--no-{option}" if value is False else f"--{option} {value}"
            raise UsageError(f"--model {name} has no {flag}: leave it out, or use {', '.join(have)}")
    return {option: given[option] for option in spec.options}


def _own(name: str) -> ModelSpec:
    return ModelSpec(partial(_checked, _function(name), name))


def _function(name: str) -> Any:
    module_name, _, function_name = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise UsageError(f"--model {name} is none of {', '.join(MODELS)}, nor a module:function of your own")
    module = _module(name, module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        there = ", ".join(member for member, _ in inspect.getmembers(module, inspect.isroutine)) or "none"
        raise UsageError(f"--model {name}: {module.__file__} has no function {function_name}; it has: {there}")
    return function


def _module(name: str, module_name: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        message = f"--model {name}: there is no module {error.name} in {here} nor among the installed packages"
        raise UsageError(f"{message}; run from the folder that holds it") from error


def _checked(
    function: Callable[[tuple[int, int, int], int], nn.Module],
    name: str,
    image_shape: tuple[int, int, int],
    num_classes: int,
) -> nn.Module:
    """What function returns, if it is a model that turns two black images into logits: found out here, not by a worker."""
    model = function(image_shape, num_classes)
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {name} returned a {type(model).__name__}: it must return a torch.nn.Module")
    with torch.no_grad():
        outputs = model.eval()(torch.zeros(2, *image_shape))
    shape = tuple(getattr(outputs, "shape", ()))
    if shape not in {(2, num_classes)} | ({(2, 1)} if num_classes == 2 else set()):
        raise UsageError(f"--model {name} turned 2 images into {shape}: it must return logits (2, {num_classes})")
    return model.train()
