"""The layout of a model in one flat float32 vector, as servers, workers and checkpoints use it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipeline.core.errors import UsageError

ALIGNMENT = 64  # elements, 256 bytes: kernels of a GPU read several elements at once, and fail at other addresses


@dataclass(frozen=True)
class TensorRange:
    """The place of a tensor: elements [begin, end) of the vector, in row-major order of its shape."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def view(self, vector: Tensor) -> Tensor:
        return vector[self.begin : self.end].view(self.shape)


class FlatModel:
    """The layout of a model, and the views that make a vector of P + Q elements its state.

    The vector has num_parameters = P trainable parameters in named_parameters() order, then num_buffers = Q elements
    without gradients: frozen parameters if any, and saved floating-point buffers (BatchNorm's running statistics) in
    named_buffers() order. Integer buffers (BatchNorm's number of batches) are not included. Raises UsageError for a
    model without trainable parameters, and, with the name of the tensor, for elements that are not float32 and for
    tensors that share memory.

    Attributes:
        model: the model.
        slots: the place of each tensor.
        num_parameters, num_buffers: P and Q.
        buffers_begin: the place of the first element without a gradient; P without gaps.
        length: elements of the vector; P + Q without gaps.
        values, gradients: the attached vectors, empty before.
    """

    def __init__(self, model: nn.Module, *, alignment: int = 1) -> None:
        """Lay out a model. alignment: every tensor begins at a multiple of so many elements, which leaves gaps."""
        trained = _trainable(model)
        rest = _untrained_state(model)
        for refuse in (_refuse_untrainable, _refuse_other_types, _refuse_shared):
            refuse(model)
        self.model = model
        self.slots = _lay_out(trained | rest, alignment)
        self.num_parameters = sum(tensor.numel() for tensor in trained.values())
        self.num_buffers = sum(tensor.numel() for tensor in rest.values())
        self.length = _aligned(self.slots[-1].end, alignment)
        self.buffers_begin = self.slots[len(trained)].begin if rest else self.length
        self.values = self.gradients = torch.empty(0)  # until attach()
        self._decayed: list[tuple[Tensor, Tensor]] = []  # parameters that decay, and their gradients
        self._decay_mask: Tensor | None = None  # of a vector with gaps: 1 for parameters that decay, 0 for others
        self._has_gaps = alignment > 1

    def attach(self, values: Tensor, gradients: Tensor | None = None) -> None:
        """Make every tensor a view of values [length], and every parameter's gradient a view of gradients.

        gradients has ``buffers_begin`` elements, those of the parameters.

        Data copied into values take effect in the model at once, backward adds to gradients (zero them before), and
        BatchNorm updates its part of values. Both are contiguous float32, from torch.from_numpy of a memory map or on a
        device, to which the model is moved. The model's previous values are lost: read() them first. Never change
        values between forward and backward, because autograd cannot detect it."""
        _check_length("values", values, self.length)
        self.model.to(values.device)
        tensors = _trainable(self.model) | _untrained_state(self.model)
        for slot in self.slots:
            tensors[slot.name].data = slot.view(values)
        self.values = values
        if gradients is not None:
            self._attach_gradients(gradients)

    def _attach_gradients(self, gradients: Tensor) -> None:
        """Make every parameter's gradient a view of gradients, and note which of them get weight decay."""
        _check_length("gradients", gradients, self.buffers_begin)
        trained = _trainable(self.model)
        for slot in self.slots[: len(trained)]:
            trained[slot.name].grad = slot.view(gradients)
        # Weight decay leaves out biases and normalisations, which have one dimension.
        matrices = [slot for slot in self.slots[: len(trained)] if len(slot.shape) > 1]
        self._decayed = [(self.values[m.begin : m.end], gradients[m.begin : m.end]) for m in matrices]
        if self._has_gaps:
            self._decay_mask = torch.zeros_like(gradients)
            for matrix in matrices:
                self._decay_mask[matrix.begin : matrix.end] = 1
        self.gradients = gradients

    def weight_decay_(self, coefficient: float) -> Tensor:
        """Add the gradient of the L2 term to gradients, and return the term, 0-d, for the loss.

        The term is coefficient / 2 * sum of w^2 over parameters with at least two dimensions, that is, without biases
        and normalisations. Two passes over P elements; none for a coefficient of 0. A vector with gaps is on a GPU, where
        one operation on all elements takes less time than one per tensor."""
        if coefficient and self._decay_mask is not None:
            weights = self.values[: len(self._decay_mask)] * self._decay_mask
            self.gradients.add_(weights, alpha=coefficient)
            return 0.5 * coefficient * weights.dot(weights)
        squares = self.values.new_zeros(())
        for weights, gradients in self._decayed if coefficient else ():
            gradients.add_(weights, alpha=coefficient)
            squares += weights.dot(weights)
        return 0.5 * coefficient * squares

    def slot(self, name: str) -> TensorRange | None:
        """Return the place of a tensor in the attached vector; None if the model has no such tensor."""
        return next((slot for slot in self.slots if slot.name == name), None)

    def packed_range(self, name: str) -> slice:
        """Return the range of a tensor in the vector of P + Q elements without gaps."""
        sizes = [slot.end - slot.begin for slot in self.slots]
        index = next(index for index, slot in enumerate(self.slots) if slot.name == name)
        return slice(sum(sizes[:index]), sum(sizes[: index + 1]))

    def positions(self) -> Tensor:
        """Return the place in the attached vector of each of the P + Q elements without gaps, int64 [P + Q]."""
        return torch.cat([torch.arange(slot.begin, slot.end) for slot in self.slots])

    @torch.no_grad()
    def load(self, values: Tensor) -> None:
        """Copy values [P + Q], without gaps, into the model's tensors, wherever they are."""
        tensors = _trainable(self.model) | _untrained_state(self.model)
        _check_length("values", values, self.num_parameters + self.num_buffers)
        begin = 0
        for tensor in tensors.values():
            tensor.copy_(values[begin : begin + tensor.numel()].view(tensor.shape))
            begin += tensor.numel()

    def read(self) -> npt.NDArray[np.float32]:
        """Return a copy [P + Q] of the model's values, attached or not."""
        tensors = (_trainable(self.model) | _untrained_state(self.model)).values()
        vector: npt.NDArray[np.float32] = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu().numpy()
        return vector

    def named(self, values: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[np.float32]]:
        """Return values [P + Q] as arrays by the names of state_dict(), as in a model's file. They share memory."""
        return {slot.name: values[slot.begin : slot.end].reshape(slot.shape) for slot in self.slots}


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}


def _untrained_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the state without gradients: frozen parameters and saved floating-point buffers."""
    frozen = {name: tensor for name, tensor in model.named_parameters() if not tensor.requires_grad}
    saved_names = model.state_dict().keys()  # buffers that are not saved are made again with the model
    return frozen | {name: t for name, t in model.named_buffers() if t.is_floating_point() and name in saved_names}


def _lay_out(tensors: dict[str, Tensor], alignment: int) -> tuple[TensorRange, ...]:
    """Return the places of tensors in their order, each at a multiple of ``alignment``."""
    slots = []
    begin = 0
    for name, tensor in tensors.items():
        slots.append(TensorRange(name, tuple(tensor.shape), begin, begin + tensor.numel()))
        begin = _aligned(slots[-1].end, alignment)
    return tuple(slots)


def _aligned(place: int, alignment: int) -> int:
    """Return the first multiple of ``alignment`` that is not before ``place``."""
    return -(-place // alignment) * alignment


def _refuse_untrainable(model: nn.Module) -> None:
    if not _trainable(model):
        raise UsageError(f"{type(model).__name__} has no trainable parameters: there is nothing to train")


def _refuse_other_types(model: nn.Module) -> None:
    for name, tensor in (_trainable(model) | _untrained_state(model)).items():
        if tensor.dtype != torch.float32:
            raise UsageError(
                f"{name} of {type(model).__name__} is {tensor.dtype}: only float32 is trained, use .float()"
            )


def _refuse_shared(model: nn.Module) -> None:
    """Raise UsageError for tensors that share memory.

    Tied weights would be stored under only one of their names, and views of each other would be separated."""
    places: dict[int, str] = {}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in every:
        if tensor.numel() and places.setdefault(tensor.data_ptr(), name) != name:
            first = places[tensor.data_ptr()]
            raise UsageError(
                f"{first} and {name} of {type(model).__name__} share memory: give each a tensor of its own"
            )


def _check_length(name: str, vector: Tensor, length: int) -> None:
    if vector.shape != (length,) or vector.dtype != torch.float32:
        raise ValueError(f"{name} must be {length} float32 elements, got {tuple(vector.shape)} of {vector.dtype}")
