"""A table of a model's predictions for any images that the sharding jobs read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pipeline.core.errors import UsageError
from pipeline.core.machine import usable_cores
from pipeline.core.storage.store import configured_store
from pipeline.input.dataset import Dataset
from trainer.inference.classifier import Classifier, load
from trainer.inference.options import PredictOptions
from trainer.models.devices import compute_reproducibly, pick_device
from trainer.tables.progress import TableProgress
from trainer.tables.resumable import TableFile, spans_of
from trainer.tables.rows import open_rows, read_rows, refuse_change

METADATA_KEY = b"sharding.predictions"
FORMAT = 1  # of the table; changes if its columns change


@dataclass(frozen=True)
class PredictionResult:
    """The result of a command.

    Attributes:
        uri: of the table.
        fresh: whether this command made the table, rather than an earlier one.
        rows: number of predictions.
    """

    uri: str
    fresh: bool
    rows: int


def predict(prediction: PredictOptions) -> PredictionResult:
    """Make the table (id, label, probabilities), unless an earlier command with the same model and input has made it.

    If the shard set names its classes, a column ``class`` has the name of the label. A model without logits has a column
    ``outputs`` instead of ``probabilities``; a model of real targets has no ``label``. Keeps 64 MiB of images in memory.
    The table appears atomically, and after an interruption the same call resumes. Raises UsageError, DataError and
    JobError."""
    device = pick_device(prediction.device, 0)
    store = configured_store()
    classifier = load(prediction.run, best=prediction.best)
    dataset = open_rows(store, prediction)
    shape = classifier.metadata.chw
    dtype = classifier.metadata.training_dtype
    if (dataset.layout.shape, dataset.layout.dtype) != (shape, dtype):
        expected = f"{'x'.join(map(str, shape))} in {dtype}"
        raise UsageError(f"{dataset.uri} holds {dataset.layout.describe()}; the model takes images of {expected}")
    configuration = {
        **prediction.identity(),
        "format": FORMAT,
        "model": classifier.digest,
        "input": dataset.listing(),
    }
    identity = hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()[:12]
    table = TableFile(store, store.resolve(prediction.output), identity, METADATA_KEY, prediction.overwrite)
    if table.read_finished() is not None:
        return PredictionResult(table.uri, False, dataset.rows)
    torch.set_num_threads(prediction.threads or usable_cores())
    compute_reproducibly(device)  # so that a resumed table is one that was made in one go
    classifier.to(device)
    spans = spans_of(dataset.rows, dataset.record_bytes)
    compute = partial(_predict_range, classifier, device, dataset, prediction.batch_size)
    table.write_parts(spans, compute, TableProgress(prediction.quiet, "predict"))
    about = {"model": classifier.digest, "rows": dataset.rows, "classes": classifier.metadata.classes}
    refuse_change(store, prediction, dataset, table)
    table.finish(len(spans), _schema(classifier), about)
    return PredictionResult(table.uri, True, dataset.rows)


def _schema(classifier: Classifier) -> pa.Schema:
    """Return the columns of the table."""
    fields = [pa.field("id", pa.int64(), nullable=False)]
    classes = classifier.metadata.classes
    if classes is not None:
        fields.append(pa.field("label", pa.int32(), nullable=False))
    if classifier.metadata.class_names:
        fields.append(pa.field("class", pa.string()))
    probe = classifier.task.probabilities(torch.zeros(1, classes or 1))
    values = pa.list_(pa.field("element", pa.float32(), nullable=False), classes or 1)
    fields.append(pa.field("outputs" if probe is None else "probabilities", values, nullable=False))
    return pa.schema(fields)


@torch.no_grad()
def _predict_range(
    classifier: Classifier, device: torch.device, dataset: Dataset, batch_size: int, low: int, high: int
) -> pa.RecordBatch:
    """Return the rows low..high-1 of the table. batch_size: images per forward pass."""
    images = torch.from_numpy(read_rows(dataset, low, high))
    # Equal batches for equal ranges, because another batch size may change the rounding.
    outputs = torch.cat([classifier(part.to(device)).cpu() for part in torch.split(images, batch_size)])
    schema = _schema(classifier)
    columns: list[Any] = [pa.array(np.arange(low, high))]
    if classifier.metadata.classes is not None:
        labels = classifier.task.predicted(outputs).numpy()
        columns.append(pa.array(labels.astype(np.int32)))
        if names := classifier.metadata.class_names:
            columns.append(pa.array([names[label] if label < len(names) else None for label in labels]))
    probabilities = classifier.task.probabilities(outputs)
    values = outputs if probabilities is None else probabilities
    columns.append(pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1).numpy()), type=schema.types[-1]))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
