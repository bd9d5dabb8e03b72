"""Rows of real-valued features in the layout that the jobs shard: what images are to a network, they are to a regression.

A row of d features is an image of shape (d, 1, 1) in float32; a number to be predicted stands in ``target``, beside the
class in ``label``."""

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
    """label[, target], image of so many float32 numbers."""
    layout = Layout((features, 1, 1), dtype="float32", targets=targets)
    schema = record_schema(layout, neighbourhood=False, copy=False)
    return schema.remove(0).with_metadata(None)


def feature_batch(features: Floats, labels: npt.NDArray[np.int32], targets: Floats | None = None) -> pa.RecordBatch:
    """features [N, d], labels [N] from 0 on, targets [N] as Arrow rows; written as Parquet they are an input of a job."""
    images = np.ascontiguousarray(features, np.float32).view(np.uint8).reshape(len(features), -1)
    block = Block(np.arange(len(labels)), Columns(labels, images, targets=targets))
    return record_batch(feature_schema(features.shape[1], targets=targets is not None), block)
