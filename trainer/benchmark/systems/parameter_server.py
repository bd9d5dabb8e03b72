"""This project's parameter server, synchronous and asynchronous, on committed shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from pipeline.core.arrays import Floats
from trainer.benchmark import arithmetic
from trainer.benchmark.configurations import Configuration, Model, System
from trainer.benchmark.records import RunTimings
from trainer.benchmark.systems.executors import Executors
from trainer.benchmark.systems.timing import CpuMeter
from trainer.benchmark.systems.training import train_once

if TYPE_CHECKING:
    from trainer import Config

PROTOCOL_OF: dict[System, str] = {"ps-sync": "bsp", "ps-async": "asp"}


def make_config(configuration: Configuration, system: System, seed: int, shards: str, output: str) -> Config:
    """Return the trainer's configuration of a run that computes the same as MLlib.

    Workers of a configuration with ``tasks`` represent other nodes, so they use sockets.

    Args:
        configuration: of the run.
        system: "ps-sync" or "ps-async".
        seed: of the sampling and the initial weights.
        shards: URI of the shard set.
        output: folder of the run.
    """
    from trainer import Config, Data, Optimiser, Processes, RunSpec
    from trainer.models import model_from_json
    from trainer.protocols import PROTOCOLS

    hyperparameters = configuration.hyperparameters
    options = {} if configuration.model == "perceptron" else {"intercept": False}
    return Config(
        data=Data(shards, batch_size=configuration.batch, sampling="bernoulli"),
        model=model_from_json({"name": configuration.model, **options}),
        optimiser=Optimiser(
            learning_rate=hyperparameters.step_size,
            momentum=0.0,
            weight_decay=hyperparameters.decay,
            recipe="constant" if hyperparameters.constant_rate else "inverse-sqrt",
            tolerance=configuration.tolerance if configuration.length is None else 0.0,
        ),
        protocol=PROTOCOLS[PROTOCOL_OF[system]](),
        processes=Processes(device="cpu", threads=1, same_host="socket" if configuration.tasks else "memory"),
        run=RunSpec(
            output,
            steps=configuration.max_mini_batches,
            seed=seed,
            # No checkpoints during the run, since they would take time that MLlib does not spend.
            checkpoint_every_s=1e6,
            epoch_checkpoints=False,
        ),
    )


def run_server(
    configuration: Configuration,
    system: System,
    shards: str,
    output: str,
    seed: int,
    features: int,
    meter: CpuMeter,
    executors: Executors | None,
) -> RunTimings:
    """Train a configuration once with this project's parameter server, and return its timings. Raises JobError.

    Args:
        configuration: the model, its data and hyperparameters, equal for all systems of the benchmark.
        system: "ps-sync" or "ps-async".
        shards: URI of the shard set.
        output: the run folder, deleted at the end.
        seed: seed of the sampling and the initial weights.
        features: number of features of a row, for the order of the weights.
        meter: measures the CPU use.
        executors: hosts of the servers and their workers; None for this host.
    """
    run = train_once(make_config(configuration, system, seed, shards, output), executors)
    # A global mini-batch is one push per worker.
    mini_batches = len(run.pushes) // run.num_workers
    return RunTimings(
        mini_batches=mini_batches,
        updates=run.updates,
        examples=int(run.pushes.examples.sum()),
        converged=run.converged,
        seconds=run.seconds,
        # The mean over the whole run if it was too short to leave out each worker's first step.
        compute_s=_time_mini_batch(run.pushes, run.num_workers) or run.seconds / mini_batches,
        read_s=float(run.pushes.read_s.mean()),
        cpu=meter.share_between(run.end_time - run.seconds, run.end_time),
        load_s=run.load_s,
        start_s=max(0.0, run.end_time - run.seconds - run.start_time),
        server_s=None if run.server_cpu_s is None else run.server_cpu_s / len(run.pushes),
        step_s=float(run.pushes.step_s.mean()),
        weights=tuple(flatten_weights(run.weights, configuration.model, features)),
    )


def _time_mini_batch(pushes: pd.DataFrame, workers: int) -> float:
    """Return the seconds per mini-batch after every worker's first push; 0 if no push came after that.

    First mini-batches contain one-time costs: compilers, memory pages, the first drawn mini-batches."""
    start_s = pushes.groupby("worker").seconds.min().max()
    later = pushes[pushes.seconds > start_s]
    return workers * float(later.seconds.max() - start_s) / len(later) if len(later) else 0.0


def initialise_weights(
    configuration: Configuration, shards: str, output: str, seed: int, features: int, executors: Executors | None
) -> Floats:
    """Return the server's initial weights, flat, as the start of the other systems.

    Args:
        configuration: of the runs.
        shards: URI of the shard set.
        output: a folder for the trainer, deleted at the end.
        seed: of the weights.
        features: d.
        executors: see train_once.
    """
    config = make_config(replace(configuration, length=1), "ps-sync", seed, shards, output)
    # The run must learn nothing, but the trainer requires a positive learning rate.
    idle = replace(config, optimiser=replace(config.optimiser, learning_rate=1e-30))
    return flatten_weights(train_once(idle, executors).weights, configuration.model, features)


def flatten_weights(arrays: Mapping[str, Any], model: Model, features: int) -> Floats:
    """Return the trainer's arrays as one vector in MLlib's order, which trainer.benchmark.arithmetic describes.

    Args:
        arrays: arrays by their names in the state_dict.
        model: the trained model.
        features: d.
    """
    in_order = [
        arrays[name] for name in sorted(arrays, key=lambda name: int(name.split(".")[0]))
    ]  # 0.weight, 0.bias, ...
    matrices, biases = ([array for array in in_order if array.ndim == dimensions] for dimensions in (2, 1))
    if not biases:
        return np.asarray(matrices[0], np.float64).reshape(-1)
    layers = [np.concatenate([m.T.reshape(-1), b]) for m, b in zip(matrices, biases, strict=True)]
    flat = np.concatenate(layers).astype(np.float64)
    assert len(flat) == arithmetic.count_weights(model, features)
    return np.asarray(flat)
