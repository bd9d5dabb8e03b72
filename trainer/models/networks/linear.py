"""Models of flat features: linear and logistic regression, and a small perceptron."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

HIDDEN = (15, 15)


def linear(image_shape: tuple[int, ...], num_outputs: int, *, intercept: bool = True) -> nn.Module:
    """features [N, ...] -> [N, num_outputs]; starts at zero, as MLlib's regressions do."""
    layer = nn.Linear(math.prod(image_shape), num_outputs, bias=intercept)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(nn.Flatten(), layer)


def logistic(image_shape: tuple[int, ...], num_classes: int, *, intercept: bool = True) -> nn.Module:
    """Logits [N, num_classes], or the one logit [N, 1] of binary logistic regression when there are two classes.

    One logit is not just smaller: two would move apart twice as fast at the same rate."""
    return linear(image_shape, 1 if num_classes == 2 else num_classes, intercept=intercept)


def perceptron(image_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Logits [N, num_classes] after two hidden layers of 15 sigmoids; Glorot uniform (2010), zero bias."""
    widths = (math.prod(image_shape), *HIDDEN, num_classes)
    layers = [nn.Linear(before, after) for before, after in pairwise(widths)]
    for layer in layers:
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    hidden = [module for layer in layers[:-1] for module in (layer, nn.Sigmoid())]
    return nn.Sequential(nn.Flatten(), *hidden, layers[-1])
