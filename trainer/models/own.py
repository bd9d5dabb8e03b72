"""A model of the user's own: ``--model module:function``."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import UsageError
from pipeline.core.import_path import hiding_file
from trainer.models.base import ModelSpec

if TYPE_CHECKING:
    from torch import nn

# Errors of a user's code. A script that parses arguments as it is imported raises SystemExit, which would end the command
# with the script's exit code, even 0.
USER_ERRORS = (Exception, SystemExit)


def is_reference(name: str) -> bool:
    """True if a name has the form of a function in a module, module:function."""
    module, _, function = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), function))


@dataclass(frozen=True)
class OwnModel(ModelSpec):
    """A model made by a user's function(image_shape, num_classes) -> torch.nn.Module.

    The function's module is in the current folder or installed."""

    reference: str = ""

    @property
    def name(self) -> str:  # type: ignore[override]  # other models have it as a class variable
        return self.reference

    def make(self, shape: tuple[int, int, int], num_outputs: int) -> nn.Module:
        """Return the function's model in training mode.

        Raises UsageError if it fails, does not turn two black images into logits, or replaces its tensors in training.
        These checks are made here, so that the model does not fail in a worker."""
        function = self.function()
        try:
            model = function(shape, num_outputs)
            _check_outputs(model, self.reference, shape, num_outputs)
            _check_training(model, self.reference, shape, num_outputs)
            return model.train()  # type: ignore[no-any-return]  # checked to be a module
        except UsageError:
            raise
        except USER_ERRORS as error:
            raise UsageError(f"--model {self.reference} fails: {describe_error(error)}") from error

    def function(self) -> Any:
        """Return the referenced function. Raises UsageError if there is none."""
        return load_function("--model", self.reference)


def load_function(flag: str, reference: str) -> Any:
    """Return the function that a flag names. Raises UsageError if there is none.

    flag: for messages; reference: module:function."""
    module_name, _, function_name = reference.partition(":")
    module = _import(flag, reference, module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        available = ", ".join(member for member, _ in inspect.getmembers(module, inspect.isroutine)) or "none"
        # A module of the interpreter has no file, and a folder without __init__.py has None.
        place = getattr(module, "__file__", None) or module_name
        raise UsageError(f"{flag} {reference}: {place} has no function {function_name}; it has: {available}")
    return function


def _import(flag: str, reference: str, module_name: str) -> Any:
    """Import a module of the current folder or an installed one. Raises UsageError if it cannot be imported."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module_name)
    except USER_ERRORS as error:
        reason = f"the import of {module_name} fails: {describe_error(error)}"
        # A module that is there may import one that is not.
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            reason = (
                f"there is no module {error.name} in {folder} nor among the installed packages;"
                " run from the folder that contains it"
            )
        raise UsageError(f"{flag} {reference}: {reason}") from error


def describe_error(error: BaseException) -> str:
    """Return the cause of an error in a user's code, as part of a message."""
    if isinstance(error, SystemExit):
        code = " ".join(repr(error.code).split())[:200]
        return f'it calls sys.exit({code}): remove that, or move it below if __name__ == "__main__"'
    return hiding_file(error) or f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _check_outputs(model: Any, reference: str, shape: tuple[int, int, int], num_classes: int) -> None:
    """Raise UsageError if a user's model is no torch module, or does not turn two black images into logits.

    A single logit per image will do for two classes.

    Args:
        model: the result of the user's function.
        reference: module:function, for messages.
        shape: (channels, height, width) of an image.
        num_classes: number of logits per image.
    """
    import torch
    from torch import nn

    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {reference} returned a {type(model).__name__}: it must return a torch.nn.Module")
    # In evaluation mode BatchNorm keeps its statistics; two images show a model that loses the batch dimension.
    with torch.no_grad():
        outputs = model.eval()(torch.zeros(2, *shape))
    _check_logits(outputs, reference, num_classes, "")


def _check_training(model: nn.Module, reference: str, shape: tuple[int, int, int], num_classes: int) -> None:
    """Raise UsageError if a user's model fails in training mode, or replaces a tensor of its state there.

    A worker's tensors are views of one vector, which servers and checkpoints see: a new tensor in place of one would be
    trained or saved no more. Takes the memory of a second model for a moment; see ``_check_outputs`` for the arguments."""
    import torch

    from trainer.models.devices import preserve_generator

    try:
        trained = copy.deepcopy(model).train()  # BatchNorm changes its statistics in training
    except Exception:  # not every module can be copied
        return
    state = {name: tensor for name, tensor in trained.state_dict(keep_vars=True).items() if tensor.is_floating_point()}
    places = {name: tensor.data_ptr() for name, tensor in state.items()}
    try:
        with preserve_generator():  # of a dropout
            outputs = trained(torch.zeros(2, *shape))
    except USER_ERRORS as error:
        raise UsageError(f"--model {reference} fails in training mode: {describe_error(error)}") from error
    _check_logits(outputs, reference, num_classes, " in training mode")
    for name, tensor in trained.state_dict(keep_vars=True).items():
        if tensor.data_ptr() != places.get(name, tensor.data_ptr()):
            raise UsageError(
                f"--model {reference} replaces its tensor {name} in forward(), which workers could neither train nor save;"
                " change it in place, as by .copy_()"
            )


def _check_logits(outputs: Any, reference: str, num_classes: int, when: str) -> None:
    """Raise UsageError if a model's outputs for two images are no logits. when: for the message."""
    output_shape = tuple(getattr(outputs, "shape", ()))
    if output_shape not in {(2, num_classes)} | ({(2, 1)} if num_classes == 2 else set()):
        raise UsageError(
            f"--model {reference} turned 2 images into {output_shape}{when}: it must return logits (2, {num_classes})"
        )
