"""An optimiser of the user's own: ``--optimiser module:function``, a torch.optim.Optimizer on one range of the model.

A server holds a part of the parameters as one flat tensor, and checkpoints are read by any number of servers. The
optimiser must therefore treat every element alone, and keep nothing but tensors of the parameters' shape and counters of
steps. ``probe`` checks both before a run begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from pipeline.core.errors import UsageError
from trainer.coordination.parameter_slice import ParameterSlice, Vector
from trainer.models.devices import usual_torch
from trainer.models.own import USER_ERRORS, describe_error, load_function

FLAG = "--optimiser"
STEPS = 3  # of the probe


@dataclass(frozen=True)
class StateLayout:
    """The state of an optimiser for one parameter. arrays: keys of tensors like it; counters: keys of numbers of steps."""

    arrays: tuple[str, ...]
    counters: tuple[str, ...]


@dataclass
class TorchSlice(ParameterSlice):
    """A range of the model that a user's optimiser updates by the mean gradient of each update.

    Attributes:
        reference: module:function.
    """

    reference: str = ""
    slots: int = field(init=False, default=1)  # type: ignore[misc]  # other rules have it as a class variable
    _learning_rate: float = field(default=0.0, init=False, repr=False)
    _optimiser: Optimizer | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.slots = slots_of(self.reference)

    def restart(self, updates: int) -> None:
        super().restart(updates)
        self._optimiser = None  # its state is that of other parameters

    def _begin_update(self, rate: float, count: int, scale: float) -> float:
        """Return the factor of the mean. The rate of an update of k gradients is k times the rate of each of them.

        The scale belongs to the mean alone: such an optimiser hardly depends on the length of the gradient."""
        super()._begin_update(rate, count, scale)
        self._learning_rate = rate * count
        return scale / count

    def _spans(self) -> Iterator[slice]:
        """Yield all parameters at once, because the optimiser has one tensor; nothing for a range of statistics alone."""
        if self.num_parameters:
            yield slice(0, self.num_parameters)

    def _step(self, span: slice, update: Vector) -> None:
        """Apply a mean gradient to all parameters, and keep the state in ``momentum``."""
        layout = probe(self.reference)
        if self._optimiser is None:
            parameter = nn.Parameter(torch.from_numpy(self.values[span]))  # shares the memory
            self._optimiser = _make(self.reference, parameter)
            # An optimiser makes its state in its first step; a later one continues with the state of a checkpoint.
            if self.updates > 1:
                arrays = [self.momentum[index :: self.slots] for index in range(len(layout.arrays))]
                _restore(self._optimiser, layout, arrays, self.updates - 1)
        group = self._optimiser.param_groups[0]
        [parameter] = group["params"]
        group["lr"] = self._learning_rate
        parameter.grad = torch.from_numpy(np.ascontiguousarray(update))
        self._optimiser.step()
        for index, key in enumerate(layout.arrays):
            self.momentum[index :: self.slots] = self._optimiser.state[parameter][key].numpy()


def slots_of(reference: str) -> int:
    """Return the elements of state per parameter, at least 1. Raises UsageError."""
    return max(1, len(probe(reference).arrays))


@cache
def probe(reference: str) -> StateLayout:
    """Return the layout of the state of a user's optimiser.

    Raises UsageError if it is no optimiser, does not treat every element alone, or has a state that no checkpoint can
    hold."""
    with usual_torch():
        return _probe(reference)


def _probe(reference: str) -> StateLayout:
    """Return the layout, by steps of the optimiser as a whole and in two halves."""
    whole = _run(reference, slice(0, 4))
    halves = [_run(reference, span)[0] for span in (slice(0, 2), slice(2, 4))]
    values, optimiser = whole
    if not torch.equal(values, torch.cat(halves)):
        raise UsageError(
            f"{FLAG} {reference} does not treat every parameter alone, as servers with parts of the model need; choose"
            " an optimiser without norms or factors over whole tensors"
        )
    layout = _layout(reference, optimiser)
    # The next step of a copy that has only what a checkpoint holds.
    [parameter] = optimiser.param_groups[0]["params"]
    other = nn.Parameter(parameter.detach().clone())
    copy = _make(reference, other)
    arrays = [optimiser.state[parameter][key].numpy() for key in layout.arrays]
    try:
        _restore(copy, layout, arrays, STEPS)
        for each, of in ((parameter, optimiser), (other, copy)):
            each.grad = torch.tensor([0.5, 0.1, -2.0, 1.0])
            of.step()
    except USER_ERRORS as error:  # such as of one that indexes a list by a counter, which is restored as a tensor
        raise UsageError(
            f"{FLAG} {reference} fails after its state was restored: {describe_error(error)}; a restored counter is a"
            " float32 tensor"
        ) from None
    if not torch.equal(parameter, other):
        raise UsageError(
            f"{FLAG} {reference} steps otherwise after its state was restored: a resumed run would end with other bits;"
            " keep all state in tensors like the parameters"
        )
    return layout


def _run(reference: str, span: slice) -> tuple[torch.Tensor, Optimizer]:
    """Return some of four parameters after ``STEPS`` steps, and the optimiser that made them."""
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 3.0])[span].clone())
    values = parameter.detach()  # shares the memory, as the part of a server does
    optimiser = _make(reference, parameter)
    for step in range(STEPS):
        parameter.grad = torch.tensor([0.3, -1.0, 2.0, 0.7])[span] * (step + 1)
        try:
            optimiser.step()
        except USER_ERRORS as error:  # such as of one that needs a closure
            raise UsageError(f"{FLAG} {reference} fails in its step: {describe_error(error)}") from None
    if parameter.data_ptr() != values.data_ptr():
        raise UsageError(
            f"{FLAG} {reference} replaces the parameter's tensor, so that no step would reach the model; change it in"
            " place, as by parameter.data.add_(update)"
        )
    return parameter.detach(), optimiser


def _make(reference: str, parameter: nn.Parameter) -> Optimizer:
    """Return the optimiser of one parameter. Raises UsageError if the function fails or returns anything else."""
    function = load_function(FLAG, reference)
    try:
        optimiser = function([parameter])
    except USER_ERRORS as error:
        raise UsageError(f"{FLAG} {reference} fails: {describe_error(error)}") from None
    if not isinstance(optimiser, Optimizer) or len(optimiser.param_groups) != 1:
        kind = type(optimiser).__name__
        raise UsageError(f"{FLAG} {reference} returned a {kind}: it must return a torch.optim.Optimizer with one group")
    if "lr" not in optimiser.param_groups[0]:
        raise UsageError(f"{FLAG} {reference} has no learning rate 'lr', which --learning-rate and the schedule set")
    return optimiser


def _layout(reference: str, optimiser: Optimizer) -> StateLayout:
    """Return the layout of a state after ``STEPS`` steps. Raises UsageError for other values than arrays and counters."""
    [parameter] = optimiser.param_groups[0]["params"]
    state: dict[str, Any] = optimiser.state.get(parameter, {})
    is_array = {key: isinstance(value, torch.Tensor) and value.shape == parameter.shape for key, value in state.items()}
    counters = tuple(key for key, value in state.items() if not is_array[key] and _is_counter(value))
    arrays = tuple(key for key, value in state.items() if is_array[key] and value.dtype == torch.float32)
    # momentum_buffer of an SGD without momentum is None.
    rest = [key for key, value in state.items() if key not in (*counters, *arrays) and value is not None]
    if rest:
        raise UsageError(
            f"{FLAG} {reference} keeps {rest[0]!r}, which is no float32 tensor like the parameters and no number of steps:"
            " no checkpoint holds it; choose another optimiser"
        )
    return StateLayout(arrays, counters)


def _is_counter(value: Any) -> bool:
    is_number = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return is_number and float(value) == STEPS


def _restore(optimiser: Optimizer, layout: StateLayout, arrays: list[Any], updates: int) -> None:
    """Give a new optimiser the state after a number of updates. arrays: float32 [P] for each of the layout's arrays."""
    state: dict[str, Any] = {
        key: torch.from_numpy(np.array(array, np.float32)) for key, array in zip(layout.arrays, arrays, strict=True)
    }
    state |= {key: torch.tensor(float(updates)) for key in layout.counters}
    optimiser.load_state_dict({"state": {0: state}, "param_groups": optimiser.state_dict()["param_groups"]})
