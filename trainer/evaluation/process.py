"""The evaluator process: measures every finished epoch beside the training, from checkpoints alone.

It talks to nobody, so it may be killed and started again at any time: what it has in work it does again, what is in
metrics.jsonl it does not. Shapes: B images of a batch, C channels, H and W pixels, P parameters, Q statistics."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from safetensors.numpy import save
from torch import Tensor, nn

from pipeline.core.errors import DataError
from trainer.checkpoints import read as checkpoint
from trainer.checkpoints.state import State
from trainer.checkpoints.write import mark_evaluated
from trainer.config import Config
from trainer.data.batches import Batch
from trainer.data.shards import Rows, load_eval, open_pinned
from trainer.evaluation.guessing import NOTHING_LEARNED, has_learned, nothing_learned
from trainer.evaluation.recalibration import batches, one_thread, recalibrate, sample_rows
from trainer.home.folders import Folders
from trainer.home.place import write_whole
from trainer.home.segments import copy
from trainer.models.build import build
from trainer.models.devices import EVALUATOR, pick_device
from trainer.models.flat_vector import FlatModel
from trainer.models.tasks import Task
from trainer.run_files import BEST, BEST_OF, METRICS, MODEL, NEWS
from trainer.runlog.event_tail import tail_of
from trainer.runlog.events import log_event
from trainer.runlog.read import CUTS, Surviving, best, evaluations_of
from trainer.runlog.result import best_of, is_best_of
from trainer.watchdog import kick, report

logger = logging.getLogger(__name__)

BATCH = 500  # images at a time; the result depends on it only by rounding
TRAIN_ROWS = 2000  # training rows that are evaluated too, and that recalibrate
POLL_S = 0.5
# Where each look is several operations of a store: on the host of server 0, which tells of a checkpoint, and on another.
TOLD_POLL_S, FAR_POLL_S = 60.0, 15.0
NO_ROWS = "the shard set has no evaluation rows: nothing is evaluated (--eval-input of its job adds them)"


def main(config: Config, folders: Folders, *, stop: threading.Event | None = None) -> None:
    """Evaluate what is in the home's checkpoints and what is added, in order of version, until the run's final one, or
    until ``stop`` is set and all that is there is done.

    Raises DataError or OSError where the shards, and DataError where the final checkpoint cannot be read; what cannot
    be written is tried again."""
    stop = stop or threading.Event()
    evaluator = Evaluator(config, folders)
    while True:
        kick()
        news = _news(folders)
        stopping = stop.is_set()  # asked before the folder is read: what was written before the stop is evaluated
        try:
            if evaluator.catch_up() or stopping:
                return
            report("")
        except OSError as error:  # a full disk, or one that hosts share: it may come back, as it does for checkpoints
            report(f"the evaluation or its model was not written: {error}")
            logger.warning(f"evaluating will be tried again: {error}")
            if stopping:
                return
        _wait(folders, news, stop)


def _wait(folders: Folders, news: int, stop: threading.Event) -> None:
    """Until it is time to look for checkpoints. news: of before the last look."""
    far = TOLD_POLL_S if folders.leads else FAR_POLL_S
    end = time.monotonic() + (0 if folders.is_local else far)
    while not stop.wait(POLL_S) and time.monotonic() < end and _news(folders) == news:
        kick()


def _news(folders: Folders) -> int:
    """Grows when server 0, where it is on this host, has told of a checkpoint."""
    path = folders.work / NEWS
    return path.stat().st_size if path.exists() else 0


class Evaluator:
    """A model, the rows that it is measured on, and the run's folder."""

    def __init__(self, config: Config, folders: Folders) -> None:
        self.config, self.folders = config, folders
        self.home, self.work, self.root = folders.home, folders.work, folders.checkpoints
        shards = open_pinned(config.data)
        built = build(config.model, shards.inputs, config.model_seed)
        self.flat, self.task, self.mean = FlatModel(built.model), built.task, shards.mean
        self.rows = load_eval(shards, targets=built.targets)
        self.train_rows = sample_rows(shards, TRAIN_ROWS, config.run.seed, targets=built.targets)
        self.device = pick_device(config.processes.device, EVALUATOR)
        self.tail, self.log = tail_of(folders), Surviving()
        self.warned: set[str] = set()
        self.num_classes = shards.num_classes
        self.about = {
            "network": config.model.to_json(),
            "shape": list(shards.shape),
            "classes": None if built.targets else shards.num_classes,
            "mean": shards.mean.tolist(),
        }
        self._kept: tuple[int, int | None] | None = None  # (version, generation) of the model in best.safetensors
        if self.rows is None:
            self._warn(NO_ROWS)

    def catch_up(self) -> bool:
        """Evaluate what waits, oldest first; whether the newest checkpoint is the evaluated end of the run. Raises OSError
        where something cannot be read or written now."""
        marked = checkpoint.marked_states(self.root)
        done = [self.handle(state) for state in checkpoint.waiting_of(marked)]
        self.keep_best()
        return bool(marked) and marked[-1][0].final and all(done)

    def handle(self, state: State) -> bool:
        """Evaluate one checkpoint, write its event and its files, then mark it; every step may be the second time. False:
        it is no checkpoint of the run any more."""
        try:
            values = self._load(state)
        except DataError as error:
            if not checkpoint.is_whole(self.root, state):
                return False  # discarded, or given up, since it was found
            if state.final:
                raise
            self._warn(f"not evaluated: {error}")
        else:
            self._measure(state)
            self._keep(state, values)
        found = self._evaluation(state)
        if not self.folders.is_local:
            copy(self.folders, (METRICS,))  # the mark says that the event is in the home
        measured = (found.get("accuracy"), found.get("loss")) if found else ()
        return mark_evaluated(self.root, state, *measured)

    def keep_best(self) -> None:
        """Have best.safetensors be the model of the best evaluation that counts, after a roll-back too; or no model, where
        that one's checkpoint is gone. Raises OSError."""
        top, path = best(self._evaluations()), self.home / BEST
        if not top or self._kept == _key(top):
            return
        if is_best_of(self.home, top):
            self._kept = _key(top)
            return
        state = next((state for state in checkpoint.whole_states(self.root) if _is_of(top, state)), None)
        try:
            if state:
                return self._save(BEST, state, self._load(state))
        except DataError as error:
            self._warn(f"{path} is deleted: {error}")
        for name in (BEST_OF, BEST):
            (self.home / name).unlink(missing_ok=True)

    def _load(self, state: State) -> Tensor:
        """The vector [P+Q] of a checkpoint, which is the model's state from now on."""
        values = torch.from_numpy(checkpoint.vector_of(self.root, state)).to(self.device)
        self.flat.attach(values)
        if self.config.optimiser.batch_norm == "recalibrate":
            recalibrate(self.flat.model, self._batches(self.train_rows))
        return values

    def _measure(self, state: State) -> None:
        if self._evaluation(state):
            return
        train = self._evaluate(self.train_rows)
        learned = self._has_learned(state, train)
        if self.rows is None:
            return
        found, l2 = self._evaluate(self.rows), penalty(self.flat.model, self.config.optimiser.weight_decay)
        log_event(
            self.work,
            "eval",
            version=state.version,
            generation=state.generation,
            epoch=state.epoch if state.epoch_boundary is None else state.epoch_boundary,
            seconds=state.seconds,
            loss=found.loss + l2,
            accuracy=found.accuracy,
            rows=len(self.rows),
            train_loss=train.loss + l2,
            train_accuracy=train.accuracy,
            learned=learned,
            final=state.final,
        )

    def _evaluate(self, rows: Rows) -> Measurement:
        return evaluate(self.flat.model, self.task, self._batches(rows))

    def _has_learned(self, state: State, train: Measurement) -> bool | None:
        """Whether the model is better than guessing, and a warning if it is not after an epoch; None where guessing says
        nothing."""
        guessing = self.task.guessing(self.num_classes)
        if guessing is None:
            return None
        learned = has_learned(train.loss, train.noise, guessing)
        if not learned and state.epoch >= 1:
            self._warn(nothing_learned(self.config, train.loss, train.noise, guessing), kind=NOTHING_LEARNED)
        return learned

    def _batches(self, rows: Rows) -> Iterator[Batch]:
        for images, labels in batches(rows, self.mean, BATCH):
            kick()
            yield Batch(images.to(self.device), labels.to(self.device))

    def _keep(self, state: State, values: Tensor) -> None:
        top = best(self._evaluations())
        if top and _is_of(top, state):
            self._save(BEST, state, values)
        if state.final:
            self._save(MODEL, state, values)

    def _save(self, name: str, state: State, values: Tensor) -> None:
        """Write the model by the names of its state_dict(), so that any tool that reads safetensors can use it.

        Runs with equal parameters write equal bytes."""
        metadata = {"model": json.dumps(self.about)}  # one entry: safetensors writes several in any order
        data = save(self.flat.named(values.cpu().numpy()), metadata=metadata)
        write_whole(self.home / name, data)
        if name == BEST:
            write_whole(self.home / BEST_OF, best_of(state, data))
            self._kept = (state.version, state.generation)

    def _evaluations(self) -> list[dict[str, Any]]:
        """Those that still count; only what was logged since the last time is read."""
        for event in self.tail.new():
            if event["event"] == "warning":
                self.warned.add(event["message"])
            elif event["event"] == "eval" or event["event"] in CUTS:
                self.log.add(event)
        return evaluations_of(self.log.events)

    def _evaluation(self, state: State) -> dict[str, Any] | None:
        return next((event for event in self._evaluations() if _is_of(event, state)), None)

    def _warn(self, message: str, *, kind: str = "") -> None:
        """Once a run, however often the evaluator starts. kind: how all messages begin of which one is enough."""
        self._evaluations()
        if not any(said.startswith(kind or message) for said in self.warned):
            log_event(self.work, "warning", message=message)


def _key(evaluation: dict[str, Any]) -> tuple[int, int | None]:
    return evaluation["version"], evaluation.get("generation")


def _is_of(event: dict[str, Any], state: State) -> bool:
    """Whether an evaluation is of this checkpoint."""
    return _key(event) == (state.version, state.generation)


class Measurement(NamedTuple):
    """Mean loss without the L2 term, share of correct predictions (None for real targets), and the standard error of that
    loss."""

    loss: float
    accuracy: float | None
    noise: float


@torch.no_grad()
@one_thread()
def evaluate(model: nn.Module, task: Task, batches: Iterator[Batch]) -> Measurement:
    """Measure a model on all rows, in eval mode; its numbers stay as they are.

    On the CPU the result is bit-equal whatever number of threads torch has. Raises ValueError without rows."""
    model.eval()
    rows = right = 0
    loss = squares = 0.0
    are_classes = True
    for images, labels in batches:
        outputs = model(images)
        rows += len(labels)
        loss += float(task.loss(outputs, labels)) * len(labels)
        squares += float(task.losses(outputs, labels).double().square().sum())
        right += int(task.correct(outputs, labels))
        are_classes = not labels.is_floating_point()
    if not rows:
        raise ValueError("no rows to evaluate")
    mean = loss / rows
    accuracy = right / rows if are_classes else None
    return Measurement(mean, accuracy, math.sqrt(max(0.0, squares / rows - mean * mean) / rows))


@torch.no_grad()
@one_thread()
def penalty(model: nn.Module, weight_decay: float) -> float:
    """The L2 term of the loss that workers report: half the decay times the squares of all matrices."""
    squares = [p.square().sum() for p in model.parameters() if p.requires_grad and p.ndim > 1]
    return 0.5 * weight_decay * float(sum(squares))
