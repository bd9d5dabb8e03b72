"""Rows of real-valued features in the layout that the jobs shard, for regression as well as classification.

A row of d features is an image of shape (d, 1, 1) in float32. A number to predict is in the column ``target``, next to
the class in ``label``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.core.shardset.layout import Layout
from pipeline.core.shardset.schema import record_schema
from pipeline.input.dataset import Block
from pipeline.input.formats import Columns
from pipeline.input.records import record_batch

Floats = npt.NDArray[np.float32]


def feature_schema(features: int, *, targets: bool) -> pa.Schema:
    """Return the schema label[, target], image with the given number of float32 values."""
    layout = Layout((features, 1, 1), dtype="float32", targets=targets)
    schema = record_schema(layout, neighbourhood=False, copy=False)
    return schema.remove(0).with_metadata(None)


def feature_batch(features: Floats, labels: npt.NDArray[np.int32], targets: Floats | None = None) -> pa.RecordBatch:
    """Return rows of features as an Arrow batch, which written as Parquet is an input of the jobs.

    Args:
        features: [N, d].
        labels: [N], from 0 on.
        targets: [N], or None.
    """
    images = np.ascontiguousarray(features, np.float32).view(np.uint8).reshape(len(features), -1)
    block = Block(np.arange(len(labels)), Columns(labels, images, targets=targets))
    return record_batch(feature_schema(features.shape[1], targets=targets is not None), block)
