"""The evaluation rows of an input: which pairs of training and evaluation rows can be used together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.core.errors import DataError, UsageError
from pipeline.input.class_names import label_advice
from pipeline.input.dataset import Dataset
from pipeline.input.image_files import conversion_advice


def check_evaluation(training: Dataset, evaluation: Dataset) -> None:
    """Raise DataError if evaluation rows have another layout than the training rows, UsageError if they share files.

    evaluation: discovered with the names of the training rows' classes, so that equal labels are equal classes."""
    # The classes may differ: evaluation rows need not contain every class.
    ignored: dict[str, Any] = {"num_classes": None, "class_names": (), "attributes": ()}
    compared = [replace(each.layout, **ignored) for each in (evaluation, training)]
    if compared[0] != compared[1]:
        raise DataError(
            f"{evaluation.uri} holds {compared[0].describe()}, the input {compared[1].describe()}; they must match"
            f"{conversion_advice(compared[0].shape, compared[1])}{label_advice(*compared)}"
        )
    # If one of them numbers its classes and the other names them, equal labels can be different classes.
    names = evaluation.layout.class_names
    if training.layout.named_labels and bool(training.layout.class_names) != bool(names):
        raise DataError(
            f"{evaluation.uri} has the class {(names or ('0',))[0]!r}, and the classes of the input are whole numbers;"
            " name the classes alike"
        )
    if {(file.path, file.split) for file in evaluation.files} & {(file.path, file.split) for file in training.files}:
        raise UsageError(f"--eval-input {evaluation.uri} and --input read the same files; name the evaluation files")
