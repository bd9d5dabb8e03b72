"""The process of a worker: loads its rows, builds the model, joins the exchange of the run, and trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from trainer.config import Config, RunFacts
from trainer.data.batches import Batches, build_batches
from trainer.data.cohorts import build_cohort_batches
from trainer.data.gossip import read_rows
from trainer.data.loading import load_worker
from trainer.data.mapped_images import MappedImages
from trainer.data.network import build_network
from trainer.data.pinned import open_pinned
from trainer.data.prefetch import Prefetch
from trainer.data.repartition import all_rows
from trainer.data.rows import Rows
from trainer.data.shards import Shards
from trainer.home.folders import Folders
from trainer.models.build import NetworkAndTask
from trainer.models.devices import load_libraries, pick_device
from trainer.rules import local_plan
from trainer.runlog.events import log_event
from trainer.runlog.example_ledger import recorded_losses
from trainer.transport.sockets import Secret
from trainer.worker.clients.base import Client, StageSwitch
from trainer.worker.follow import follow
from trainer.worker.gossip import ExampleLink, WorkerGossip
from trainer.worker.loop import TableBatches, train
from trainer.worker.step import Step


def main(
    config: Config,
    facts: RunFacts,
    worker: int,
    addresses: Sequence[str],
    secret: Secret,
    threads: int,
    place: int,
    folders: Folders,
) -> None:
    """Run a worker until it has no more turns. Raises DataError for broken shards.

    Args:
        config, facts: the run.
        worker: number of the worker.
        addresses: of the servers.
        secret: authenticates connections.
        threads: of torch.
        place: number among the workers of this host.
        folders: the run's folders on this host.
    """
    torch.set_num_threads(threads)
    opened = open_pinned(config.data, digest=facts.shards)
    shards = replace(opened, mapped=folders.rows, kept=folders.kept)
    network = build_network(config, shards)
    batches = _batches(config, facts, shards, worker, network, folders)
    device = pick_device(config.processes.device, place)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL takes the current one
    stages = config.stage_configs()
    number: int | None = 0  # server 0 corrects it
    with Prefetch(batches.make) as mini_batches:
        while number is not None:
            stage = stages[number]
            # By name, because a command line reads the exchange too, and must load neither sockets nor torch.
            module = import_module(stage.exchange.client)
            client: Client = module.open_client(config, facts, worker, addresses, secret, folders)
            # After the client, because the model computes in the client's vectors. The model of an earlier stage
            # computes in vectors that are gone.
            network = network if number == 0 else build_network(config, shards)
            step = Step(stage, network, client.pulled, client.pushed, device, facts.num_workers)
            if device.type == "cuda":
                load_libraries(device)
            source = TableBatches(batches, step) if batches.sampler.reads_table else mini_batches
            gossip = None
            if batches.gossip:
                assert isinstance(client, ExampleLink), "the configuration refuses other exchanges"
                read = partial(read_rows, shards, targets=network.targets)
                keeps_losses = config.reads_losses and config.run.example_ledger
                losses = partial(recorded_losses, folders.home) if keeps_losses else None
                gossip = WorkerGossip(batches.gossip, client, mini_batches.drop_ahead, read, losses)
            plan = partial(local_plan, stage, facts)
            seed = config.run.seed
            loop = partial(train, client, source, step, seed, worker, batches.ends_of_passes, gossip, plan)
            number = _train_stage(client, loop)


def _train_stage(client: Client, loop: Callable[[], None]) -> int | None:
    """Train until the client has no more turns, and close it. Returns the number of the next stage, None at the end.

    loop: trains."""
    try:
        loop()
    except StageSwitch as change:
        return change.stage
    finally:
        client.close()
    return None


def _batches(
    config: Config, facts: RunFacts, shards: Shards, worker: int, network: NetworkAndTask, folders: Folders
) -> Batches:
    """Load the worker's rows, log how long that took, and return its mini-batches.

    Args:
        config, facts: the run.
        shards: its set.
        worker: number of the worker.
        network: the model and its task.
        folders: the run's folders on this host.
    """
    start = time.monotonic()
    # Since a resume with other workers, a worker may need rows of all shards.
    if config.cohorts.entries:
        [(batches, own_rows)] = build_cohort_batches(config, shards, [worker], targets=network.targets)
        _log_loaded(folders.work, worker, own_rows, start)
        return batches
    targets = network.targets
    repartitions = config.data.repartition != "fixed"
    rows = all_rows(shards, targets=targets) if repartitions else load_worker(shards, worker, targets=targets)
    _log_loaded(folders.work, worker, rows, start)
    followed = follow(
        folders.home,
        folders.work,
        worker,
        shards,
        rows,
        targets=targets,
        looks=config.data.follow,
    )
    return build_batches(config, shards, rows, worker, facts.num_workers, follow=followed)


def _log_loaded(work: Path, worker: int, rows: Rows, start: float) -> None:
    seconds = time.monotonic() - start
    images = rows.images_NCHW
    mapped = isinstance(images, MappedImages)
    log_event(work, "loaded", worker=worker, rows=len(rows), bytes=images.nbytes, load_s=seconds, mapped=mapped)
