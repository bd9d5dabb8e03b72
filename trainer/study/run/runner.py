"""Carries a study out: makes the shard sets, keeps the cores busy with runs, writes the ledger."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from pipeline.core.errors import DataError, JobError, UsageError
from trainer.report.terminal import percent
from trainer.study.plan.cases import READY, open_ready
from trainer.study.plan.study_plan import Run, StudyPlan
from trainer.study.run.children import Child, run_child
from trainer.study.run.ledger import LEDGER, Contents, Ledger, Record
from trainer.study.run.progress import UnderWay, cost_class, done_of, duration, remaining_s, under_way_line
from trainer.study.run.sets import SETS, SetKey, Sets, identity_of

RUNS = "runs"
SETS_AT_ONCE = 24  # made before runs go on: one start of Spark for so many, and room for them on the disk
TRIES = 2  # a run whose process was killed, by the system for memory as a rule
SILENCE_S = 300.0  # after which it is said how far the runs under way are
MAX_FAILURES = 3  # runs that could not be done, after which the others would not either


class Runner:
    """say(text): a line for people. jobs: runs at once."""

    def __init__(
        self, plan: StudyPlan, root: Path, jobs: int, say: Callable[[str], None], *, keep_sets: bool = False
    ) -> None:
        self.plan, self.root, self.jobs, self.say, self.keep_sets = plan, root, jobs, say, keep_sets
        self.ledger = Ledger(root / LEDGER, mine=True)
        self.sets = Sets(plan, root)
        self.contents = Contents(self.ledger.of_plan(plan), self.sets.owner)
        self.took: dict[str, list[float]] = {}  # seconds of this start's runs, by what they cost
        self.began: dict[Run, float] = {}  # those under way
        self.children: set[Child] = set()
        self.failures: dict[Run, JobError] = {}
        self.stopped = False

    def run(self, runs: Sequence[Run]) -> None:
        """Do those of ``runs`` that are not in the ledger, in their order.

        One that cannot be done does not keep the others from it. Raises its error when they are through, or as soon as
        MAX_FAILURES could not be done. Raises DataError before the first where a ready set is not of the others' images."""
        waiting = [run for run in runs if run not in self.ledger]
        self._check_ready(waiting)
        total, self.left, self.jobs = len(runs), len(waiting), max(1, min(self.jobs, len(waiting)))
        self.say(f"{total} runs, {total - len(waiting)} of them done, {self.jobs} at once")
        open_runs = Counter(map(self.sets.key, waiting))
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
        shutil.rmtree(self.root / RUNS, ignore_errors=True)  # what a study left that was killed behind a run's line
        with suppress(OSError):  # not there, or kept
            (self.root / SETS).rmdir()

    def _check_ready(self, waiting: Sequence[Run]) -> None:
        """Those that the study makes are of one data set; of a ready one, only the images tell."""
        for cell in dict.fromkeys(run.cell for run in waiting):
            if READY in self.plan.shardings[cell.sharding]:
                found = identity_of(open_ready(self.plan, cell.sharding))
                self.contents.add({"run": str(Run(cell, self.plan.seeds[0])), **found})

    def _train(self, part: Sequence[Run], open_runs: Counter[SetKey], waiting: Sequence[Run], total: int) -> None:
        """open_runs: those that still need a set, which goes with the last of them."""
        pool = ThreadPoolExecutor(self.jobs)
        try:
            futures: dict[Future[Record], Run] = {pool.submit(self._measure, run): run for run in part}
            pending = set(futures)
            while pending:
                done, pending = wait(pending, SILENCE_S, FIRST_COMPLETED)
                if not done:
                    under_way = self._under_way()
                    self.say(under_way_line(list(under_way.values()), self._left_s(waiting, under_way)))
                for future in sorted(done, key=lambda future: future.exception() is not None):  # keep what was done
                    run, error = futures[future], future.exception()
                    self.began.pop(run, None)
                    if isinstance(error, JobError):
                        self._failed(run, error)
                        continue
                    record = future.result()
                    self.contents.add(record)
                    self.ledger.append(record)
                    shutil.rmtree(self._folder(run), ignore_errors=True)
                    self.left -= 1
                    if not record["failed"]:  # what diverges ends early
                        self.took.setdefault(cost_class(run), []).append(record["wall_s"])
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

    def _failed(self, run: Run, error: JobError) -> None:
        """Raises the first error once too many runs could not be done."""
        self.failures[run] = error
        self.say(f"not done: {error}")
        if len(self.failures) >= MAX_FAILURES:
            raise next(iter(self.failures.values()))

    def _drop(self, keys: set[SetKey]) -> None:
        if not self.keep_sets:
            for key in keys:
                self.sets.drop(key)

    def _measure(self, run: Run) -> Record:
        """The record of one run, made by a process of its own. Raises JobError."""
        folder = self._folder(run)
        record = folder.with_name(f"{folder.name}.json")
        folder.parent.mkdir(exist_ok=True)
        record.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)  # of a study that was killed
        self.began[run] = time.monotonic()
        plan = asdict(self.plan) | {"seeds": [run.seed]}
        task = {"plan": plan, "cell": run.cell, "seed": run.seed, "shards": self.sets.uri(self.sets.key(run))}
        task |= {"folder": str(folder), "record": str(record)}
        for _ in range(TRIES):
            code, said = run_child(
                "trainer.study.run.measure",
                task,
                env=self._environment(),
                started=self._started,
                ended=self.children.discard,
            )
            if code == 0:
                found: Record = json.loads(record.read_bytes())
                record.unlink()
                return found
            if self.stopped:
                break
            if code > 0:
                kinds = {UsageError.exit_code: UsageError, DataError.exit_code: DataError}
                raise kinds.get(code, JobError)(f"{run}: {said or 'failed without a word'}{self._advice(code, run)}")
        raise JobError(f"{run}: its process was killed {TRIES} times; fewer --jobs need less memory")

    def _environment(self) -> Mapping[str, str]:
        """In virtual time a run computes in one thread, and the cores do several runs."""
        return os.environ if self.plan.backend == "processes" else os.environ | {"OMP_NUM_THREADS": "1"}

    def _started(self, child: Child) -> None:
        self.children.add(child)
        if self.stopped:  # since this thread began it
            child.kill()

    def _advice(self, code: int, run: Run) -> str:
        if code != DataError.exit_code or READY in self.plan.shardings[run.cell.sharding]:
            return ""
        return f"; delete {self.sets.uri(self.sets.key(run))} to have the set made again"

    def _line(self, run: Run, record: Record, total: int, waiting: Sequence[Run]) -> str:
        outcome = "diverged" if record["failed"] else percent(record["final_accuracy"])
        left = duration(self._left_s(waiting, self._under_way()))
        return f"[{total - self.left}/{total}] {run}: {outcome} in {record['wall_s']:.0f} s; {left} left"

    def _folder(self, run: Run) -> Path:
        return self.root / RUNS / str(run).replace("/", ",")

    def _under_way(self) -> dict[Run, UnderWay]:
        began = dict(self.began)  # the runs' threads change it
        now = time.monotonic()
        return {run: UnderWay(now - start, done_of(self._folder(run))) for run, start in began.items()}

    def _left_s(self, waiting: Sequence[Run], under_way: Mapping[Run, UnderWay]) -> float:
        left = [run for run in waiting if run not in self.ledger and run not in self.failures]
        return remaining_s(left, self.took, self.jobs, under_way)


def batches(runs: Sequence[Run], key: Callable[[Run], Hashable], size: int) -> Iterator[list[Run]]:
    """Runs in their order, as many at a time as need no more than ``size`` sets."""
    part: list[Run] = []
    keys: set[Hashable] = set()
    for run in runs:
        if len(keys | {key(run)}) > size:
            yield part
            part, keys = [], set()
        part.append(run)
        keys.add(key(run))
    if part:
        yield part
