"""A run of ``python -m trainer embed``: training, embedding and the table. Each step resumes after a killed run."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import dataclass, field

import torch

from pipeline.core.errors import UsageError
from pipeline.core.storage.store import configured_store
from pipeline.input.dataset import Dataset
from pipeline.input.files import check_apart
from trainer.embed.fit import Fitting
from trainer.embed.options import Embedding
from trainer.embed.rows import draw_rows, open_rows, read_rows, rows_to_fit
from trainer.embed.table import TableFile, spans_of
from trainer.models.devices import pick_device
from trainer.models.networks.autoencoder import code_length
from trainer.plan import usable_cores

LINE_EVERY_S = 10.0
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
    check_apart(store, store.resolve(embedding.output), store.resolve(embedding.input or str(embedding.shards)))
    dataset = open_rows(store, embedding)
    # The identity names the work folder, so that only files of the same configuration and input are reused.
    table = TableFile(store, store.resolve(embedding.output), identity_of(embedding, dataset))
    before = table.read_metadata()
    if before is not None and before.get("identity") == table.identity:
        table.clear()
        return EmbeddingResult(table.uri, False, dataset.rows, before["length"], before["explained"])
    if before is not None and not embedding.overwrite:
        raise UsageError(
            f"{table.uri} exists, but has another configuration or input: give --overwrite, or another --output"
        )
    torch.set_num_threads(embedding.threads or usable_cores())
    length = code_length(dataset.layout.shape)
    progress = _Progress(embedding.quiet)
    # Deterministic kernels: a resumed run must compute the same vectors.
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False):
        fitting = fit_autoencoder(embedding, dataset, table, device, progress)
        explained = fitting.explained_variance()
        progress.say(f"{length} numbers per row reconstruct {explained:.1%} of the variance")
        spans = spans_of(dataset.rows, dataset.record_bytes)
        progress.begin("embed", dataset.rows)
        kept_parts = table.stored_ranges()
        for number, (low, high) in enumerate(spans):
            if number not in kept_parts:
                table.write_range(number, fitting.encode(read_rows(dataset, low, high)))
            progress.advance(high, f"{high:,} of {dataset.rows:,} rows")
    explained = round(explained, 6)
    about = {"length": length, "rows": dataset.rows, "explained": explained, "asked": embedding.identity()}
    table.finish(spans, length, about)
    return EmbeddingResult(table.uri, True, dataset.rows, length, explained)


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
    embedding: Embedding, dataset: Dataset, table: TableFile, device: torch.device, progress: _Progress
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


@dataclass
class _Progress:
    """The progress of a run on stderr, one line every LINE_EVERY_S.

    Attributes:
        quiet: print nothing.
        phase: name of the present phase.
        total: steps or rows of the phase.
        first: steps or rows that were done before this start.
        start: when the phase began (monotonic seconds).
        last_line: when the last line was printed (monotonic seconds).
    """

    quiet: bool
    phase: str = ""
    total: int = 0
    first: int = 0
    start: float = 0.0
    last_line: float = field(default=0.0)

    def begin(self, phase: str, total: int, first: int = 0) -> None:
        self.phase = phase
        self.total = total
        self.first = first
        self.start = self.last_line = time.monotonic()

    def advance(self, position: int, text: str) -> None:
        """Print a line with the time that is left, if it is time for one or the phase has ended.

        position: steps or rows so far; text: the beginning of the line."""
        now = time.monotonic()
        if now - self.last_line < LINE_EVERY_S and position < self.total:
            return
        self.last_line = now
        pace = (position - self.first) / max(1e-9, now - self.start)
        ending = (
            f", {(self.total - position) / pace:,.0f} s left"
            if position < self.total
            else f" in {now - self.start:,.1f} s"
        )
        self.say(f"{text}{ending}")

    def say(self, text: str) -> None:
        if not self.quiet:
            print(f"[{self.phase or 'learn'}] {text}", file=sys.stderr, flush=True)
