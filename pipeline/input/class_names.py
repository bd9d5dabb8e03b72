"""The numbers of classes that files name: sorted names over the whole input, unless the files number them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import MAX_CLASSES, Layout
from pipeline.input.formats.base import DataFile

MOST_CHARACTERS = 200  # characters of a class name


def number_classes(
    surveys: Sequence[tuple[DataFile, Layout]], training_names: tuple[str, ...]
) -> list[tuple[DataFile, Layout]]:
    """Return surveyed files whose layouts have the same classes, if the files name them; others unchanged.

    The classes are the names in any file, sorted. If all names are whole numbers from 0, these are the numbers of the
    classes. Labels from folders become numbers.

    Args:
        surveys: each file with its layout, which has the names in this file.
        training_names: the classes of the training files, whose numbers the evaluation files take; () to number them here.

    Raises:
        DataError: a class that the training files lack, too many classes, or a name that is no word.
    """
    if not any(layout.named_labels for _, layout in surveys):
        for file, layout in surveys:
            check_names(file, layout, training_names, "the input")
        return list(surveys)
    # A set of names per file, so that the driver holds classes and no rows.
    names = sorted({name for _, layout in surveys for name in layout.class_names})
    if len(names) > MAX_CLASSES:
        raise DataError(
            f"the labels are {len(names):,} different texts; there are at most {MAX_CLASSES:,} classes: use other labels, or"
            " --unlabelled"
        )
    wrong = next((name for name in names if not 0 < len(name) <= MOST_CHARACTERS), None)
    if wrong is not None:  # it may be ""
        raise DataError(
            f"a class is named {wrong[:80]!r}, of {len(wrong)} characters: names have 1 to {MOST_CHARACTERS}; rename it, or"
            " use other labels"
        )
    if training_names:
        unknown = sorted(set(names) - set(training_names))
        if unknown:
            raise DataError(
                f"the evaluation files have the class {unknown[0]!r}, which the input lacks; leave out its rows there, or"
                " add some to the input"
            )
        names = list(training_names)
    elif all(is_number(name) for name in names):
        # Folders 0 to 9 number their classes; sorted as texts, 10 would come before 2.
        numbers = {name: int(name) for name in names}
        return [_number_file(file, replace(layout, class_names=()), numbers) for file, layout in surveys]
    numbers = {name: number for number, name in enumerate(names)}
    return [
        _number_file(file, replace(layout, class_names=tuple(names), num_classes=len(names)), numbers)
        for file, layout in surveys
    ]


def label_advice(layout: Layout, expected: Layout) -> str:
    """Return the end of an error line about files of which only some name their classes; empty for any other files."""
    is_mixed = layout.named_labels != expected.named_labels
    return "; write all labels as whole numbers, or all as texts" * is_mixed


def with_names(survey: tuple[DataFile, Layout], names: tuple[str, ...]) -> tuple[DataFile, Layout]:
    """Return a surveyed file with the names of its classes, if the format numbers as many classes."""
    file, layout = survey
    return (file, replace(layout, class_names=names)) if names and layout.num_classes == len(names) else survey


def is_number(name: str) -> bool:
    """True if the name of a class is a whole number below MAX_CLASSES, without leading zeros."""
    return name.isdecimal() and name.isascii() and len(name) <= 5 and str(int(name)) == name and int(name) < MAX_CLASSES


def _number_file(file: DataFile, layout: Layout, numbers: dict[str, int]) -> tuple[DataFile, Layout]:
    label = file.label if file.class_name is None else numbers[file.class_name]
    return replace(file, label=label), layout


def check_names(file: DataFile, layout: Layout, names: tuple[str, ...], source: str) -> None:
    """Raise DataError if a file names other classes than another file, or in another order.

    names: the other file's classes, () if it names none; source: that file, or the input of training files."""
    if names and layout.class_names and layout.class_names != names:
        raise DataError(
            f"{file.path} names its classes {', '.join(layout.class_names[:3])}, ..., and {source}"
            f" {', '.join(names[:3])}, ...: their numbers differ; declare the same names in the same order"
        )
