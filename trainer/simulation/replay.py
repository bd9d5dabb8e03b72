"""A run computed again from its log: the same gradients in the same order give the same parameters, bit for bit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from tqdm import tqdm

from pipeline.errors import DataError, JobError, UsageError
from trainer.checkpoints.read import newest, read_vector
from trainer.config import Config, Facts
from trainer.coordination.weights import Weights
from trainer.home.place import Place
from trainer.plan import usual_batch, worker_rate
from trainer.run_files import CHECKPOINTS, CONFIG, METRICS, PUSHES
from trainer.runlog.read import read_events, read_pushes
from trainer.runlog.run_folder import RunRecord
from trainer.server.parameter_slice import ParameterSlice
from trainer.simulation.compute import COMPUTES, Compute, Floats, facts_of


@dataclass(frozen=True)
class Replayed:
    """version: of the newest checkpoint; replayed, logged: the parameters [P + Q] there, computed again and as they were
    written; pushes: gradients that were computed."""

    version: int
    pushes: int
    replayed: Floats
    logged: Floats

    @property
    def is_equal(self) -> bool:
        """Bit for bit."""
        return self.replayed.tobytes() == self.logged.tobytes()


def replay(run: Place, *, quiet: bool = True) -> Replayed:
    """Take the gradients of a run, real or virtual, in the order of its log, up to its newest checkpoint.

    Holds the parameters of every version that a later gradient was computed at. Each gradient is computed once, in this
    process, with as many threads as a worker of the run had: other numbers of threads round differently, and so may
    another machine. Raises DataError where the folder holds no such run."""
    config, simulated, num_workers, rows = _read(run)
    compute = COMPUTES[simulated](config, num_workers)
    facts = facts_of(compute, num_workers, rows)
    version = newest(run / CHECKPOINTS)
    if version is None:
        raise DataError(f"{run} has no whole checkpoint, so there is nothing to hold a replay against")
    pushes = read_pushes(run / PUSHES)
    used = pushes[(pushes["accepted"] == 1) & (pushes["version"] <= version)]
    if (len(used) and int(used["version"].iloc[-1]) != version) or used["version"].nunique() != version:
        raise DataError(f"{run / PUSHES} lacks updates of the {version} that its newest checkpoint has: it is damaged")
    values = _replay(config, facts, compute, tqdm(_updates(used), total=version, unit=" updates", disable=quiet), used)
    return Replayed(version, len(used), values, read_vector(run / CHECKPOINTS, version))


def main(run: Place, *, quiet: bool = False) -> int:
    """Replay and say what came of it; the exit code is 0 for the same bits."""
    done = replay(run, quiet=quiet)
    if done.is_equal:
        print(f"{run}: {done.pushes:,} gradients in {done.version:,} updates, the same parameters bit for bit")
        return 0
    gap = float(np.max(np.abs(done.replayed - done.logged)))
    raise JobError(
        f"{run}: at version {done.version} the replayed parameters differ from the run's by {gap:.3g} at most"
    )


def _read(run: Place) -> tuple[Config, str, int, int]:
    """(configuration with the threads of its workers, kind of compute, workers, rows). Raises DataError."""
    try:
        record = RunRecord.from_json(json.loads((run / CONFIG).read_bytes()))
        start = [event for event in read_events(run / METRICS) if event["event"] == "start"][-1]
        threads = int(start["plan"]["threads_per_worker"])
    except FileNotFoundError:
        raise DataError(f"{run} holds no run: {run / CONFIG} is not there") from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise DataError(f"{run} is damaged, or of another version: its configuration cannot be read") from None
    if record.config.data.follow:
        raise UsageError(
            f"{run} followed a stream, whose rows a replay has not in its order; a run without --follow has"
        )
    simulated = (record.simulated or {}).get("compute", "real")
    threads = threads if record.simulated is None else record.config.processes.threads or 1
    config = replace(record.config, processes=replace(record.config.processes, threads=threads))
    return config, simulated, record.num_workers, record.rows


def _updates(used: pd.DataFrame) -> Iterator[list[tuple[int, int, int, int, int]]]:
    """The gradients of each update: (version, worker, clock, version_pulled, examples), in the order of their sum."""
    update: list[tuple[int, int, int, int, int]] = []
    columns = ("version", "worker", "clock", "version_pulled", "examples")
    for row in zip(*(used[name].tolist() for name in columns), strict=True):
        if update and row[0] != update[0][0]:
            yield update
            update = []
        update.append(row)
    if update:
        yield update


def _replay(
    config: Config, facts: Facts, compute: Compute, updates: Iterator[list[tuple[int, ...]]], used: pd.DataFrame
) -> Floats:
    part = ParameterSlice(
        compute.start().copy(),
        np.zeros(facts.num_parameters, np.float32),
        config.momentum_of(facts.num_workers),
        facts.num_workers,
        config.pushed_statistics(facts.num_workers),
    )
    by_examples = config.data.sampling == "bernoulli"
    weights = Weights(config.protocol, facts.num_workers, by_examples=by_examples, usual=usual_batch(config, facts))
    wanted = Counter(used["version_pulled"].tolist())  # gradients by version that are still to be computed there
    held = {0: part.values.copy()}
    accepted, per_epoch = 0, facts.num_workers * config.steps_per_epoch(facts.rows)
    for update in updates:
        vectors = []
        for _, worker, clock, pulled, _ in update:
            vectors.append(compute.step(worker, clock, [held[pulled]]).vector)
            wanted[pulled] -= 1
            if not wanted[pulled]:
                del held[pulled]
        version, examples = update[0][0], [row[4] for row in update]
        rate = worker_rate(config, facts, accepted / per_epoch) * weights.correction(examples)
        part.apply(vectors, rate, weights.of([version - 1 - row[3] for row in update], examples))
        accepted += len(update)
        if wanted[version]:
            held[version] = part.values.copy()
    values: Floats = part.values
    return values
