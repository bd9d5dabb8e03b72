"""The meaning of a network's outputs: the loss, and the correct predictions."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class LossParts(NamedTuple):
    """The losses of a mini-batch.

    Attributes:
        mean: the loss, 0-d.
        derivative: of ``mean`` by the outputs, [N, K], with the bits of autograd.
        examples: the loss of each example, [N]; None if it is not computed.
    """

    mean: Tensor
    derivative: Tensor
    examples: Tensor | None


class Task(Protocol):
    """The meaning of outputs [N, K] and labels [N].

    Methods:
        loss: mean over examples, 0-d.
        losses: loss of each example, [N].
        loss_parts: ``loss``, its derivative and, if by_example is set, ``losses``, with the same bits.
        guessing: loss of a guess that only knows the number of classes; None if it is meaningless.
        probabilities: probability of each class, [N, classes]; None if outputs are no logits.
        predicted: most likely class of each example, int64 [N].
        correct: number of correct predictions, int64, 0-d.
    """

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor: ...

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor: ...

    def loss_parts(self, outputs: Tensor, labels: Tensor, *, by_example: bool) -> LossParts: ...

    def guessing(self, num_classes: int) -> float | None: ...

    def probabilities(self, outputs: Tensor) -> Tensor | None: ...

    def predicted(self, outputs: Tensor) -> Tensor: ...

    def correct(self, outputs: Tensor, labels: Tensor) -> Tensor: ...


def hits(task: Task, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return whether each prediction is correct, bool [N]. A real number is never predicted exactly."""
    if labels.is_floating_point():
        return torch.zeros(len(labels), dtype=torch.bool, device=outputs.device)
    return task.predicted(outputs) == labels


class Classification:
    """Cross entropy of logits: one logit per class, or a single logit for the second of two classes."""

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self._cross_entropy(outputs, labels, "mean")

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self._cross_entropy(outputs, labels, "none")

    def loss_parts(self, outputs: Tensor, labels: Tensor, *, by_example: bool) -> LossParts:
        if outputs.shape[1] == 1:
            derivative = (outputs.sigmoid() - labels.to(outputs.dtype).unsqueeze(1)) / len(labels)
            losses = self.losses(outputs, labels) if by_example else None
            return LossParts(self.loss(outputs, labels), derivative, losses)
        # Cross entropy begins with these logarithms: they are computed once for all parts.
        logarithms = outputs.log_softmax(1)
        # The derivative by the logarithms: -1/N at the label. The rest is one kernel, the one of autograd.
        by_logarithms = torch.zeros_like(logarithms).scatter_(1, labels.unsqueeze(1), -1 / len(labels))
        backward = torch.ops.aten._log_softmax_backward_data.default
        return LossParts(
            F.nll_loss(logarithms, labels),
            backward(by_logarithms, logarithms, 1, logarithms.dtype),
            F.nll_loss(logarithms, labels, reduction="none") if by_example else None,
        )

    def _cross_entropy(self, outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
        if outputs.shape[1] == 1:
            return F.binary_cross_entropy_with_logits(outputs[:, 0], labels.to(outputs.dtype), reduction=reduction)
        return F.cross_entropy(outputs, labels, reduction=reduction)

    def guessing(self, num_classes: int) -> float | None:
        return math.log(num_classes)

    def probabilities(self, outputs: Tensor) -> Tensor:
        if outputs.shape[1] == 1:
            second = outputs[:, 0].sigmoid()
            return torch.stack([1 - second, second], dim=1)
        return outputs.softmax(1)

    def predicted(self, outputs: Tensor) -> Tensor:
        return (outputs[:, 0] > 0).long() if outputs.shape[1] == 1 else outputs.argmax(1)

    def correct(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (self.predicted(outputs) == labels).sum()


class LeastSquares:
    """Half the squared error, summed over outputs. Class labels (integers) are fitted one-hot, real labels directly."""

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.losses(outputs, labels).mean()

    def guessing(self, num_classes: int) -> float | None:
        return None

    def probabilities(self, outputs: Tensor) -> None:
        return None

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(1)

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return _half_squares(self._errors(outputs, labels))

    def loss_parts(self, outputs: Tensor, labels: Tensor, *, by_example: bool) -> LossParts:
        errors = self._errors(outputs, labels)
        losses = _half_squares(errors)
        # Multiplied by the float32 nearest to 1/N, as in the backward pass of a mean.
        return LossParts(losses.mean(), errors * (1 / len(labels)), losses)

    def _errors(self, outputs: Tensor, labels: Tensor) -> Tensor:
        real = labels.is_floating_point()
        return outputs - (labels.view_as(outputs) if real else F.one_hot(labels, outputs.shape[1]))

    def correct(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return 0 for real labels, which have no accuracy: a real number is never predicted exactly."""
        if labels.is_floating_point():
            return torch.zeros((), dtype=torch.int64, device=outputs.device)
        return (self.predicted(outputs) == labels).sum()


def _half_squares(errors: Tensor) -> Tensor:
    return 0.5 * errors.square().sum(1)


CLASSIFICATION = Classification()
LEAST_SQUARES = LeastSquares()
