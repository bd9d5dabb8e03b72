"""The preparation of a run: checks shards and model, and writes the initial parameters as checkpoint 0."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pipeline.core.errors import DataError, UsageError
from trainer.checkpoints.decisions import delete_void_stop, has_converged
from trainer.checkpoints.read import newest_state, versions
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import delete_mark, mark_final, write_model, write_state
from trainer.config import Config, RunFacts
from trainer.data.example_table import check_table, table_warning
from trainer.data.gossip import check_gossip
from trainer.data.holdout import trained_fingerprint
from trainer.data.mean_image import check_subtracted_mean
from trainer.data.neighbourhoods import read_model
from trainer.data.network import build_network, loss_table_of
from trainer.data.own_augmentation import check_augmentation
from trainer.data.pinned import open_pinned
from trainer.data.repartition import partition_plan
from trainer.data.shards import Shards
from trainer.exchange.neighbours import NeighbourExchange
from trainer.exchange.plan_json import linked_pairs, plan_to_json
from trainer.home.place import Place
from trainer.leader.peer_checkpoints import PLAN, begin_peers, plan_of
from trainer.models.build import NetworkAndTask
from trainer.models.devices import pick_device
from trainer.models.flat_vector import FlatModel
from trainer.models.normalisation import normalises
from trainer.plan import smallest_pass
from trainer.rules import slots_of
from trainer.run_files import CHECKPOINTS
from trainer.sampling.base import TableSampler
from trainer.transport.bodies.json_object import pack_json


def main(config: Config, digest: str, home: Place | None, write: bool, computes: bool, answer: Connection) -> None:
    """Send the facts of the run and warnings as JSON, check its newest checkpoint, and write a first one if there is none.

    Runs in its own process, so that the supervisor loads neither torch nor a model. Raises UsageError and DataError.

    Args:
        config: the run.
        digest: of its shard set.
        home: the run's folder; None to leave checkpoints alone.
        write: whether to prepare the checkpoints for a start; otherwise they are only checked.
        computes: whether this host has workers or the evaluator.
        answer: the connection to which the facts are sent.
    """
    shards = open_pinned(config.data, digest=digest)
    network = build_network(config, shards)
    if computes:
        pick_device(config.processes.device, 0)
    num_workers = config.num_workers(shards.num_workers)
    check_network(config, network, shards, num_workers)
    flat = FlatModel(network.model)
    sizes = (num_workers, shards.rows, flat.num_parameters, flat.num_buffers)
    # Passes are compared with the rows that they train, which a run that holds out rows does not know before it reads them.
    fingerprint = trained_fingerprint(shards, config)
    ratios = shards.ratios_of(num_workers)
    about = (shards.digest, fingerprint, ratios, not network.targets)
    facts = RunFacts(*sizes, *about, *loss_table_of(config, shards, flat))
    if home and write:
        ensure_checkpoint(config, facts, flat.read(), home)
    elif home and (state := newest_state(home / CHECKPOINTS)):
        _check_checkpoint(config, facts, home / CHECKPOINTS, state)
    warnings = [text] if (text := table_warning(config.sampler, fingerprint)) else []
    answer.send_bytes(pack_json(facts.to_json() | {"warnings": warnings}))


def check_network(config: Config, network: NetworkAndTask, shards: Shards, num_workers: int) -> None:
    """Raise UsageError or DataError if a run cannot train a network on a set. num_workers: workers of the run."""
    if not config.model.regresses and shards.num_classes < 2:
        raise UsageError(
            f"--model {config.model.name} tells classes apart, and all labels of {shards.uri} are of one; shard rows of two"
            " classes or more"
        )
    check_normalisation(config, network, shards, num_workers)
    check_normalisation_of_a_row(config, network, shards)
    check_evaluation(config, shards)
    check_augmentation(config, shards)
    check_subtracted_mean(config, shards)
    check_sampler(config, shards, num_workers, targets=network.targets)


def check_normalisation(config: Config, network: NetworkAndTask, shards: Shards, num_workers: int) -> None:
    """Raise UsageError if a worker's smallest batch has too few values for BatchNorm. num_workers: workers of the run."""
    examples = smallest_pass(config, num_workers, shards.ratios_of(num_workers))
    if normalises(network.model, shards.shape, examples):
        return
    instead = "--norm group" if hasattr(config.model, "norm") else "a model without BatchNorm"
    # Bernoulli sampling can draw a single example from any number of rows, so a larger --batch-size does not help.
    if not config.sampler.fixed_size:
        raise UsageError(
            f"--model {config.model.name} has BatchNorm, which cannot normalise a single example, and --sampling"
            f" {config.sampler.name} draws mini-batches of 1 example too: give --sampling shuffle, or {instead}"
        )
    # Twice as many below, because two examples have a variance even with one value per channel.
    parts = config.protocol.parts_of_a_step()
    batch_name = "micro-batch" if parts > 1 else "mini-batch"
    if 0 < config.data.gossip < 2 * parts:
        raise UsageError(
            f"--model {config.model.name} has BatchNorm, which cannot normalise the {examples} example that a {batch_name}"
            f" of --gossip {config.data.gossip} may have: give --gossip {2 * parts} or more, or {instead}"
        )
    raise UsageError(
        f"--model {config.model.name} has BatchNorm, which cannot normalise the {examples} example of a worker's smallest"
        f" {batch_name}: give --batch-size {2 * parts * num_workers} or more, or {instead}"
    )


def check_normalisation_of_a_row(config: Config, network: NetworkAndTask, shards: Shards) -> None:
    """Raise UsageError if an evaluation would have to normalise a single row by BatchNorm, which has too few values."""
    # Batches of an evaluation differ by one row at most, so that only a set of one row has a batch of one.
    lone_training_row = shards.rows == 1 and config.optimiser.batch_norm == "recalibrate"
    eval_rows = sum(file.rows for file in shards.eval_files())
    lone_eval_row = eval_rows == 1 and config.run.evaluation_mode == "paper"
    if not (lone_training_row or lone_eval_row) or normalises(network.model, shards.shape, 1):
        return
    rows, flag, instead = "training", "--batch-norm recalibrate", "--batch-norm ema"
    if not lone_training_row:
        rows, flag, instead = "evaluation", "--evaluation-mode paper", "--evaluation-mode clean"
    group = ", or --norm group" if hasattr(config.model, "norm") else ""
    raise UsageError(
        f"--model {config.model.name} has BatchNorm, which cannot normalise the 1 {rows} row of the set for {flag}: give"
        f" more rows, {instead}{group}"
    )


def check_evaluation(config: Config, shards: Shards) -> None:
    """Raise UsageError if a rule decides about a switch or the end by losses of evaluation rows that are not measured."""
    exchange = config.exchange
    reads_losses = exchange.switches_by_rule and not exchange.held_out_share
    # Not in the configuration, because earlier versions have trained such runs. Crops and dropout change this loss.
    if config.run.evaluation_mode == "paper" and (reads_losses or config.run.patience is not None):
        flag, instead = "--alpha auto", "--switch-on holdout or --alpha SHARE"
        if not reads_losses:
            flag, instead = f"--patience {config.run.patience}", "no --patience"
        raise UsageError(
            f"{flag} reads the loss of predictions, which --evaluation-mode paper does not measure: leave it out, or give"
            f" {instead}"
        )
    if reads_losses and not shards.eval_files():
        raise UsageError(
            "--alpha auto reads the loss on evaluation rows, which the shard set lacks: give its job --eval-input, or"
            " give --switch-on holdout or --alpha SHARE"
        )
    if config.run.patience is not None and not shards.eval_files():
        raise UsageError(
            f"--patience {config.run.patience} reads the loss on evaluation rows, which the shard set lacks: give its job"
            " --eval-input, or leave out --patience"
        )


def check_sampler(config: Config, shards: Shards, num_workers: int, *, targets: bool) -> None:
    """Raise UsageError or DataError if a sampler cannot draw from the rows of a set, as far as its manifest says.

    Args:
        config: the run.
        shards: the set.
        num_workers: workers of the run.
        targets: whether the model fits real targets instead of labels.
    """
    if config.data.repartition != "fixed":
        partition_plan(config, shards, num_workers)
    check_gossip(config, shards, num_workers)
    config.sampler.check(has_classes=shards.has_labels and not targets, has_neighbourhoods=shards.has_neighbourhoods)
    check_table(config.sampler)
    if isinstance(config.sampler, TableSampler) and config.sampler.validates:
        check_validation(config.sampler, shards)


def check_validation(sampler: TableSampler, shards: Shards) -> None:
    """Raise UsageError if a sampler reads losses of evaluation rows, and the set lacks these rows or their groups.

    Raises DataError for a damaged model of the groups, and OSError."""
    if not shards.eval_files():
        raise UsageError(
            "--weakness validation-loss needs evaluation rows, which the shard set lacks: give its job --eval-input, or give"
            " --weakness loss"
        )
    if sampler.grouping == "neighbourhood" and read_model(shards) is None:
        raise UsageError(
            "--weakness validation-loss with --sampling-groups neighbourhood needs a set of images by sharding shard"
            " --strategy distribution_aware that keeps its model: give --sampling-groups class, or --weakness loss"
        )


def _check_identity(config: Config, root: Place, state: RunState) -> None:
    """Raise DataError for a checkpoint of another run.

    Options that only one of the two has are not compared: another version of the program may have written the
    checkpoint."""
    try:
        stored_identity = dict(json.loads(state.identity))
    except (ValueError, TypeError):
        stored_identity = {}  # an unreadable identity does not prove that the checkpoint is another run's
    own_identity = json.loads(config.identity())
    name = next(
        (name for name in own_identity if name in stored_identity and own_identity[name] != stored_identity[name]), None
    )
    if name:
        raise DataError(
            f"{folder_of(root, state.version)} is of a run with {name} {stored_identity[name]}, not {own_identity[name]}: it"
            " was copied here from another --output; delete it, or start with --overwrite"
        )


def check_size(elements: int, root: Place, state: RunState) -> None:
    """Raise DataError for a checkpoint of another number of values, as after a change of a model of the user's own.

    elements: number of values of the run."""
    if state.total != elements:
        raise DataError(
            f"{folder_of(root, state.version)} has {state.total} values of parameters, statistics and loss tables, and this"
            f" run has {elements}: the model or the version of the program has changed; choose another --output, or"
            " --overwrite"
        )


def _check_links(config: Config, facts: RunFacts, root: Place, state: RunState) -> None:
    """Raise UsageError if the links of a run with neighbours have changed since it began, as a file of links can."""
    exchange = config.exchange
    if not isinstance(exchange, NeighbourExchange):
        return
    stored = plan_of(config, facts, root, begin_peers(config, facts, root, state))
    if linked_pairs(stored) != linked_pairs(exchange.plan(facts.num_workers, config.run.seed)):
        raise UsageError(
            f"--topology {exchange.topology} has other links than at the start of this run: restore them, or start with"
            " --overwrite"
        )


def _check_checkpoint(config: Config, facts: RunFacts, root: Place, state: RunState) -> None:
    """Raise DataError or UsageError for a checkpoint from which a run cannot continue."""
    _check_identity(config, root, state)
    check_size(facts.elements, root, state)
    _check_links(config, facts, root, state)


def _can_decide(config: Config, facts: RunFacts, state: RunState) -> bool:
    """Return whether a rule can decide after the epoch that a checkpoint ends, as it could not while the run ended there."""
    if not config.exchange.switches_by_rule and config.run.patience is None:
        return False
    return state.epoch_boundary is not None and state.epoch_boundary < config.total_epochs(facts.rows)


def ensure_checkpoint(config: Config, facts: RunFacts, values: Any, home: Place) -> None:
    """Write checkpoint 0 with a model's initial values, if the run has no checkpoint yet.

    Otherwise, if the newest checkpoint is marked final, reopen it so that training can continue; a spent run of
    neighbours and a run that has converged stay ended. Raises DataError for checkpoints from which this run cannot continue.

    Args:
        config, facts: the run.
        values: the initial flat vector, float32 [P + Q].
        home: the run's folder.
    """
    root = home / CHECKPOINTS
    state = newest_state(root, verify=True)
    if state:
        _check_checkpoint(config, facts, root, state)
        # Neighbours never write again the checkpoint with which they begin. That of a spent run must therefore stay final.
        is_spent = state.version >= config.steps_per_worker(facts.rows) and isinstance(
            config.exchange, NeighbourExchange
        )
        final = is_spent or has_converged(state, config, facts.rows)
        # Before the checkpoint is reopened, so that a kill in between loses nothing.
        if state.final and not final and _can_decide(config, facts, state):
            delete_mark(root, state.version)
        mark_final(root, state, final=final)
        # What this start trains must not be void for a later one with the options of an earlier decision.
        delete_void_stop(root, config)
        return
    # To start again from version 0 would silently discard the training in the damaged checkpoints.
    if any(versions(root)):
        raise DataError(
            f"{root} holds no whole checkpoint, or none of this version of the program; choose another --output,"
            f" or --overwrite"
        )
    folder = folder_of(root, 0)
    slots = slots_of(config)
    momentum = np.zeros(slots * facts.num_parameters, np.float32)
    # One slice for any number of servers: each server reads its own range of it. The state is written last, because it
    # makes the checkpoint complete.
    write_model(folder, 0, values, momentum, slots=slots)
    # A start that was killed before the first update may have changed the workers already.
    workers = config.cohorts.first.workers or facts.num_workers
    clocks = dict.fromkeys(range(workers), 0)
    parts: dict[str, Any] = {"num_servers": 1, "num_parameters": facts.num_parameters, "num_buffers": facts.num_buffers}
    # Here and not on each host, because hosts can find plans that differ.
    exchange = config.exchange
    memory: dict[str, Any] = {}
    if isinstance(exchange, NeighbourExchange):
        memory = {PLAN: plan_to_json(exchange.plan(workers, config.run.seed))}
    identity = config.identity()
    write_state(folder, RunState(0, 0, 0, 0, 0.0, None, False, clocks, 0.0, identity=identity, memory=memory, **parts))
