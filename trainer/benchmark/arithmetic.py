"""Losses and gradients of the three models in numpy.

They are used in Spark's barrier tasks, and to find the optimum. Weights are flat, in MLlib's order: [d] for a
regression; for the perceptron layer by layer, the matrix [out, in] in column-major order, then the bias. Shapes: N
rows, d features."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from pipeline.core.arrays import Floats
from trainer.benchmark.configurations import HIDDEN_LAYERS, Model


def layer_widths(features: int) -> tuple[int, ...]:
    """Return the widths of the perceptron's layers, from its input to its two classes."""
    return (features, *HIDDEN_LAYERS, 2)


def count_weights(model: Model, features: int) -> int:
    """Return the number of a model's weights."""
    if model != "perceptron":
        return features
    return sum((before + 1) * after for before, after in pairwise(layer_widths(features)))


def split_layers(weights: Floats, features: int) -> list[tuple[Floats, Floats]]:
    """Return the perceptron's layers as (matrix [out, in], bias [out]), views of the weights."""
    layers = []
    start = 0
    for before, after in pairwise(layer_widths(features)):
        matrix = weights[start : start + before * after].reshape(before, after).T
        start += before * after
        layers.append((matrix, weights[start : start + after]))
        start += after
    return layers


def loss(model: Model, weights: Floats, x: Floats, y: Floats) -> float:
    """Return the loss summed over rows, without regularisation: log loss, half the squared error, or cross entropy.

    Args:
        model: decides the loss.
        weights: flat.
        x: features [N, d].
        y: targets or classes [N].
    """
    if model == "linear":
        return float(0.5 * np.square(x @ weights - y).sum())
    if model == "logistic":
        score = x @ weights
        return float(np.logaddexp(0, score).sum() - y @ score)
    scores = _forward(weights, x)[-1]
    return float(np.logaddexp.reduce(scores, axis=1).sum() - scores[np.arange(len(y)), y.astype(int)].sum())


def gradient(model: Model, weights: Floats, x: Floats, y: Floats) -> Floats:
    """Return the gradient of the loss, with the shape of the weights.

    Args:
        model: decides the loss.
        weights: flat.
        x: features [N, d].
        y: targets or classes [N].
    """
    if model == "linear":
        return np.asarray(x.T @ (x @ weights - y))
    if model == "logistic":
        return np.asarray(x.T @ (_sigmoid(x @ weights) - y))
    return _backward(weights, x, y)


def hessian(model: Model, weights: Floats, x: Floats) -> Floats:
    """Return the Hessian of a regression's loss at ``weights`` [d], over the rows x [N, d]: [d, d]."""
    if model == "linear":
        return np.asarray(x.T @ x)
    p = _sigmoid(x @ weights)
    return np.asarray((x * (p * (1 - p))[:, None]).T @ x)


def _sigmoid(values: Floats) -> Floats:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * values)))


def _forward(weights: Floats, x: Floats) -> list[Floats]:
    """Return the outputs of the layers: the input, the sigmoids of each hidden layer, and the scores [N, 2]."""
    outputs = [x]
    layers = split_layers(weights, x.shape[1])
    for index, (matrix, bias) in enumerate(layers):
        score = outputs[-1] @ matrix.T + bias
        outputs.append(_sigmoid(score) if index < len(layers) - 1 else score)
    return outputs


def _backward(weights: Floats, x: Floats, y: Floats) -> Floats:
    """Return the perceptron's gradient, by backpropagation."""
    outputs = _forward(weights, x)
    layers = split_layers(weights, x.shape[1])
    # Subtracting the largest score avoids overflow and leaves the softmax unchanged.
    shifted = np.exp(outputs[-1] - outputs[-1].max(axis=1, keepdims=True))
    delta = shifted / shifted.sum(axis=1, keepdims=True)
    delta[np.arange(len(y)), y.astype(int)] -= 1
    parts: list[Floats] = []
    for index in range(len(layers) - 1, -1, -1):
        below = outputs[index]
        parts = [np.concatenate([(delta.T @ below).T.reshape(-1), delta.sum(axis=0)]), *parts]
        if index:
            delta = (delta @ layers[index][0]) * below * (1 - below)
    return np.concatenate(parts)
