"""Events of the evaluator, one per checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trainer.runlog.kinds.base import LogEvent


@dataclass(frozen=True, kw_only=True)
class EvaluationEvent(LogEvent):
    """The evaluation of a checkpoint.

    Attributes:
        version, generation: the checkpoint. Older logs lack the generation.
        epoch, seconds: global epochs and training time of the checkpoint.
        loss, accuracy: on the evaluation rows.
        l2: the L2 term in the losses; 0 in older logs, None if it is not finite.
        rows: number of these rows.
        train_loss, train_accuracy: on a sample of training rows.
        learned: whether train_loss is below the loss of guessing; None if that is unknown.
        final: whether the checkpoint is the last one of the run.
        class_rows, class_correct: [K], evaluation rows and correct predictions by class; only of a final checkpoint.
        neighbourhood_rows, neighbourhood_correct: the same by neighbourhood; None if the set keeps no model of them.
        class_names: [K], of the classes; None if the shard set names none, or for another checkpoint.
        confusion: [K][K], evaluation rows by class and predicted class; also only for up to 100 classes.
    """

    kind: str = field(default="eval", init=False)
    version: int = field()
    epoch: float | None = None
    seconds: float | None = None
    loss: float | None = None
    l2: float | None = 0.0
    accuracy: float | None = None
    rows: int | None = None
    train_loss: float | None = None
    train_accuracy: float | None = None
    learned: bool | None = None
    final: bool | None = None
    class_rows: list[int] | None = None
    class_correct: list[int] | None = None
    neighbourhood_rows: list[int] | None = None
    neighbourhood_correct: list[int] | None = None
    class_names: list[str] | None = None
    confusion: list[list[int]] | None = None

    def has_complete_counts(self) -> bool:
        """Return whether there are as many correct predictions as groups, and a row of the confusion has all classes."""
        groups = [(self.class_rows, self.class_correct), (self.neighbourhood_rows, self.neighbourhood_correct)]
        pairs = [(rows, correct) for rows, correct in groups if rows is not None and correct is not None]
        confusion = self.confusion or []
        return all(len(rows) == len(correct) for rows, correct in pairs) and all(
            len(row) == len(confusion) for row in confusion
        )

    def loss_alone(self) -> float:
        """Return the loss on the evaluation rows without the L2 term; NaN if it is no number."""
        return math.nan if self.loss is None or self.l2 is None else self.loss - self.l2


@dataclass(frozen=True, kw_only=True)
class HoldoutEvent(LogEvent):
    """The loss of a checkpoint on training rows that are held out, by which a rule decides about a switch.

    Attributes:
        version, generation: the checkpoint.
        epoch, seconds: number of the epoch that it ends; its training time.
        loss: on the held-out rows, without the L2 term.
        rows: number of these rows.
    """

    kind: str = field(default="holdout", init=False)
    version: int = field()
    epoch: float
    seconds: float | None = None
    loss: float | None
    rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class GivenUpEvent(LogEvent):
    """The checkpoint of a version was deleted for space before it was evaluated."""

    kind: str = field(default="given_up", init=False)
