"""A run of ``python -m trainer embed``: training, embedding and the table. Each step resumes after a killed run."""

from __future__ import annotations

import hashlib
import json
import time
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
from trainer.embed.fit import Fitting
from trainer.embed.options import Embedding
from trainer.embed.rows import draw_rows, rows_to_fit
from trainer.models.devices import pick_device
from trainer.models.networks.autoencoder import code_length
from trainer.tables.progress import TableProgress
from trainer.tables.resumable import TableFile, spans_of
from trainer.tables.rows import open_rows, read_rows, refuse_change

METADATA_KEY = b"sharding.embedding"
RECIPE = 1  # version of the network, the loss and all else that no flag sets; changes if vectors change


@dataclass(frozen=True)
class EmbeddingResult:
    """The result of a run.

    Attributes:
        uri: of the table.
        fresh: whether this run made the table, rather than an earlier one.
        rows: number of vectors.
        length: numbers per vector.
        explained: share of the images' variance that the auto-encoder reconstructs.
    """

    uri: str
    fresh: bool
    rows: int
    length: int
    explained: float


def embed(embedding: Embedding) -> EmbeddingResult:
    """Make the table, unless an earlier run of the same configuration has made it.

    Keeps the training rows (at most 1 GiB), 64 MiB of images and their vectors in memory. The table appears atomically,
    and after an interruption the same call resumes. Raises UsageError, DataError and JobError."""
    device = pick_device(embedding.device, 0)
    store = configured_store()
    dataset = open_rows(store, embedding)
    # Real-valued features need no embedding: the jobs use them directly.
    if dataset.layout.dtype != "uint8":
        raise UsageError(
            f"{dataset.uri} holds {dataset.layout.describe()}: the jobs look at such features as they are, without a table"
        )
    # The identity names the work folder, so that only files of the same configuration and input are reused.
    identity = identity_of(embedding, dataset)
    table = TableFile(store, store.resolve(embedding.output), identity, METADATA_KEY, embedding.overwrite)
    before = table.read_finished()
    if before is not None:
        return EmbeddingResult(table.uri, False, dataset.rows, before["length"], before["explained"])
    torch.set_num_threads(embedding.threads or usable_cores())
    length = code_length(dataset.layout.shape)
    progress = TableProgress(embedding.quiet, "learn")
    # Deterministic kernels: a resumed run must compute the same vectors.
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False):
        fitting = fit_autoencoder(embedding, dataset, table, device, progress)
        explained = round(fitting.explained_variance(), 6)
        progress.say(f"{length} numbers per row reconstruct {explained:.1%} of the variance")
        spans = spans_of(dataset.rows, dataset.record_bytes)
        progress.phase = "embed"
        table.write_parts(spans, partial(_encode, fitting, dataset), progress)
    about = {"length": length, "rows": dataset.rows, "explained": explained, "asked": embedding.identity()}
    refuse_change(store, embedding, dataset, table)
    table.finish(len(spans), table_schema(length), about)
    return EmbeddingResult(table.uri, True, dataset.rows, length, explained)


def table_schema(length: int) -> pa.Schema:
    """Return the columns of the table. length: numbers per vector."""
    item = pa.field("element", pa.float32(), nullable=False)
    return pa.schema(
        [pa.field("id", pa.int64(), nullable=False), pa.field("embedding", pa.list_(item, length), nullable=False)]
    )


def _encode(fitting: Fitting, dataset: Dataset, low: int, high: int) -> pa.RecordBatch:
    """Return the rows low..high-1 of the table."""
    vectors = fitting.encode(read_rows(dataset, low, high).view(np.uint8))
    schema = table_schema(vectors.shape[1])
    column: Any = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=schema.field("embedding").type)
    return pa.RecordBatch.from_arrays([pa.array(np.arange(low, high)), column], schema=schema)


def identity_of(embedding: Embedding, dataset: Dataset) -> str:
    """Return a digest of the configuration and of the names, sizes and times of the input's files."""
    configuration = {
        **embedding.identity(),
        "recipe": RECIPE,
        "input": dataset.listing(),
        "shape": dataset.layout.shape,
    }
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()[:12]


def fit_autoencoder(
    embedding: Embedding, dataset: Dataset, table: TableFile, device: torch.device, progress: TableProgress
) -> Fitting:
    """Return the trained auto-encoder, which resumes from a checkpoint in the table's work folder if there is one."""
    num_rows = rows_to_fit(dataset, embedding.fit_rows)
    images = draw_rows(dataset, num_rows, embedding.seed)
    fitting = Fitting(embedding, images, device)
    data = table.checkpoint()
    if data is not None:
        fitting.restore(data)
        progress.say(f"resumes after step {fitting.step} of {fitting.steps}")
    size = images.nbytes / 1e6
    progress.say(
        f"learns from {len(images):,} of {dataset.rows:,} rows ({size:,.0f} MB) in {fitting.steps:,} steps on {device}"
    )
    progress.begin("learn", fitting.steps, fitting.step)
    last = time.monotonic()

    def on_step(step: int, loss: float) -> None:
        nonlocal last
        progress.advance(step, f"step {step:,} of {fitting.steps:,}, loss {loss:.5f}")
        # Always after the last step, so that a run that is killed while it embeds need not train again.
        if time.monotonic() - last > embedding.checkpoint_every_s or step == fitting.steps:
            table.write_checkpoint(fitting.checkpoint())
            last = time.monotonic()

    fitting.run(on_step)
    return fitting
