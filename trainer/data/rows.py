"""Rows of shards in memory, or in memory-mapped files.

Shapes: N rows, C channels, H and W pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from trainer.data.mapped_images import Images, MappedImages, join_images


@dataclass(frozen=True)
class Rows:
    """Rows that are loaded. Copies made by sharding are ordinary rows, except that their hash is 0.

    Attributes:
        images_NCHW: uint8, or real-valued features in float32; perhaps in memory-mapped files.
        labels: int64 [N], or targets in float32.
        ids: int64 [N].
        hashes: uint64 [N], the hashes that the manifest's fingerprint sums up; empty if not computed.
        neighbourhoods: int32 [N], groups of similar rows; empty if the set has none, or they are not read.
    """

    images_NCHW: Images
    labels: npt.NDArray[np.int64 | np.float32]
    ids: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    neighbourhoods: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, places: Ints) -> Rows:
        """Return a copy of the rows at some places, without hashes."""
        return Rows(self.images_NCHW[places], self.labels[places], self.ids[places])

    def view(self, places: Ints | slice) -> Rows:
        """Return the rows at some places with all their columns. Images in memory-mapped files stay there."""
        images = self.images_NCHW
        columns = (getattr(self, name) for name in COLUMNS)
        return Rows(
            images.view(places) if isinstance(images, MappedImages) else images[places],
            *(column[places] if len(column) else column for column in columns),
        )


COLUMNS = tuple(item.name for item in fields(Rows) if item.name != "images_NCHW")


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Return the rows of some parts, one after the other. Needs twice the memory of all while it copies."""
    columns = (np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS)
    return Rows(join_images([part.images_NCHW for part in parts]), *columns)
