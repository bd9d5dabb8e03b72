"""The rows of a shard as a data set of torch."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from pipeline.core.errors import DataError, UsageError
from trainer.data.loading import load_eval, load_worker
from trainer.data.opening import open_shards
from trainer.data.rows import Rows

Transform = Callable[[torch.Tensor], Any]


class ShardDataset(Dataset[tuple[Any, Any]]):
    """The rows of one worker, or the evaluation rows, in memory.

    Attributes:
        rows: the rows; ``rows.ids`` are their ids.
        classes: name of each class, by its number; empty if the set names none.
        transform: applied to each image; None for none.
    """

    def __init__(self, rows: Rows, classes: list[str], transform: Transform | None) -> None:
        self.rows = rows
        self.classes = classes
        self.transform = transform
        self._images = torch.from_numpy(np.asarray(rows.images_NCHW))
        self._labels = torch.from_numpy(rows.labels)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        """Return a copy of an image, uint8 or float32 [C, H, W], transformed, and its label, int64 or the float32 target."""
        # A transform that works in place would otherwise change the row in every epoch.
        image = self._images[place].clone()
        return (self.transform(image) if self.transform else image), self._labels[place].clone()


def torch_dataset(
    shards: str, worker: int | None = None, *, targets: bool | None = None, transform: Transform | None = None
) -> ShardDataset:
    """Read the rows of a worker, copies included, and verify them against the manifest. Keeps them in memory.

    Args:
        shards: a set, or shards without a manifest, local, on HDFS or in an object store.
        worker: number of the worker, from 0 (default: the evaluation rows).
        targets: whether labels are real targets instead of classes (default: if the rows have no classes). Rows with
            neither have the label 0.
        transform: function of an image, such as one of torchvision.transforms.v2.
    Raises:
        UsageError: worker is no whole number, or the set has no such worker, or not the labels.
        DataError: the set is missing or damaged, or has no evaluation rows.
        OSError: a file cannot be read.
    """
    if worker is not None and (isinstance(worker, bool) or not isinstance(worker, Integral)):
        raise UsageError(f"worker must be a whole number, got {worker!r}")
    opened = open_shards(shards)
    if targets is None:
        targets = opened.has_targets and not opened.has_labels
    # A column that is not there would be read as zeros.
    if (targets and not opened.has_targets) or (not targets and opened.has_targets and not opened.has_labels):
        raise UsageError(f"{shards} has no {'targets' if targets else 'classes'}: give targets={not targets}")
    rows = load_eval(opened, targets=targets) if worker is None else load_worker(opened, worker, targets=targets)
    if rows is None:
        raise DataError(f"{shards} has no evaluation rows; give a worker, 0..{opened.num_workers - 1}")
    return ShardDataset(rows, list(opened.manifest.labels.class_names), transform)
