"""The options with which an input is read, declared once and passed on as one object."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.core.errors import UsageError
from pipeline.core.shardset.schema import OWN_COLUMNS
from pipeline.input.channels import check_channels

MAX_CLASSES = 65_536  # histograms are dense


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
    """

    format: str | None = None
    shape: tuple[int, int, int] | None = None
    num_classes: int | None = None
    unlabelled: bool = False
    channels: int | None = None
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_classes is not None and not 1 <= self.num_classes <= MAX_CLASSES:
            raise UsageError(f"--num-classes must be in 1..{MAX_CLASSES}, got {self.num_classes}")
        if self.unlabelled and self.num_classes is not None:
            raise UsageError("--unlabelled and --num-classes exclude each other")
        check_channels(self.channels)
        if own := [name for name in self.columns if name in OWN_COLUMNS]:
            raise UsageError(f"--keep-columns {own[0]}: shards have a column of this name already; leave it out")
        if len(set(self.columns)) < len(self.columns) or "" in self.columns:
            raise UsageError(f"--keep-columns {','.join(self.columns)}: name every column once")
