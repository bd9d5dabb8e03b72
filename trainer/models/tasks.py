"""What a network's outputs mean: its loss, and which predictions are correct."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Task(Protocol):
    """What outputs [N, K] and labels [N] mean. loss: mean over examples; correct: number of correct predictions, int64,
    0-d."""

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor: ...

    def correct(self, outputs: Tensor, labels: Tensor) -> Tensor: ...


class Classification:
    """Cross entropy of logits: one a class, or a single one for the second of two classes."""

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if outputs.shape[1] == 1:
            return F.binary_cross_entropy_with_logits(outputs[:, 0], labels.to(outputs.dtype))
        return F.cross_entropy(outputs, labels)

    def correct(self, outputs: Tensor, labels: Tensor) -> Tensor:
        predicted = outputs[:, 0] > 0 if outputs.shape[1] == 1 else outputs.argmax(1)
        return (predicted == labels).sum()


class LeastSquares:
    """Half the squared error, summed over outputs. Class labels (integers) are fitted one-hot, real ones as they are."""

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        real = labels.is_floating_point()
        targets = labels.view_as(outputs) if real else F.one_hot(labels, outputs.shape[1])
        return 0.5 * (outputs - targets).square().sum(1).mean()

    def correct(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """0 for real labels: a real number is never predicted exactly."""
        if labels.is_floating_point():
            return torch.zeros((), dtype=torch.int64, device=outputs.device)
        return (outputs.argmax(1) == labels).sum()


CLASSIFICATION, LEAST_SQUARES = Classification(), LeastSquares()
