"""The gradient of a regression, written out: autograd would take most of the time of so small a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.config import Config
from trainer.models.build import NetworkAndTask
from trainer.models.linear import LinearSpec
from trainer.models.tasks import Task


class RegressionGradient:
    """Computes the gradient of a network of one linear layer, with the bits of autograd.

    Args:
        layer: its parameters have gradients, to which the result is added.
        task: the meaning of its outputs.
    """

    def __init__(self, layer: nn.Linear, task: Task) -> None:
        self.layer = layer
        self.task = task

    @torch.no_grad()
    def add(self, images: Tensor, labels: Tensor, *, by_example: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add the gradient of the mean loss of a mini-batch; return that loss, 0-d, the outputs [N, K] and the losses [N].

        Two products of matrices: 4 N K D operations for D features.

        Args:
            images: float32 [N, ...], at least one.
            labels: int64 [N], or targets in float32.
            by_example: whether the losses of the examples are needed; otherwise they may be None.
        """
        features = images.flatten(1)
        outputs = self.layer(features)
        mean, derivative, losses = self.task.loss_parts(outputs, labels, by_example=by_example)
        gradients = [derivative.t() @ features, derivative.sum(0)]  # of the weights and the intercept, if there is one
        for parameter, gradient in zip(self.layer.parameters(), gradients, strict=False):
            assert parameter.grad is not None
            parameter.grad.add_(gradient)
        return mean, outputs, losses


def regression_gradient(config: Config, network: NetworkAndTask, device: torch.device) -> RegressionGradient | None:
    """Return the gradient of a run's network; None if autograd has to compute it."""
    if not isinstance(config.model, LinearSpec) or device.type != "cpu" or config.run.precision != "fp32":
        return None
    (layer,) = (module for module in network.model.modules() if isinstance(module, nn.Linear))
    return RegressionGradient(layer, network.task)
