"""``make bench-recovery``: how long a run on real processes takes to recover from a lost worker.

    python -m tests.benchmarks.recovery [--exchange all-reduce d-psgd matcha] [--collective mesh torch] [--kills K]
        [--workers N] [--model NAME] [--shards DIR] [--busy N]

Workers are killed in turn, and then frozen in turn, each K times. Median, least and most seconds are printed:

rejoin       until all survivors' next step ends. all-reduce: from the last join request of the next view, when all workers
             are there; d-psgd and matcha: from the moment when the first survivor knows the view without the lost worker
back         from the kill until the killed worker's next step ends, the start of its process included
freeze       from a SIGSTOP until all survivors' next step in the next view ends. all-reduce: with a new worker; d-psgd and
             matcha: without the frozen one; a worker sends a heartbeat every 0.5 s, and counts as lost after 2 s without
pause        d-psgd and matcha: the longest time from one step of a survivor to its next, from the kill until the killed
             worker's next step ends; with all-reduce the survivors wait as long as ``back``
beat         between two heartbeats of a worker, as it sends them; a worker is lost too early if one takes as long as the bar

--busy N runs N loops beside the run, which take all the time of the processor that they get.

All processes append to one log, with the system's monotonic clock. A step of logistic takes milliseconds, so that the
figures are of the recovery and not of a step. The links of d-psgd and matcha are a ring: of three workers, each waits for
both others."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from pipeline.core.errors import JobError
from tests.benchmarks.machine import print_machine
from tests.benchmarks.recovery_client import LOG, LoggedAllReduce, LoggedDPSGD, LoggedMATCHA
from tests.support.configs import make_config
from tests.support.trainer_runs import until
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from trainer import Options, train
from trainer.exchange import EXCHANGES
from trainer.exchange.all_reduce import AllReduce

LOGGED = {kind.name: kind for kind in (LoggedAllReduce, LoggedDPSGD, LoggedMATCHA)}
ROWS = 2000  # of each worker
PAUSE_S = 1.5  # of undisturbed steps before each fault
POLL_S = 0.2  # between two looks at the log
BARS = {"rejoin": 1.0, "back": 5.0, "freeze": 3.0, "pause": 1.0, "beat": AllReduce.worker_timeout_s}


class Line(NamedTuple):
    """A line of the log. kind: join, view, beat or step; number: of the view or Regroup; at: monotonic seconds."""

    kind: str
    worker: int
    pid: int
    number: int
    at: float


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchange", nargs="+", default=[*LOGGED], choices=[*LOGGED], help="(all of them)")
    parser.add_argument("--collective", nargs="+", default=["mesh", "torch"], choices=["mesh", "torch"])
    parser.add_argument("--kills", type=int, default=9, help="and freezes, of each exchange (%(default)s)")
    parser.add_argument("--workers", type=int, default=3, help="without --shards (%(default)s)")
    parser.add_argument("--model", default="logistic", help="(%(default)s)")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="busy loops beside the run (%(default)s)")
    parser.add_argument("--shards", type=Path, help="a shard set (default: random images of 3x8x8)")
    args = parser.parse_args(argv)
    print_machine()
    print(f"{'exchange':>16} {'figure':>8} {'median s':>9} {'least':>7} {'most':>7} {'bar':>5}")
    with tempfile.TemporaryDirectory(prefix="recovery-") as root, _busy(args.busy):
        shards = args.shards or _random_shards(Path(root) / "shards", args.workers)
        os.environ[LOG] = str(Path(root) / "log")  # of all runs, because roles have the environment of the first one
        for label, values in _contenders(args.exchange, args.collective):
            times = measure(shards, Path(root) / label, args.model, args.kills, values)
            for name, measured in times.items():
                figures = (statistics.median(measured), min(measured), max(measured))
                shown = " ".join(f"{each:7.2f}" for each in figures)
                print(f"{label:>16} {name:>8}  {shown} {BARS[name]:5.1f}", flush=True)


@contextmanager
def _busy(loops: int) -> Iterator[None]:
    """Run busy loops in processes of their own until the block ends."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def _contenders(exchanges: list[str], collectives: list[str]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yield the label of each run, and its flat values of a configuration."""
    for exchange in exchanges:
        if exchange != LoggedAllReduce.name:
            yield exchange, {"exchange": exchange}
            continue
        for collective in collectives:
            yield f"{exchange}-{collective}", {"exchange": exchange, "collective": collective}


def _random_shards(folder: Path, workers: int) -> Path:
    folder.mkdir()
    rows = [rows_of(ROWS, worker, 10_000 + worker * ROWS) for worker in range(workers)]
    return write_shards(folder, rows, EVAL_ROWS)


def measure(shards: Path, output: Path, model: str, kills: int, values: dict[str, Any]) -> dict[str, list[float]]:
    """Train until all faults are done. Returns seconds by figure: one per fault, and of all heartbeats.

    values: the exchange and its own values."""
    log = Path(os.environ[LOG])
    log.unlink(missing_ok=True)
    EXCHANGES.update(LOGGED)
    values = values | {"threads": 1, "device": "cpu", "batch_size": 24, "steps": 10_000_000}
    config = make_config(shards, output, model=model, epoch_checkpoints=False, max_restarts=1000, **values)
    times: dict[str, list[float]] = {"rejoin": [], "back": [], "freeze": []}
    if not isinstance(config.exchange, AllReduce):
        times["pause"] = []
    faults = threading.Thread(target=_faults, args=(log, kills, times), daemon=True)
    faults.start()
    logging.disable(logging.WARNING)
    with suppress(JobError):  # the thread interrupts the run, which then writes a checkpoint
        train(config, Options(silent=True, report=False))
    faults.join()
    return times | {"beat": _beat_gaps(_lines(log))}


def _beat_gaps(lines: Iterable[Line]) -> list[float]:
    """Return the seconds from each heartbeat to the next one of the same process."""
    beats: defaultdict[int, list[float]] = defaultdict(list)
    for line in lines:
        if line.kind == "beat":
            beats[line.pid].append(line.at)
    return [next - last for times in beats.values() for last, next in pairwise(times)]


def _faults(log: Path, kills: int, times: dict[str, list[float]]) -> None:
    """Kill and freeze workers in turn, note the times, and end the run as Ctrl-C does."""
    try:
        until(lambda: log.exists() and any(line.kind == "step" for line in _lines(log)), "the run trains", 60)
        workers = len({line.worker for line in _lines(log)})
        for index in range(kills):
            killed = _lose(log, index % workers, workers, signal.SIGKILL)
            for name in times.keys() & {"rejoin", "back", "pause"}:
                times[name].append(killed[name])
        for index in range(kills):
            times["freeze"].append(_lose(log, index % workers, workers, signal.SIGSTOP)["freeze"])
    finally:
        os.kill(os.getpid(), signal.SIGINT)


def _lose(log: Path, worker: int, workers: int, number: int) -> dict[str, float]:
    """Kill or freeze a worker, and wait until a new process has its place. Returns seconds by figure.

    number: of the signal."""
    time.sleep(PAUSE_S)
    pid = _pid(f"worker-{worker}")
    before = log.stat().st_size
    begin = time.monotonic()
    os.kill(pid, number)
    later: list[Line] = []

    def is_back() -> bool:
        """Return whether all survivors and the new process have made a step in the next view."""
        time.sleep(POLL_S)  # the log is long, and to read it takes time from the run
        later[:] = [line for line in _lines(log, before) if line.pid != pid]
        return len(_first_steps(later, worker)) == workers

    until(is_back, f"all workers step again without process {pid}", 60)
    return _seconds(later, worker, begin)


def _first_steps(lines: list[Line], lost: int) -> dict[int, Line]:
    """Return each worker's first step in the next view or a later one; empty before that view.

    lost: the worker that was lost. Under all-reduce the next view is the first with its new process."""
    views = [line.number for line in lines if line.kind == "view" and line.worker != lost]
    views = views or [line.number for line in lines if line.kind == "step" and line.worker == lost]
    if not views:
        return {}
    steps = [line for line in lines if line.kind == "step" and line.number >= views[0]]
    return {line.worker: line for line in reversed(steps)}


def _seconds(lines: list[Line], lost: int, begin: float) -> dict[str, float]:
    """Return the seconds of a recovery by figure.

    Args:
        lines: of the log since the fault, without those of the lost process.
        lost: its worker.
        begin: time of the fault (monotonic seconds).
    """
    steps = _first_steps(lines, lost)
    back = steps.pop(lost)
    survivors = max(line.at for line in steps.values())
    view = min(line.number for line in steps.values())
    joins = [line.at for line in lines if line.kind == "join" and line.number == view]
    views = [line.at for line in lines if line.kind == "view" and line.number == view]
    known = max(joins) if joins else min(views)
    ends = {worker: [begin] for worker in steps}
    for line in lines:
        if line.kind == "step" and line.worker != lost and line.at <= max(back.at, survivors):
            ends[line.worker].append(line.at)
    pause = max(next - last for times in ends.values() for last, next in pairwise(times))
    return {"rejoin": survivors - known, "back": back.at - begin, "freeze": survivors - begin, "pause": pause}


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
