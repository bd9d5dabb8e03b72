"""``make bench-recovery``: how long a run of all-reduce on real processes takes to recover from a lost worker.

    python -m tests.benchmarks.recovery [--kills K] [--workers N] [--model NAME] [--shards DIR] [--collective mesh torch]

Workers are killed in turn, and then frozen in turn, each K times. Median, least and most seconds are printed:

rejoin       from the last join request of the next view, when all workers are there, until all survivors' next step ends
back         from the kill until the killed worker's next step ends, the start of its process included
freeze       from a SIGSTOP until the survivors' next step with a new worker ends; a worker sends a heartbeat every 0.5 s,
             and counts as lost after 2 s without one

All processes append to one log, with the system's monotonic clock. A step of logistic takes milliseconds, so that the
figures are of the recovery and not of a step."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import statistics
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from pipeline.core.errors import JobError
from tests.benchmarks.machine import print_machine
from tests.benchmarks.recovery_client import LOG, LoggedAllReduce
from tests.support.configs import make_config
from tests.support.trainer_runs import until
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from trainer import Options, train
from trainer.exchange import EXCHANGES

Collective = Literal["mesh", "torch"]
ROWS = 2000  # of each worker
PAUSE_S = 1.5  # of undisturbed steps before each fault
POLL_S = 0.2  # between two looks at the log
BARS = {"rejoin": 1.0, "back": 5.0, "freeze": 3.0}


class Line(NamedTuple):
    """A line of the log. number: of a view or Regroup; at: monotonic seconds."""

    kind: str
    worker: int
    pid: int
    number: int
    at: float


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=9, help="and freezes, of each collective (%(default)s)")
    parser.add_argument("--workers", type=int, default=3, help="without --shards (%(default)s)")
    parser.add_argument("--model", default="logistic", help="(%(default)s)")
    parser.add_argument("--shards", type=Path, help="a shard set (default: random images of 3x8x8)")
    parser.add_argument("--collective", nargs="+", default=["mesh", "torch"], choices=["mesh", "torch"])
    args = parser.parse_args(argv)
    print_machine()
    print(f"{'collective':>10} {'figure':>8} {'median s':>9} {'least':>7} {'most':>7} {'bar':>5}")
    with tempfile.TemporaryDirectory(prefix="recovery-") as root:
        shards = args.shards or _random_shards(Path(root) / "shards", args.workers)
        os.environ[LOG] = str(Path(root) / "log")  # of all runs, because roles have the environment of the first one
        for collective in args.collective:
            times = measure(shards, Path(root) / collective, collective, args.model, args.kills)
            for name, measured in times.items():
                figures = (statistics.median(measured), min(measured), max(measured))
                shown = " ".join(f"{each:7.2f}" for each in figures)
                print(f"{collective:>10} {name:>8}  {shown} {BARS[name]:5.1f}", flush=True)


def _random_shards(folder: Path, workers: int) -> Path:
    folder.mkdir()
    rows = [rows_of(ROWS, worker, 10_000 + worker * ROWS) for worker in range(workers)]
    return write_shards(folder, rows, EVAL_ROWS)


def measure(shards: Path, output: Path, collective: Collective, model: str, kills: int) -> dict[str, list[float]]:
    """Train until all faults are done. Returns seconds by figure, one per fault."""
    log = Path(os.environ[LOG])
    log.unlink(missing_ok=True)
    EXCHANGES[LoggedAllReduce.name] = LoggedAllReduce
    values: dict[str, Any] = {
        "collective": collective,
        "threads": 1,
        "device": "cpu",
        "batch_size": 24,
        "steps": 10_000_000,
    }
    config = make_config(
        shards, output, model=model, exchange="all-reduce", epoch_checkpoints=False, max_restarts=1000, **values
    )
    times: dict[str, list[float]] = {"rejoin": [], "back": [], "freeze": []}
    faults = threading.Thread(target=_faults, args=(log, kills, times), daemon=True)
    faults.start()
    logging.disable(logging.WARNING)
    with suppress(JobError):  # the thread interrupts the run, which then writes a checkpoint
        train(config, Options(silent=True, report=False))
    faults.join()
    return times


def _faults(log: Path, kills: int, times: dict[str, list[float]]) -> None:
    """Kill and freeze workers in turn, note the times, and end the run as Ctrl-C does."""
    try:
        until(lambda: log.exists() and any(line.kind == "step" for line in _lines(log)), "the run trains", 60)
        workers = len({line.worker for line in _lines(log)})
        for index in range(kills):
            rejoin, back = _lose(log, index % workers, workers, signal.SIGKILL)
            times["rejoin"].append(rejoin)
            times["back"].append(back)
        for index in range(kills):
            times["freeze"].append(_lose(log, index % workers, workers, signal.SIGSTOP)[1])
    finally:
        os.kill(os.getpid(), signal.SIGINT)


def _lose(log: Path, worker: int, workers: int, number: int) -> tuple[float, float]:
    """Kill or freeze a worker. Returns seconds from the last join request until all step, and from the fault until then.

    number: of the signal."""
    time.sleep(PAUSE_S)
    pid = _pid(f"worker-{worker}")
    before = log.stat().st_size
    begin = time.monotonic()
    os.kill(pid, number)

    def first_steps() -> dict[int, Line]:
        """Return each worker's first step in the view in which the new process takes part."""
        time.sleep(POLL_S)  # the log is long, and to read it takes time from the run
        later = _lines(log, before)
        view = next(
            (line.number for line in later if line.kind == "step" and line.worker == worker and line.pid != pid), 0
        )
        steps = [line for line in later if line.kind == "step" and line.number == view]
        return {line.worker: line for line in reversed(steps)}

    until(lambda: len(first_steps()) == workers, f"all workers step again without process {pid}", 60)
    steps = first_steps()
    view = steps[worker].number
    joins = [line for line in _lines(log, before) if line.kind == "join" and line.number == view]
    all_there = max(line.at for line in joins)
    survivors = max(line.at for line in steps.values() if line.worker != worker)
    return survivors - all_there, steps[worker].at - begin if number == signal.SIGKILL else survivors - begin


def _pid(role: str) -> int:
    """Return the process of a role, which is a child of this one's fork server."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.name() == role and child.status() != psutil.STATUS_ZOMBIE:
                return int(child.pid)
    raise AssertionError(f"no process {role}")


def _lines(log: Path, begin: int = 0) -> list[Line]:
    """Return the lines of the log after its first ``begin`` bytes."""
    with log.open("rb") as file:
        file.seek(begin)
        texts = file.read().decode().splitlines()
    lines = []
    for text in texts:
        kind, worker, pid, number, at = text.split(",")
        lines.append(Line(kind, int(worker), int(pid), int(number), float(at)))
    return lines


if __name__ == "__main__":
    main()
