"""The execution of a study: makes the shard sets, keeps the cores busy with runs, and writes the ledger."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from pipeline.core.errors import DataError, JobError, error_class
from pipeline.core.provenance import provenance
from trainer.report.terminal import percent
from trainer.study.plan.cases import SHARDS_KEY, open_ready
from trainer.study.plan.study_plan import Run, StudyPlan
from trainer.study.run.children import StudyProcess, run_child, run_forked
from trainer.study.run.ledger import LEDGER, Contents, Record, StudyLedger
from trainer.study.run.measure import code_digest
from trainer.study.run.progress import RunProgress, cost_class, duration, fraction_of_run, progress_line, remaining_s
from trainer.study.run.sets import SETS, SetKey, Sets, identity_of

RUNS = "runs"
SETS_AT_ONCE = 24  # made in one start of Spark before their runs; limits the space on the disk
TRIES = 2  # of a run whose process is killed, usually by the system for lack of memory
SILENCE_S = 300.0  # without a finished run until the progress of running ones is printed
MAX_FAILURES = 3  # failed runs after which the others are expected to fail too

T = TypeVar("T")


class Runner:
    """The runs of a study in progress.

    Args:
        plan: the plan of the study.
        root: folder of the study.
        jobs: runs at once.
        say: prints a line for the user.
        keep_sets: whether to keep the shard sets after their runs.
    """

    def __init__(
        self, plan: StudyPlan, root: Path, jobs: int, say: Callable[[str], None], *, keep_sets: bool = False
    ) -> None:
        self.plan = plan
        self.root = root
        self.jobs = jobs
        self.say = say
        self.keep_sets = keep_sets
        self.ledger = StudyLedger(root / LEDGER, owned=True)
        self.sets = Sets(plan, root)
        self.contents = Contents(self.ledger.records_of_plan(plan), self.sets.owner)
        self.run_seconds: dict[str, list[float]] = {}  # seconds of the runs of this start, by cost class
        self.start_times: dict[Run, float] = {}  # start times of running runs
        self.children: set[StudyProcess] = set()
        self.failures: dict[Run, JobError] = {}
        self.stopped = False
        self.code = code_digest()  # of the modules that the processes of this study load

    def run(self, runs: Sequence[Run]) -> None:
        """Do the given runs that are not in the ledger, in their order.

        The other runs continue after one fails. Its error is raised when they are finished, or as soon as MAX_FAILURES
        have failed. Raises DataError before the first run if a ready set, named with ``shards`` in the plan, contains
        other images than the sets of the other runs."""
        waiting = [run for run in runs if run not in self.ledger]
        self._check_ready(waiting)
        total = len(runs)
        self.left = len(waiting)
        self.jobs = max(1, min(self.jobs, len(waiting)))
        self.say(f"{total} runs, {total - len(waiting)} of them done, {self.jobs} at once")
        # A set is deleted after the last run that needs it, to bound the space on the disk.
        open_runs = Counter(map(self.sets.key, waiting))
        self.sets.adopt(map(self.sets.key, waiting))
        for part in batches(waiting, self.sets.key, SETS_AT_ONCE):
            keys = list(dict.fromkeys(map(self.sets.key, part)))
            if missing := self.sets.missing(keys):
                self.say(f"sharding: {len(missing)} {'sets' if len(missing) > 1 else 'set'}")
            self.sets.make(missing)
            self._train(part, open_runs, waiting, total)
        if self.failures:
            raise next(iter(self.failures.values()))
        self._drop({self.sets.key(run) for run in runs})
        if not self.keep_sets:
            self.sets.drop_datasets()
        # A study that is killed between a run's line in the ledger and the deletion of its folder leaves the folder.
        shutil.rmtree(self.root / RUNS, ignore_errors=True)
        with suppress(OSError):  # missing, or not empty
            (self.root / SETS).rmdir()

    def prepare(self, runs: Sequence[Run]) -> None:
        """Make the shard sets of the given runs that are not in the ledger, record them, and train nothing.

        Raises the error of the job that failed."""
        waiting = [run for run in runs if run not in self.ledger]
        self._check_ready(waiting)
        keys = self.sets.missing(map(self.sets.key, waiting))
        self.say(f"sharding: {len(keys)} {'set' if len(keys) == 1 else 'sets'}")
        self.sets.make(keys)
        self.sets.record_prepared()
        if not self.keep_sets:
            self.sets.drop_datasets()

    def _check_ready(self, waiting: Sequence[Run]) -> None:
        """Raise DataError if a ready set, which the plan names with ``shards``, was made from other images.

        The sets that the study makes are known to share one data set."""
        for cell in dict.fromkeys(run.cell for run in waiting):
            if SHARDS_KEY in self.plan.shardings[cell.sharding]:
                identity = identity_of(open_ready(self.plan, cell.sharding))
                self.contents.add({"run": str(Run(cell, self.plan.seeds[0])), **identity})

    def _train(self, part: Sequence[Run], open_runs: Counter[SetKey], waiting: Sequence[Run], total: int) -> None:
        """Do runs in parallel, and append each to the ledger when it ends.

        A failed run does not stop the others, unless MAX_FAILURES runs have failed. Any other error does: all running
        processes are killed.

        Args:
            part: the runs to do.
            open_runs: number of runs that still need each set, which is deleted after the last of them.
            waiting: the unfinished runs of this start, for the estimate of the time left.
            total: number of all runs of this start, for the lines that are printed.
        """
        pool = ThreadPoolExecutor(self.jobs)
        try:
            futures: dict[Future[Record], Run] = {pool.submit(self._measure, run): run for run in part}
            # A queue, because a signal during concurrent.futures.wait can raise RuntimeError: release unlocked lock.
            ended: SimpleQueue[Future[Record]] = SimpleQueue()
            for future in futures:
                future.add_done_callback(ended.put)
            pending = len(futures)
            while pending:
                completed = next_items(ended, SILENCE_S)
                pending -= len(completed)
                if not completed:
                    under_way = self._running()
                    self.say(progress_line(list(under_way.values()), self._left_s(waiting, under_way)))
                # Record finished runs before an error is raised.
                for future in sorted(completed, key=lambda future: future.exception() is not None):
                    run = futures[future]
                    error = future.exception()
                    self.start_times.pop(run, None)
                    if isinstance(error, JobError):
                        self._note_failure(run, error)
                        continue
                    record = future.result() | {"made": provenance()}
                    self.contents.add(record)
                    self.ledger.append(record)
                    shutil.rmtree(self._folder(run), ignore_errors=True)
                    self.left -= 1
                    if not record["failed"]:  # diverged runs are shorter
                        self.run_seconds.setdefault(cost_class(run), []).append(record["wall_s"])
                    self.say(self._line(run, record, total, waiting))
                    key = self.sets.key(run)
                    open_runs[key] -= 1
                    if not open_runs[key] and key.seed is not None:
                        self._drop({key})
        except BaseException:
            self.stopped = True
            for child in list(self.children):
                child.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _note_failure(self, run: Run, error: JobError) -> None:
        """Note a failed run. Raises the first error once MAX_FAILURES runs have failed."""
        self.failures[run] = error
        self.say(f"not done: {error}")
        if len(self.failures) >= MAX_FAILURES:
            raise next(iter(self.failures.values()))

    def _drop(self, keys: set[SetKey]) -> None:
        if not self.keep_sets:
            for key in keys:
                self.sets.drop(key)

    def _measure(self, run: Run) -> Record:
        """Return the record of one run, made by a process of its own.

        If the process is killed it is started again, TRIES times in all. Raises the error that the process reported,
        and JobError if it is killed every time."""
        folder = self._folder(run)
        record = folder.with_name(f"{folder.name}.json")
        folder.parent.mkdir(exist_ok=True)
        record.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed study
        self.start_times[run] = time.monotonic()
        plan = asdict(self.plan) | {"seeds": [run.seed]}
        task = {"plan": plan, "cell": run.cell, "seed": run.seed, "shards": self.sets.uri(self.sets.key(run))}
        task |= {"folder": str(folder), "record": str(record)}
        for _ in range(TRIES):
            code, output = self.execute(task, folder.with_name(f"{folder.name}.log"))
            if code == 0:
                result: Record = json.loads(record.read_bytes())
                record.unlink()
                return result
            if self.stopped:
                break
            # The process reported an error, so that a second try would fail too.
            if code > 0:
                raise error_class(code)(f"{run}: {output or 'failed without a message'}{self._advice(code, run)}")
        raise JobError(f"{run}: its process was killed {TRIES} times; fewer --jobs need less memory")

    def execute(self, task: Mapping[str, object], log: Path) -> tuple[int, str]:
        """Do the task of one run in a process, and return its exit code and its last line.

        In virtual time a run uses one thread, so that the cores do several runs. Its process is a fork, unless the code
        was edited since this one began: the record has the digest of the code that the run executes."""
        module = "trainer.study.run.measure"
        if self.plan.backend == "processes":
            return run_child(module, task, started=self._register_child, on_end=self.children.discard)
        one_thread = {"OMP_NUM_THREADS": "1"}
        if code_digest() != self.code:
            env = os.environ | one_thread
            return run_child(module, task, env=env, started=self._register_child, on_end=self.children.discard)
        return run_forked(module, task, log, env=one_thread, started=self._register_child, on_end=self.children.discard)

    def _register_child(self, child: StudyProcess) -> None:
        """Register a process, and kill it if the study was stopped while it started."""
        self.children.add(child)
        if self.stopped:  # while this thread started it
            child.kill()

    def _advice(self, code: int, run: Run) -> str:
        """Return advice for a run that failed on a broken set which the study made; otherwise nothing."""
        if code != DataError.exit_code or SHARDS_KEY in self.plan.shardings[run.cell.sharding]:
            return ""
        return f"; delete {self.sets.uri(self.sets.key(run))} to have the set made again"

    def _line(self, run: Run, record: Record, total: int, waiting: Sequence[Run]) -> str:
        """Return the line about a finished run: its result, its seconds and the time left."""
        outcome = "diverged" if record["failed"] else percent(record["final_accuracy"])
        remaining = duration(self._left_s(waiting, self._running()))
        return f"[{total - self.left}/{total}] {run}: {outcome} in {record['wall_s']:.0f} s; {remaining} left"

    def _folder(self, run: Run) -> Path:
        return self.root / RUNS / str(run).replace("/", ",")

    def _running(self) -> dict[Run, RunProgress]:
        """Return the progress of the runs that are being trained."""
        starts = dict(self.start_times)  # a copy, because the threads of the runs change it
        now = time.monotonic()
        return {run: RunProgress(now - start, fraction_of_run(self._folder(run))) for run, start in starts.items()}

    def _left_s(self, waiting: Sequence[Run], under_way: Mapping[Run, RunProgress]) -> float:
        """Return the estimated seconds until all waiting runs are done."""
        remaining_runs = [run for run in waiting if run not in self.ledger and run not in self.failures]
        return remaining_s(remaining_runs, self.run_seconds, self.jobs, under_way)


def next_items(queue: SimpleQueue[T], timeout_s: float) -> list[T]:
    """Wait for an item of a queue, and remove and return all items. Returns none after ``timeout_s`` without an item."""
    items = []
    try:
        items.append(queue.get(timeout=timeout_s))
        while True:
            items.append(queue.get_nowait())
    except Empty:
        return items


def batches(runs: Sequence[Run], key: Callable[[Run], Hashable], size: int) -> Iterator[list[Run]]:
    """Yield runs in their order, in groups that need at most ``size`` shard sets.

    The sets of a group are made together, so small groups limit the space on the disk.

    key: returns the key of the set that a run needs."""
    part: list[Run] = []
    keys: set[Hashable] = set()
    for run in runs:
        if len(keys | {key(run)}) > size:
            yield part
            part = []
            keys = set()
        part.append(run)
        keys.add(key(run))
    if part:
        yield part
