"""The evaluation of the checkpoints of a run, and the models that it keeps: the best and the final one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import torch
from safetensors.numpy import save

from pipeline.core.errors import DataError
from trainer.checkpoints import read as checkpoint
from trainer.checkpoints.decisions import StopDecision, SwitchDecision, read_switch, stop_of, write_decision
from trainer.checkpoints.state import RunState
from trainer.checkpoints.write import mark_evaluated
from trainer.config import Config
from trainer.coordination.early_stopping import last_improvement, stops_now
from trainer.coordination.switch_rule import has_relative_change, mean_change, switches_now
from trainer.data.batches import Batch
from trainer.data.holdout import is_held_out, load_held_out
from trainer.data.loading import load_eval
from trainer.data.mean_image import subtracted_mean
from trainer.data.neighbourhoods import Neighbourhoods, neighbourhoods_of_images
from trainer.data.network import TABLE, build_network
from trainer.data.rows import Rows
from trainer.data.shards import Shards
from trainer.evaluation.guessing import NOTHING_LEARNED, has_learned, nothing_learned
from trainer.evaluation.measure import EvaluationResult, evaluate, measure, penalty
from trainer.evaluation.recalibration import batches, recalibrate, sample_rows
from trainer.evaluation.training_mode import augmented, enter_training_mode
from trainer.exchange.strategy_switch import StrategySwitch
from trainer.home.folders import Folders
from trainer.home.place import write_whole
from trainer.home.segments import copy
from trainer.models.devices import EVALUATOR, compute_reproducibly, pick_device
from trainer.models.flat_vector import FlatModel
from trainer.models.metadata import ModelMetadata
from trainer.run_files import BEST, BEST_OF, METRICS, MODEL
from trainer.runlog.event_tail import tail_of
from trainer.runlog.events import log_event, write_refused_lines
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.evaluation import EvaluationEvent, HoldoutEvent
from trainer.runlog.kinds.run import WarningEvent
from trainer.runlog.read import Surviving, best, evaluations_of
from trainer.runlog.result import best_of, is_best_of
from trainer.watchdog import kick

E = TypeVar("E", bound=LogEvent)

BATCH = 500  # images per batch; with --evaluation-mode clean it changes the result only by rounding
TRAIN_ROWS = 2000  # training rows that are evaluated too, and used to recalibrate BatchNorm
NO_CHANGE = (
    "an epoch's loss is not a positive number, so that --alpha auto does not switch while it is among the last losses"
)
NO_HELD_OUT = (
    "--switch-on holdout holds out no row of so few, so that it does not switch: give a larger --holdout-share"
)
NO_ROWS = "the shard set has no evaluation rows: nothing is evaluated (--eval-input of its job adds them)"


class Evaluator:
    """The evaluator of a run: evaluates checkpoints and keeps the best and the final model."""

    def __init__(self, config: Config, shards: Shards, folders: Folders) -> None:
        self.config = config
        self.folders = folders
        self.home = folders.home
        self.work = folders.work
        self.root = folders.checkpoints
        built_model = build_network(config, shards)
        self.flat = FlatModel(built_model.model)
        self.task = built_model.task
        self.mean = subtracted_mean(shards)
        self.rows = load_eval(shards, targets=built_model.targets)
        self.train_rows = sample_rows(shards, TRAIN_ROWS, config.run.seed, targets=built_model.targets)
        self.held_out: Rows | None = None
        if config.exchange.held_out_share:
            self.held_out = load_held_out(shards, config, targets=built_model.targets)
            self.train_rows = self.train_rows.select(np.flatnonzero(~is_held_out(self.train_rows.ids, config)))
        self.device = pick_device(config.processes.device, EVALUATOR)
        compute_reproducibly(self.device)
        self.flat.model.to(self.device)
        self.tail = tail_of(folders)
        self.log = Surviving()
        self.warned: set[str] = set()
        self.num_classes = shards.num_classes
        self.num_rows = shards.rows
        num_classes = None if built_model.targets else shards.num_classes
        names = [] if num_classes is None else shards.manifest.labels.class_names
        self.metadata = ModelMetadata(
            config.model.to_json(),
            list(shards.shape),
            num_classes,
            self.mean.tolist(),
            list(names),
            shards.manifest.image.dtype,
        )
        self._best_key: tuple[int, int | None] | None = None  # (version, generation) of the model in best.safetensors
        if self.rows is None:
            self._warn(NO_ROWS)
        self.neighbourhoods = self._find_neighbourhoods(shards)
        if self.held_out is not None and not len(self.held_out):
            self._warn(NO_HELD_OUT)

    def _find_neighbourhoods(self, shards: Shards) -> Neighbourhoods | None:
        """Return the neighbourhoods of the evaluation rows; None without classes, rows or a model in the set.

        Training does not need the model, so that one that cannot be read is a warning."""
        if self.rows is None or self.metadata.classes is None:
            return None
        try:
            return neighbourhoods_of_images(shards, self.rows.images_NCHW)
        except (DataError, OSError) as error:
            self._warn(f"accuracy is not counted by neighbourhood: {error}")
            return None

    def catch_up(self) -> bool:
        """Evaluate the waiting checkpoints, oldest first, and return whether the run has ended and all are done.

        Raises OSError if something cannot be read or written now."""
        # First, because an evaluation that the log does not have is repeated.
        write_refused_lines(self.work)
        states = checkpoint.marked_states(self.root)
        results = []
        for state in checkpoint.waiting_of(states):
            # The leader rolls back to the checkpoint of a decision. Later ones, even a final one, are void then.
            stop = stop_of(self.root, self.config)
            if stop and stop.version < state.version:
                results.append(False)
                break
            results.append(self.handle(state))
        self.keep_best()
        return bool(states) and states[-1][0].final and all(results)

    def handle(self, state: RunState) -> bool:
        """Evaluate a checkpoint, log the result, update the best and the final model, then mark it as evaluated.

        A damaged checkpoint that is not final is marked without an evaluation, after a warning; a damaged final one
        raises DataError. Every step may be repeated after a kill. Returns False if the checkpoint was discarded or
        deleted."""
        try:
            self._load(state)
        except DataError as error:
            if not checkpoint.is_whole(self.root, state):
                return False  # discarded or deleted meanwhile
            if state.final:
                raise
            self._warn(f"not evaluated: {error}")
        else:
            self._measure(state)
            self._keep_if_best(state)
            self._measure_held_out(state)
            self._decide_switch(state)
            self._decide_stop(state)
        evaluation = self._evaluation(state)
        if not self.folders.is_local:
            # Before the mark: a marked checkpoint is not evaluated again, so its event must be in the home by then.
            copy(self.folders, (METRICS,))
        measured = (evaluation.accuracy, evaluation.loss) if evaluation else ()
        return mark_evaluated(self.root, state, *measured)

    def keep_best(self) -> None:
        """Make best.safetensors the model of the best evaluation that counts, which a roll-back may change.

        Deletes the file if the checkpoint of that evaluation was deleted. Raises OSError."""
        top = best(self._evaluations())
        path = self.home / BEST
        if not top or self._best_key == _key(top):
            return
        if is_best_of(self.home, top):
            self._best_key = _key(top)
            return
        # After a roll-back an earlier evaluation is the best again; its checkpoint may be deleted by now.
        state = next((state for state in checkpoint.whole_states(self.root) if _is_of(top, state)), None)
        try:
            if state:
                self._load(state)
                return self._save(BEST, state)
        except DataError as error:
            self._warn(f"{path} is deleted: {error}")
        for name in (BEST_OF, BEST):
            (self.home / name).unlink(missing_ok=True)

    def _load(self, state: RunState) -> None:
        """Load a checkpoint into the model, and recalibrate BatchNorm if the run says so."""
        self.flat.load(torch.from_numpy(checkpoint.vector_of(self.root, state)).to(self.device))
        if self.config.optimiser.batch_norm == "recalibrate":
            recalibrate(self.flat.model, self._batches(self.train_rows))

    def _measure(self, state: RunState) -> None:
        """Evaluate the loaded model on training and evaluation rows, and log the result, unless it is logged already.

        Without evaluation rows nothing is logged but the warning that nothing was learned, if so."""
        logged = self._evaluation(state)  # before a kill
        # A checkpoint that early stopping has made the final one is evaluated again, with counts by class.
        if logged and bool(logged.final) >= state.final:
            return
        train = self._evaluate(self.train_rows)
        learned = self._has_learned(state, train)
        if self.rows is None:
            return
        # Only of the final model, because the event of many classes is long.
        counted_classes = self.metadata.classes if state.final else None
        evaluation = self._evaluate_as_configured(self.rows, state.version, counted_classes)
        l2 = penalty(self.flat.model, self.config.optimiser.weight_decay)
        log_event(
            self.work,
            "eval",
            version=state.version,
            generation=state.generation,
            epoch=state.epoch if state.epoch_boundary is None else state.epoch_boundary,
            seconds=state.seconds,
            loss=evaluation.loss + l2,
            l2=l2,
            accuracy=evaluation.accuracy,
            rows=len(self.rows),
            train_loss=train.loss + l2,
            train_accuracy=train.accuracy,
            learned=learned,
            final=state.final,
            **(evaluation.classes.to_json() if evaluation.classes else {}),
            **self._count_neighbourhoods(evaluation),
            **({"class_names": self.metadata.class_names} if evaluation.classes and self.metadata.class_names else {}),
        )
        write_refused_lines(self.work)  # later decisions read it

    def _count_neighbourhoods(self, evaluation: EvaluationResult) -> dict[str, list[int]]:
        """Return the keys of an ``eval`` event by neighbourhood; empty if rows were not counted by class either."""
        if self.neighbourhoods is None or evaluation.is_correct is None:
            return {}
        return self.neighbourhoods.to_json(evaluation.is_correct)

    def _measure_held_out(self, state: RunState) -> None:
        """Log the loss of the loaded model on the held-out rows at the end of an epoch, unless it is logged already."""
        epoch = state.epoch_boundary
        if not self.held_out or state.stage or epoch is None:
            return
        if any(_is_of(event, state) for event in self._live(HoldoutEvent)):
            return
        about = {"version": state.version, "generation": state.generation, "epoch": epoch, "seconds": state.seconds}
        log_event(self.work, "holdout", **about, loss=self._evaluate(self.held_out).loss, rows=len(self.held_out))
        write_refused_lines(self.work)

    def _decide_switch(self, state: RunState) -> None:
        """Write the decision to switch if the rule says so by the losses of the epochs up to a checkpoint.

        The first decision counts: later checkpoints of the first stage may have been written before it was made."""
        epoch = state.epoch_boundary
        exchange = self.config.exchange
        if not isinstance(exchange, StrategySwitch) or not exchange.switches_by_rule:
            return
        # The present workers cannot go back to a checkpoint before them, so that the next epoch decides.
        if state.stage or epoch is None or state.version < self.config.cohorts.present.version:
            return
        # From the log, which has the losses of an evaluator that was restarted, too.
        loss_by_epoch = {event.epoch: event.loss_alone() for event in self._live(EvaluationEvent)}
        if exchange.switch_on == "holdout":
            held_out = self._live(HoldoutEvent)
            loss_by_epoch = {event.epoch: math.nan if event.loss is None else event.loss for event in held_out}
        losses = [loss_by_epoch.get(number, math.nan) for number in range(1, epoch + 1)]
        if not has_relative_change(losses):
            self._warn(NO_CHANGE)
        epochs = self.config.total_epochs(self.num_rows)
        window = exchange.switch_window
        if switches_now(losses, epochs, window, exchange.switch_threshold) and not read_switch(self.root):
            change = mean_change(losses, window)
            write_decision(self.root, SwitchDecision(state.version, state.generation, epoch, change))

    def _decide_stop(self, state: RunState) -> None:
        """Write the decision to end the run if the losses of the epochs up to a checkpoint no longer improve.

        The first decision counts: later checkpoints may have been written before it was made."""
        run = self.config.run
        if run.patience is None or state.epoch_boundary is None or state.final:
            return
        # The run can end only with a checkpoint of its present workers; the next epoch decides.
        if state.version <= self.config.cohorts.present.version or stop_of(self.root, self.config):
            return
        # From the log, which has the losses of an evaluator that was restarted, too.
        loss_by_epoch = {event.epoch: event.loss_alone() for event in self._evaluations()}
        # An epoch whose checkpoint was damaged counts as one without an improvement.
        losses = [loss_by_epoch.get(number, math.nan) for number in range(1, state.epoch_boundary + 1)]
        if not stops_now(losses, run.patience, run.min_delta):
            return
        best = last_improvement(losses, run.min_delta)
        best_epoch = None if best is None else best + 1
        best_loss = None if best is None else losses[best]
        options = (run.patience, run.min_delta, best_epoch, best_loss)
        write_decision(self.root, StopDecision(state.version, state.generation, state.epoch_boundary, *options))

    def _evaluate(self, rows: Rows, num_classes: int | None = None) -> EvaluationResult:
        return evaluate(self.flat.model, self.task, self._batches(rows), num_classes)

    def _evaluate_as_configured(self, rows: Rows, version: int, num_classes: int | None) -> EvaluationResult:
        """Evaluate the loaded model in the mode of --evaluation-mode. rows: evaluation rows; version: of the model."""
        seed = self.config.run.seed
        if self.config.run.evaluation_mode == "clean":
            return self._evaluate(rows, num_classes)
        images = batches(rows, self.mean, BATCH)
        # As in training, where real-valued features are not cropped and flipped either.
        if self.config.data.augment and rows.images_NCHW.dtype == np.uint8:
            images = augmented(images, seed, version)
        with enter_training_mode(self.flat.model, seed, version):
            return measure(self.flat.model, self.task, self._on_device(images), num_classes)

    def _has_learned(self, state: RunState, train: EvaluationResult) -> bool | None:
        """Return whether the model is better than guessing; None if the task has no such baseline.

        Logs a warning if it is not, although the first epoch is over. train: the evaluation on training rows."""
        guessing = self.task.guessing(self.num_classes)
        if guessing is None:
            return None
        learned = has_learned(train.loss, train.noise, guessing)
        if not learned and state.epoch >= 1:
            stage = self.config.stage_configs()[state.stage]
            self._warn(nothing_learned(stage, train.loss, train.noise, guessing), kind=NOTHING_LEARNED)
        return learned

    def _batches(self, rows: Rows) -> Iterator[Batch]:
        return self._on_device(batches(rows, self.mean, BATCH))

    def _on_device(self, parts: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches on the device, each of which counts as progress for the watchdog."""
        for images, labels in parts:
            kick()
            yield Batch(images.to(self.device), labels.to(self.device))

    def _keep_if_best(self, state: RunState) -> None:
        """Write the loaded model if it is the best one so far, and if it is the final one."""
        top = best(self._evaluations())
        if top and _is_of(top, state):
            self._save(BEST, state)
        if state.final:
            self._save(MODEL, state)

    def _save(self, name: str, state: RunState) -> None:
        """Write the loaded model to the home as safetensors, with the names of its state_dict() for other tools.

        Runs with equal parameters write equal bytes. For best.safetensors, best.json then records the checkpoint.

        Args:
            name: BEST or MODEL.
            state: the checkpoint of the model.
        """
        tensors = self.flat.named(self.flat.read())
        tensors.pop(TABLE, None)  # of the sampler, and no part of the model
        data = save(tensors, metadata=self.metadata.to_header())
        write_whole(self.home / name, data)
        if name == BEST:
            write_whole(self.home / BEST_OF, best_of(state, data))
            self._best_key = (state.version, state.generation)

    def _evaluations(self) -> list[EvaluationEvent]:
        """Return the logged evaluations that no later roll-back has made void. Reads only events that are new."""
        return evaluations_of(self._live(EvaluationEvent))

    def _live(self, kind: type[E]) -> list[E]:
        """Return the logged events of a kind of measurement that no later roll-back has made void."""
        for event in self.tail.new():
            kick()  # the watchdog: a new evaluator reads the log of weeks
            if isinstance(event, WarningEvent):
                self.warned.add(event.message)
            elif isinstance(event, EvaluationEvent | HoldoutEvent) or event.resumes_from() is not None:
                self.log.add(event)
        return [event for event in self.log.events if isinstance(event, kind)]

    def _evaluation(self, state: RunState) -> EvaluationEvent | None:
        """Return the last logged evaluation of a checkpoint, or None."""
        return next((event for event in reversed(self._evaluations()) if _is_of(event, state)), None)

    def _warn(self, message: str, *, kind: str = "") -> None:
        """Log a warning once per run, even after restarts of the evaluator.

        kind: a prefix of messages; at most one message with it is logged (default: the whole message)."""
        self._evaluations()
        if not any(text.startswith(kind or message) for text in self.warned):
            log_event(self.work, "warning", message=message)


def _key(evaluation: LogEvent) -> tuple[int, int | None]:
    """Return the version and generation of an evaluated checkpoint; None for the generation in older logs."""
    return evaluation.version_or_zero(), evaluation.generation


def _is_of(event: LogEvent, state: RunState) -> bool:
    """Return whether an event is about a checkpoint."""
    return _key(event) == (state.version, state.generation)
