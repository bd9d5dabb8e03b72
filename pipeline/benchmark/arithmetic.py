"""Losses and gradients of the three models in numpy: what Spark's barrier tasks compute, and where the optimum lies.

Weights are flat and in MLlib's order: [d] for a regression; for the perceptron, layer by layer, the matrix [out, in]
column by column, then the bias. Shapes: N rows, d features."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeline.benchmark.cells import HIDDEN, Model

Floats = npt.NDArray[np.float64]


def widths(features: int) -> tuple[int, ...]:
    return (features, *HIDDEN, 2)


def num_weights(model: Model, features: int) -> int:
    return sum((a + 1) * b for a, b in pairwise(widths(features))) if model == "perceptron" else features


def layers(weights: Floats, features: int) -> list[tuple[Floats, Floats]]:
    """(matrix [out, in], bias [out]) of each layer, sharing memory with the weights."""
    found, at = [], 0
    for before, after in pairwise(widths(features)):
        matrix = weights[at : at + before * after].reshape(before, after).T
        at += before * after
        found.append((matrix, weights[at : at + after]))
        at += after
    return found


def loss(model: Model, weights: Floats, x: Floats, y: Floats) -> float:
    """Summed over rows, without regularisation: log loss, half the squared error, or cross entropy."""
    if model == "linear":
        return float(0.5 * np.square(x @ weights - y).sum())
    if model == "logistic":
        score = x @ weights
        return float(np.logaddexp(0, score).sum() - y @ score)
    scores = _forward(weights, x)[-1]
    return float(np.logaddexp.reduce(scores, axis=1).sum() - scores[np.arange(len(y)), y.astype(int)].sum())


def gradient(model: Model, weights: Floats, x: Floats, y: Floats) -> Floats:
    """Summed over rows, without regularisation."""
    if model == "linear":
        return np.asarray(x.T @ (x @ weights - y))
    if model == "logistic":
        return np.asarray(x.T @ (_sigmoid(x @ weights) - y))
    return _backward(weights, x, y)


def curvature(model: Model, weights: Floats, x: Floats) -> Floats:
    """The Hessian of a regression's loss [d, d], summed over rows."""
    if model == "linear":
        return np.asarray(x.T @ x)
    p = _sigmoid(x @ weights)
    return np.asarray((x * (p * (1 - p))[:, None]).T @ x)


def _sigmoid(values: Floats) -> Floats:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * values)))


def _forward(weights: Floats, x: Floats) -> list[Floats]:
    """The input, each hidden layer's sigmoids, and the scores [N, 2]."""
    outputs = [x]
    found = layers(weights, x.shape[1])
    for at, (matrix, bias) in enumerate(found):
        score = outputs[-1] @ matrix.T + bias
        outputs.append(_sigmoid(score) if at < len(found) - 1 else score)
    return outputs


def _backward(weights: Floats, x: Floats, y: Floats) -> Floats:
    outputs, found = _forward(weights, x), layers(weights, x.shape[1])
    shifted = np.exp(outputs[-1] - outputs[-1].max(axis=1, keepdims=True))
    delta = shifted / shifted.sum(axis=1, keepdims=True)
    delta[np.arange(len(y)), y.astype(int)] -= 1
    parts: list[Floats] = []
    for at in range(len(found) - 1, -1, -1):
        below = outputs[at]
        parts = [np.concatenate([(delta.T @ below).T.reshape(-1), delta.sum(axis=0)]), *parts]
        if at:
            delta = (delta @ found[at][0]) * below * (1 - below)
    return np.concatenate(parts)
