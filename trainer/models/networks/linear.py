"""Networks for flat features: linear and logistic regression, and a small perceptron."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

HIDDEN = (15, 15)


def linear(image_shape: tuple[int, ...], num_outputs: int, *, intercept: bool = True) -> nn.Module:
    """Return a linear layer, features [N, ...] -> [N, num_outputs], that starts at zero as MLlib's regressions do."""
    layer = nn.Linear(math.prod(image_shape), num_outputs, bias=intercept)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(nn.Flatten(), layer)


def logistic(image_shape: tuple[int, ...], num_classes: int, *, intercept: bool = True) -> nn.Module:
    """Return a network with logits [N, num_classes], or the single logit [N, 1] of binary logistic regression.

    Two classes get one logit, because two logits would move apart twice as fast at the same learning rate."""
    return linear(image_shape, 1 if num_classes == 2 else num_classes, intercept=intercept)


def perceptron(image_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a network with logits [N, num_classes] and two hidden layers of 15 sigmoids.

    Initialised by Glorot uniform (2010) and zero bias."""
    widths = (math.prod(image_shape), *HIDDEN, num_classes)
    layers = [nn.Linear(before, after) for before, after in pairwise(widths)]
    for layer in layers:
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    hidden_layers = [module for layer in layers[:-1] for module in (layer, nn.Sigmoid())]
    return nn.Sequential(nn.Flatten(), *hidden_layers, layers[-1])
