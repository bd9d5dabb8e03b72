"""The measurement of a model on rows: loss, accuracy, and counts by class.

Shapes: B images of a batch, K classes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainer.data.batches import Batch
from trainer.evaluation.recalibration import one_thread
from trainer.models.tasks import Task

MOST_CONFUSED = 100  # classes: the event of more has no counts by predicted class


class ClassCounts:
    """Evaluation rows by class.

    Attributes:
        rows, correct: int64 [K], all rows and those whose class is predicted.
        confusion: int64 [K, K], rows by class and predicted class; None of more than MOST_CONFUSED classes.
    """

    def __init__(self, num_classes: int) -> None:
        self.rows = np.zeros(num_classes, np.int64)
        self.correct = np.zeros(num_classes, np.int64)
        is_small = num_classes <= MOST_CONFUSED
        self.confusion = np.zeros((num_classes, num_classes), np.int64) if is_small else None

    def add(self, labels: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64]) -> None:
        """Count a batch. labels, predicted: classes, int64 [B]."""
        self.rows += np.bincount(labels, minlength=len(self.rows))
        self.correct += np.bincount(labels[labels == predicted], minlength=len(self.rows))
        if self.confusion is not None:
            np.add.at(self.confusion, (labels, predicted), 1)

    def to_json(self) -> dict[str, Any]:
        """Return the keys of an ``eval`` event."""
        counts = {"class_rows": self.rows.tolist(), "class_correct": self.correct.tolist()}
        return counts if self.confusion is None else counts | {"confusion": self.confusion.tolist()}


class EvaluationResult(NamedTuple):
    """The result of an evaluation.

    Attributes:
        loss: mean loss without the L2 term.
        accuracy: share of correct predictions, None for real targets.
        noise: standard error of the loss.
        classes: rows by class; None if they were not counted.
        is_correct: whether the class of each row is predicted, bool [N]; None if rows were not counted by class.
    """

    loss: float
    accuracy: float | None
    noise: float
    classes: ClassCounts | None = None
    is_correct: npt.NDArray[np.bool_] | None = None


def evaluate(
    model: nn.Module, task: Task, batches: Iterator[Batch], num_classes: int | None = None
) -> EvaluationResult:
    """Evaluate a model on all rows in eval mode, without changing its parameters or statistics; see ``measure``."""
    model.eval()
    return measure(model, task, batches, num_classes)


@torch.no_grad()
@one_thread()
def measure(model: nn.Module, task: Task, batches: Iterator[Batch], num_classes: int | None = None) -> EvaluationResult:
    """Evaluate a model on all rows in its present mode.

    On the CPU the result is bit-identical for any number of threads.

    Args:
        model: the model.
        task: the loss and the rule for correct predictions.
        batches: all rows, on the model's device.
        num_classes: count the rows by class and predicted class, of so many classes (default: do not).
    Raises:
        ValueError: there are no rows.
    """
    rows = right = 0
    loss = squares = 0.0
    are_classes = True
    classes = None if num_classes is None else ClassCounts(num_classes)
    hits = []  # whether the class of each row is predicted, by batch
    for images, labels in batches:
        outputs = model(images)
        rows += len(labels)
        # Weighted by rows, because the last batch may be smaller than the others.
        loss += float(task.loss(outputs, labels)) * len(labels)
        squares += float(task.losses(outputs, labels).double().square().sum())
        right += int(task.correct(outputs, labels))
        if classes:
            batch_labels = labels.cpu().numpy()
            predicted = task.predicted(outputs).cpu().numpy()
            classes.add(batch_labels, predicted)
            hits.append(batch_labels == predicted)
        are_classes = not labels.is_floating_point()
    if not rows:
        raise ValueError("no rows to evaluate")
    # Rounding can make the variance of nearly equal losses negative, hence max().
    mean = loss / rows
    accuracy = right / rows if are_classes else None
    noise = math.sqrt(max(0.0, squares / rows - mean * mean) / rows)
    return EvaluationResult(mean, accuracy, noise, classes, np.concatenate(hits) if hits else None)


@torch.no_grad()
@one_thread()
def penalty(model: nn.Module, weight_decay: float) -> float:
    """Return the L2 term of the loss that workers report: decay / 2 times the sum of squares of all matrices."""
    squares = [p.square().sum() for p in model.parameters() if p.requires_grad and p.ndim > 1]
    return 0.5 * weight_decay * float(sum(squares))
