"""The evaluator process: measures every finished epoch beside the training, from checkpoints alone.

It talks to nobody, so it may be killed and started again at any time: what it has in work it does again, what is in
metrics.jsonl it does not. Shapes: B images of a batch, C channels, H and W pixels, P parameters, Q statistics."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.errors import DataError
from trainer import checkpoint, models
from trainer.augment import normalise
from trainer.batches import Batch
from trainer.checkpoint import State, write_durably
from trainer.config import Config
from trainer.result import best, evaluations, read_events
from trainer.runlog import METRICS, log_event
from trainer.shards import Rows, Shards, load_eval, load_worker, open_shards
from trainer.slice import slice_bounds
from trainer.vector import FlatModel

BATCH = 500  # images at a time; the result depends on it only by rounding
TRAIN_ROWS = 2000  # training rows that are evaluated too, and that recalibrate
TRAIN_SAMPLE = 3  # what a seed sequence [seed, purpose, worker] is for
POLL_S = 0.5
BEST, FINAL = "best.safetensors", "model.safetensors"
NO_ROWS = "the shard set has no evaluation rows: nothing is evaluated (--eval-input of its job adds them)"


def main(config: Config, output: Path, *, stop: threading.Event | None = None) -> None:
    """Evaluate what is in OUTPUT/checkpoints and what is added, in order of version, until the run's final one, or
    until ``stop`` is set and all that is there is done.

    Raises DataError or OSError where the shards, and DataError where the final checkpoint cannot be read; what cannot
    be written is tried again."""
    stop = stop or threading.Event()
    evaluator = Evaluator(config, output)
    while True:
        stopping = stop.is_set()  # asked before the folder is read: what was written before the stop is evaluated
        for state in checkpoint.unevaluated(evaluator.root):
            try:
                evaluator.handle(state)
            except OSError as error:  # a full disk: its room may come back, as it does for checkpoints
                print(f"version {state.version} will be evaluated again: {error}", flush=True)
                break
        if stopping or is_over(evaluator.root):
            return
        stop.wait(POLL_S)


def is_over(root: Path) -> bool:
    """Whether the newest checkpoint is the evaluated end of the run."""
    version = checkpoint.newest(root)
    if version is None or not checkpoint.is_evaluated(root, version):
        return False
    return checkpoint.read_state(root, version).final


class Evaluator:
    """A model, the rows that it is measured on, and the run's folder."""

    def __init__(self, config: Config, output: Path) -> None:
        self.config, self.output, self.root = config, output, output / "checkpoints"
        shards = open_shards(config.shards)
        built = models.build_for(config, shards)
        self.flat, self.task, self.mean = FlatModel(built.model), built.task, shards.mean
        self.rows = load_eval(shards, targets=built.targets)
        self.train_rows = sample_rows(shards, TRAIN_ROWS, config.seed, targets=built.targets)
        self.device = torch.device(_device(config.device))
        if self.rows is None:
            self._warn(NO_ROWS)

    def handle(self, state: State) -> None:
        """Evaluate one checkpoint, write its event and its files, then mark it; every step may be the second time."""
        try:
            values = self._load(state.version)
        except DataError as error:
            if state.final:
                raise
            self._warn(f"not evaluated: {error}")
        else:
            self._measure(state)
            self._keep(state, values)
        checkpoint.mark_evaluated(self.root, state.version)

    def _load(self, version: int) -> Tensor:
        """The vector [P+Q] of a checkpoint, which is the model's state from now on."""
        values = torch.from_numpy(checkpoint.read_vector(self.root, version)).to(self.device)
        self.flat.attach(values)
        if self.config.batch_norm == "recalibrate":
            recalibrate(self.flat.model, self._batches(self.train_rows))
        return values

    def _measure(self, state: State) -> None:
        if self.rows is None or any(event["version"] == state.version for event in self._evaluations()):
            return
        loss, accuracy = self._evaluate(self.rows)
        train_loss, train_accuracy = self._evaluate(self.train_rows)
        log_event(
            self.output,
            "eval",
            version=state.version,
            epoch=state.epoch if state.epoch_boundary is None else state.epoch_boundary,
            seconds=state.seconds,
            loss=loss,
            accuracy=accuracy,
            rows=len(self.rows),
            train_loss=train_loss,
            train_accuracy=train_accuracy,
            final=state.final,
        )

    def _evaluate(self, rows: Rows) -> tuple[float, float]:
        loss, accuracy = evaluate(self.flat.model, self.task, self._batches(rows))
        return loss + penalty(self.flat.model, self.config.weight_decay), accuracy

    def _batches(self, rows: Rows) -> Iterator[Batch]:
        for images, labels in batches(rows, self.mean, BATCH):
            yield Batch(images.to(self.device), labels.to(self.device))

    def _keep(self, state: State, values: Tensor) -> None:
        top = best(self._evaluations())
        if top and top["version"] == state.version:
            self._save(BEST, state, values)
        if state.final:
            self._save(FINAL, state, values)

    def _save(self, name: str, state: State, values: Tensor) -> None:
        """The model by the names of its state_dict(), so that any tool that reads safetensors can use it."""
        about = {"model": self.config.model, "version": state.version, "epoch": state.epoch}
        metadata = {"trained": json.dumps(about)}  # one entry: safetensors writes several in any order
        write_durably(self.output / name, save(self.flat.named(values.cpu().numpy()), metadata=metadata))

    def _evaluations(self) -> list[dict[str, Any]]:
        return evaluations(read_events(self.output / METRICS))

    def _warn(self, message: str) -> None:
        """Once a run, however often the evaluator starts."""
        events = read_events(self.output / METRICS)
        if not any(event["event"] == "warning" and event["message"] == message for event in events):
            log_event(self.output, "warning", message=message)


@torch.no_grad()
def evaluate(model: nn.Module, task: models.Task, batches: Iterator[Batch]) -> tuple[float, float]:
    """(mean loss, share of right answers) over all rows, in eval mode; the model's numbers stay as they are.

    Raises ValueError without rows."""
    model.eval()
    rows = right = 0
    loss = 0.0
    for images, labels in batches:
        outputs = model(images)
        rows += len(labels)
        loss += float(task.loss(outputs, labels)) * len(labels)
        right += int(task.correct(outputs, labels))
    if not rows:
        raise ValueError("no rows to evaluate")
    return loss / rows, right / rows


@torch.no_grad()
def recalibrate(model: nn.Module, batches: Iterator[Batch]) -> None:
    """Replace BatchNorm's running statistics by means over these batches, each weighing the same.

    Statistics that workers merged belong to no single set of parameters. Only BatchNorm is in train mode, so dropout
    leaves the activations as they are in an evaluation. In place; a model without BatchNorm stays as it is."""
    norms = [module for module in model.eval().modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.train()
        norm.momentum = None  # torch's name for the plain mean
    for images, _ in batches if norms else ():
        model(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()


@torch.no_grad()
def penalty(model: nn.Module, weight_decay: float) -> float:
    """The L2 term of the loss that workers report (SPEC 3): half the decay times the squares of all matrices."""
    squares = [p.square().sum() for p in model.parameters() if p.requires_grad and p.ndim > 1]
    return 0.5 * weight_decay * float(sum(squares))


def batches(rows: Rows, mean: npt.NDArray[np.float32], size: int) -> Iterator[Batch]:
    """All rows in their order, normalised and not augmented, in batches of at most ``size`` that differ by one row."""
    for part in np.array_split(np.arange(len(rows)), -(-len(rows) // size)):
        images = normalise(rows.images_NCHW[part], mean)
        yield Batch(torch.from_numpy(images), torch.from_numpy(rows.labels[part]))


def sample_rows(shards: Shards, count: int, seed: int, *, targets: bool = False) -> Rows:
    """Up to ``count`` distinct training rows, equally many of each worker where it has them: a function of the seed.

    Reads every shard, one in memory at a time."""
    shares = [end - begin for begin, end in slice_bounds(count, shards.num_workers)]
    loaded = (load_worker(shards, worker, targets=targets) for worker in range(shards.num_workers))
    parts = [_draw(rows, share, seed, worker) for worker, (rows, share) in enumerate(zip(loaded, shares, strict=True))]
    ids = np.concatenate([part.ids for part in parts])
    _, first = np.unique(ids, return_index=True)  # a row that sharding copied may be drawn for several workers
    images = np.concatenate([part.images_NCHW for part in parts])
    return Rows(images[first], np.concatenate([part.labels for part in parts])[first], ids[first])


def _draw(rows: Rows, count: int, seed: int, worker: int) -> Rows:
    rng = np.random.default_rng(np.random.SeedSequence([seed, TRAIN_SAMPLE, worker]))
    chosen = np.sort(rng.permutation(len(rows))[:count])
    return Rows(rows.images_NCHW[chosen], rows.labels[chosen], rows.ids[chosen])


def _device(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"
