"""The options with which an input is read, declared once and passed on as one object."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from pipeline.core.errors import UsageError
from pipeline.core.shardset.layout import MAX_CLASSES, MAX_IMAGE_BYTES
from pipeline.core.shardset.schema import OWN_COLUMNS
from pipeline.input.channels import check_channels
from pipeline.input.resize import Size, check_size


def _whole_numbers(flag: str, values: Sequence[int] | None, count: int) -> tuple[int, ...] | None:
    """Return the numbers of an option, or None if it is not set. Raises UsageError unless they are ``count`` integers."""
    if values is None:
        return None
    numbers = tuple(values) if isinstance(values, Iterable) else ()
    if len(numbers) != count or not all(isinstance(each, Integral) and not isinstance(each, bool) for each in numbers):
        expected = "a whole number" if count == 1 else f"{count} whole numbers"
        raise UsageError(f"{flag} must be {expected}, got {values[0] if count == 1 else values!r}")
    return tuple(map(int, numbers))


@dataclass(frozen=True)
class ReadOptions:
    """The options with which an input is read; the default reads it as its files describe it.

    Attributes:
        format: name of the format; None: recognised.
        shape: (channels, height, width), if the files do not contain it.
        num_classes: labels must be in 0..num_classes-1; None: the layout's, or as found.
        unlabelled: neither require nor read labels.
        channels: 1 or 3, to convert images to grey or RGB; None: as they are.
        columns: columns of the input that travel into the shards.
        resize: (height, width), to resize images (resize.py); None: as they are.
        image_column: name of the column, array or file extension of images; None: one of the usual names.
        label_column: name of the column, array or file extension of labels; None: one of the usual names.
        counts_broken: the survey counts broken records as rows, where the next ones can be read; set by runs that leave
            broken records out.
        expected_shape: (channels, height, width) of the images in other files, which is a file's own if none of its first
            images is valid; set by ``discover`` for such files if broken records are counted.
        evaluation: the evaluation rows are read, of files that hold training rows, too; set by ``discover``.
        root: the folder of the input, below which names of folders are classes; set by ``discover``.
    """

    format: str | None = None
    shape: tuple[int, int, int] | None = None
    num_classes: int | None = None
    unlabelled: bool = False
    channels: int | None = None
    columns: tuple[str, ...] = ()
    resize: Size | None = None
    image_column: str | None = None
    label_column: str | None = None
    counts_broken: bool = False
    expected_shape: tuple[int, int, int] | None = None
    evaluation: bool = False
    root: str = ""

    def __post_init__(self) -> None:
        # Programs may pass lists and numbers of numpy, which the manifest and the identity do not hold.
        object.__setattr__(self, "shape", _whole_numbers("--image-shape", self.shape, 3))
        object.__setattr__(self, "resize", _whole_numbers("--resize", self.resize, 2))
        if self.num_classes is not None:
            (num_classes,) = _whole_numbers("--num-classes", (self.num_classes,), 1) or ()
            object.__setattr__(self, "num_classes", num_classes)
            if not 1 <= num_classes <= MAX_CLASSES:
                raise UsageError(f"--num-classes must be in 1..{MAX_CLASSES}, got {num_classes}")
        if self.shape and not (min(self.shape) >= 1 and math.prod(self.shape) <= MAX_IMAGE_BYTES):
            raise UsageError(
                f"--image-shape {'x'.join(map(str, self.shape))}: numbers are at least 1, and give at most"
                f" {MAX_IMAGE_BYTES:,} bytes per image"
            )
        if self.unlabelled and self.num_classes is not None:
            raise UsageError("--unlabelled and --num-classes exclude each other")
        check_channels(self.channels)
        if own := [name for name in self.columns if name in OWN_COLUMNS]:
            raise UsageError(f"--keep-columns {own[0]}: shards have a column of this name already; leave it out")
        if len(set(self.columns)) < len(self.columns) or "" in self.columns:
            raise UsageError(f"--keep-columns {','.join(self.columns)}: name every column once")
        check_size(self.resize)

    def inner_path(self, path: str) -> str:
        """Return the part of a file's path below the input, from its slash on. Folders above it say nothing of its rows."""
        inner = path.removeprefix(self.root)
        return inner if inner.startswith("/") else path[path.rfind("/") :]

    def identity_values(self) -> dict[str, Any]:
        """Return the options that decide bits and are set, by their keys in the identity of a run.

        Unset ones are left out, so that identities of runs without them do not change."""
        values = {
            "channels": self.channels,
            "columns": self.columns or None,
            "resize": self.resize,
            "image_column": self.image_column,
            "label_column": self.label_column,
        }
        return {key: value for key, value in values.items() if value is not None}
