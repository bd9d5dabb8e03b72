"""A run computed again from its log: the same gradients in the same order give the same parameters, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from tqdm import tqdm

from pipeline.core.errors import DataError, JobError, UsageError
from trainer.checkpoints.read import newest, read_vector
from trainer.config import Config, Facts
from trainer.home.place import Place
from trainer.rules import build_slice, build_weights, worker_rate
from trainer.run_files import CHECKPOINTS, CONFIG, METRICS, PUSHES
from trainer.runlog.read import CUTS, Event, iter_events, read_pushes
from trainer.runlog.run_folder import read_record
from trainer.simulation.compute import COMPUTES, Compute, Floats, facts_of

USED = ("version", "worker", "clock", "version_pulled", "examples")  # what is needed of each gradient


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
    config, simulated, num_workers, rows, spans = _read(run)
    compute = COMPUTES[simulated](config, num_workers)
    facts = facts_of(compute, num_workers, rows)
    version = newest(run / CHECKPOINTS)
    if version is None:
        raise DataError(f"{run} has no whole checkpoint, so there is nothing to hold a replay against")
    pushes = read_pushes(run / PUSHES, ["accepted", *USED])
    used = pushes[(pushes["accepted"] == 1) & (pushes["version"] <= version)]
    if (len(used) and int(used["version"].iloc[-1]) != version) or used["version"].nunique() != version:
        raise DataError(f"{run / PUSHES} lacks updates of the {version} that its newest checkpoint has: it is damaged")
    updates = tqdm(_updates(used), total=version, unit=" updates", disable=quiet)
    values = _replay(spans, facts, compute, updates, used)
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


def configurations(events: Iterable[Event]) -> list[tuple[int, Config]]:
    """Return which configuration made which updates: (first version, configuration), ascending.

    The configuration of a start holds from the update after the checkpoint that the start went on from, up to a later
    start's. ``processes.threads`` is the number of threads that a worker of that start had. Raises KeyError, TypeError or
    ValueError for a start that cannot be read."""
    spans: list[tuple[int, Config]] = []
    current: Config | None = None
    for event in events:
        if event["event"] not in CUTS:
            continue
        if event["event"] == "start":
            current = _config_of(event)
        # A start names the newest checkpoint; the generation that follows names the one that was sound.
        first = int(event.get(CUTS[event["event"]]) or 0) + 1
        spans = [span for span in spans if span[0] < first]
        if current is not None and (not spans or spans[-1][1] is not current):
            spans.append((first, current))
    return spans


def _config_of(start: Event) -> Config:
    config = Config.from_json(start["config"])
    threads = int(start["plan"]["threads_per_worker"])
    if start.get("simulated") is not None:
        threads = config.processes.threads or 1
    return replace(config, processes=replace(config.processes, threads=threads))


def _read(run: Place) -> tuple[Config, str, int, int, list[tuple[int, Config]]]:
    """(configuration, kind of compute, workers, rows, ``configurations``). Raises DataError."""
    try:
        record = read_record(run)
        spans = configurations(iter_events(run / METRICS))
        threads = spans[-1][1].processes.threads
    except FileNotFoundError:
        raise DataError(f"{run} holds no run: {run / CONFIG} is not there") from None
    except (ValueError, KeyError, TypeError, IndexError, UsageError):
        raise DataError(f"{run} is damaged, or of another version: its configuration cannot be read") from None
    if record.config.data.follow:
        raise UsageError(
            f"{run} followed a stream, whose rows a replay has not in its order; a run without --follow has"
        )
    simulated = (record.simulated or {}).get("compute", "real")
    config = replace(record.config, processes=replace(record.config.processes, threads=threads))
    return config, simulated, record.num_workers, record.rows, spans


def _updates(used: pd.DataFrame) -> Iterator[list[tuple[int, int, int, int, int]]]:
    """The gradients of each update: (version, worker, clock, version_pulled, examples), in the order of their sum."""
    update: list[tuple[int, int, int, int, int]] = []
    for row in zip(*(used[name].tolist() for name in USED), strict=True):
        if update and row[0] != update[0][0]:
            yield update
            update = []
        update.append(row)
    if update:
        yield update


def _replay(
    spans: Sequence[tuple[int, Config]],
    facts: Facts,
    compute: Compute,
    updates: Iterator[list[tuple[int, ...]]],
    used: pd.DataFrame,
) -> Floats:
    config = spans[0][1]  # the others differ in the length of the run and in threads alone
    momentum = np.zeros(facts.num_parameters, np.float32)
    part = build_slice(config, facts.num_workers, compute.start().copy(), momentum)
    weights = build_weights(config, facts)
    wanted = Counter(used["version_pulled"].tolist())  # gradients by version that are still to be computed there
    held = {0: part.values.copy()}
    accepted, per_epoch = 0, facts.num_workers * config.steps_per_epoch(facts.rows)
    later = list(spans)
    for update in updates:
        while later and later[0][0] <= update[0][0]:
            config = later.pop(0)[1]
            compute.set_threads(config.processes.threads)
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
