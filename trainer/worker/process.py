"""The process of a worker: repeatedly draws a mini-batch, computes its gradient, pushes it and pulls parameters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from trainer.config import Config, Facts
from trainer.coordination.orders import Measured
from trainer.data.batches import MiniBatch, build_batches
from trainer.data.prefetch import Prefetch
from trainer.data.shards import Rows, Shards, load_worker, open_pinned
from trainer.home.place import place_of
from trainer.models.build import Built, build
from trainer.models.devices import pick_device
from trainer.runlog.events import log_event
from trainer.transport.agreement import Agreement
from trainer.transport.sockets import Secret
from trainer.watchdog import kick
from trainer.worker.follow import follow
from trainer.worker.server_client import MustRejoin, ServerClient, Turn
from trainer.worker.step import Step, step_seed


def main(
    config: Config,
    facts: Facts,
    worker: int,
    addresses: Sequence[str],
    secret: Secret,
    threads: int,
    place: int,
    work: Path | None = None,
) -> None:
    """Run a worker until the servers end the run. Raises DataError for broken shards.

    Args:
        config, facts: the run.
        worker: number of the worker.
        addresses: of the servers.
        secret: authenticates connections.
        threads: of torch.
        place: number among the workers of this host.
        work: work folder of this host.
    """
    torch.set_num_threads(threads)
    shards = open_pinned(config.data, num_workers=facts.num_workers)
    built = build(config.model, shards.inputs, config.model_seed)
    log = work or Path(config.run.output)
    rows = _load(log, shards, worker, built)
    use_memory = config.processes.same_host == "memory"
    client = ServerClient(Agreement.of(config, facts), facts, worker, list(addresses), secret, use_memory=use_memory)
    device = pick_device(config.processes.device, place)
    step = Step(config, built, client.pulled, client.pushed, device, facts.num_workers)
    followed = follow(
        partial(place_of, config.run.output),
        log,
        worker,
        shards,
        rows,
        targets=built.targets,
        looks=config.data.follow,
    )
    batches = build_batches(config, shards, rows, worker, facts.num_workers, follow=followed)
    with Prefetch(batches.make) as ahead:
        _work(config, worker, client, ahead, step)
    client.close()


def _load(work: Path, shards: Shards, worker: int, built: Built) -> Rows:
    """Load the worker's rows, and log how long that took."""
    begun = time.monotonic()
    rows = load_worker(shards, worker, targets=built.targets)
    seconds = time.monotonic() - begun
    size = rows.images_NCHW.nbytes
    log_event(work, "loaded", worker=worker, rows=len(rows), bytes=size, load_s=seconds)
    return rows


def _work(config: Config, worker: int, client: ServerClient, ahead: Prefetch[MiniBatch], step: Step) -> None:
    turn = client.join()
    while turn:
        kick()
        begun = time.monotonic()
        batch, draw, read_s = ahead.at(turn.clock)
        outcome = step(batch, step_seed(config.run.seed, worker, turn.clock), partial(client.is_cancelled, turn))
        loss, correct = outcome or (0.0, 0)
        examples = len(batch.labels) if outcome else 0
        seconds = time.monotonic() - begun
        measured = Measured(examples, loss, correct, seconds, read_s, draw.seen())
        turn = _push(client, turn, measured, given_up=outcome is None)


def _push(client: ServerClient, turn: Turn, measured: Measured, *, given_up: bool) -> Turn | None:
    try:
        return client.give_up(turn, measured) if given_up else client.push(turn, measured)
    except MustRejoin:
        return client.join()
