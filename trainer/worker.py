"""A worker's process: draw a mini-batch, compute its gradient, push, pull, again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from trainer.batches import Batch, Loader
from trainer.config import Config, Facts
from trainer.coordinator import Measured
from trainer.link import Link, MustRejoin, Turn
from trainer.models import Built, build_for
from trainer.runlog import log_event
from trainer.shards import Rows, Shards, load_worker, open_shards
from trainer.transport import Secret
from trainer.vector import FlatModel

DROPOUT = 3  # purpose of random numbers derived from the run's seed


def pick_device(name: str, worker: int) -> torch.device:
    """auto: a GPU where there is one; several workers share one, and spread over several."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", worker % torch.cuda.device_count())


class Step:
    """The gradient of one mini-batch, between two host vectors: numbers in ``pulled``, gradients out to ``pushed``.

    Both are float32 [P + Q]: parameters, then BatchNorm's statistics. On a CPU the model computes in them, without a
    copy; on a GPU each is copied over once a step."""

    def __init__(
        self, config: Config, built: Built, pulled: np.ndarray, pushed: np.ndarray, device: torch.device
    ) -> None:
        self.config, self.model, self.task = config, built.model, built.task
        self.flat = FlatModel(built.model)
        self.pulled, self.pushed = torch.from_numpy(pulled), torch.from_numpy(pushed)
        on_host = device.type == "cpu"
        self.values = self.pulled if on_host else torch.zeros_like(self.pulled, device=device)
        self.gradients = self.pushed if on_host else torch.zeros_like(self.pushed, device=device)
        self.flat.attach(self.values, self.gradients[: self.flat.num_parameters])

    def __call__(self, batch: Batch, dropout_seed: int) -> tuple[float, int]:
        """(mean loss with the L2 term, right answers). Leaves gradients and the batch's statistics in ``pushed``.
        Of no examples, as Bernoulli sampling may draw them, both are 0, so is the gradient, and the statistics stay."""
        self._seed(dropout_seed)
        self._copy(self.values, self.pulled)
        self.gradients.zero_()
        parameters = self.flat.num_parameters
        if not len(batch.labels):
            self.gradients[parameters:] = self.values[parameters:]
            self._copy(self.pushed, self.gradients)
            return 0.0, 0
        images, labels = batch.images_BCHW.to(self.values.device), batch.labels.to(self.values.device)
        outputs = self.model(images)
        loss = self.task.loss(outputs, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        total = loss.detach() + self.flat.weight_decay_(self.config.weight_decay)
        self.gradients[parameters:] = self.values[parameters:]
        self._copy(self.pushed, self.gradients)
        return float(total), int(self.task.correct(outputs.detach(), labels))

    def _seed(self, seed: int) -> None:
        """What torch.manual_seed does for the devices in use; for those that are not it writes down where it was called,
        which is more than half of a small step."""
        torch.default_generator.manual_seed(seed)
        if self.values.is_cuda:
            torch.cuda.manual_seed_all(seed)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target is not source:
            target.copy_(source)


def step_seed(seed: int, worker: int, clock: int) -> int:
    """Dropout is drawn anew every step, the same whenever a step is done again."""
    return int(np.random.SeedSequence([seed, DROPOUT, worker, clock]).generate_state(1, np.uint64)[0])


def main(config: Config, facts: Facts, worker: int, addresses: Sequence[str], secret: Secret, threads: int) -> None:
    """The process of one worker, until the servers say that the run is over. Raises DataError for broken shards."""
    torch.set_num_threads(threads)
    shards = open_shards(config.shards, num_workers=facts.num_workers)
    built = build_for(config, shards)
    rows = _load(config, shards, worker, built)
    link = Link(facts, worker, list(addresses), secret, use_memory=config.same_host == "memory")
    step = Step(config, built, link.pulled, link.pushed, pick_device(config.device, worker))
    size = config.worker_batch_size(worker, facts.num_workers)
    loader = Loader(
        rows,
        shards.mean,
        size,
        seed=config.seed,
        worker=worker,
        augment=config.augment,
        fraction=config.fraction(facts.rows),
    )
    with loader:
        _work(config, worker, link, loader, step)
    link.close()


def _load(config: Config, shards: Shards, worker: int, built: Built) -> Rows:
    """The worker's rows, and an event that says how long they took."""
    begun = time.monotonic()
    rows = load_worker(shards, worker, targets=built.targets)
    seconds, size = time.monotonic() - begun, rows.images_NCHW.nbytes
    log_event(Path(config.output), "loaded", worker=worker, rows=len(rows), bytes=size, load_s=seconds)
    return rows


def _work(config: Config, worker: int, link: Link, loader: Loader, step: Step) -> None:
    turn = link.join()
    while turn:
        begun = time.monotonic()
        batch = loader.batch(turn.clock)
        loss, correct = step(batch, step_seed(config.seed, worker, turn.clock))
        measured = Measured(len(batch.labels), loss, correct, time.monotonic() - begun, loader.read_s)
        turn = _push(link, turn, measured)


def _push(link: Link, turn: Turn, measured: Measured) -> Turn | None:
    try:
        return link.push(turn, measured)
    except MustRejoin:
        return link.join()
