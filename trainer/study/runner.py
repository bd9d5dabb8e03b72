"""Carries a study out: makes the shard sets, keeps the cores busy with runs, writes the ledger."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.atomic import write_durably
from pipeline.errors import DataError, JobError, UsageError
from trainer.study.cases import READY, essentials
from trainer.study.children import Child, run_child
from trainer.study.ledger import LEDGER, Contents, Ledger, Record
from trainer.study.plan import TABLES, Run, StudyPlan
from trainer.study.sets import SetKey, Sets, group_by_set

PLAN, RUNS = "plan.json", "runs"
SETS_AT_ONCE = 24  # made before runs go on: one start of Spark for so many, and room for them on the disk
TRIES = 2  # a run whose process was killed, by the system for memory as a rule


def claim(plan: StudyPlan, root: Path) -> None:
    """Have a folder be this plan's. Raises UsageError where it is another's, or holds something else."""
    refuse_foreign(root)
    asked = _identity(plan)
    if (root / PLAN).exists():
        refuse_other_plan(plan, root)
    root.mkdir(parents=True, exist_ok=True)
    write_durably(root / PLAN, (json.dumps(asked, indent=1) + "\n").encode())


def refuse_foreign(root: Path) -> None:
    """Raises UsageError for a folder with something else in it than a study."""
    if root.is_dir() and not (root / PLAN).exists() and any(entry.name != ".lock" for entry in root.iterdir()):
        raise UsageError(f"{root} holds other files; choose a folder that is empty or does not exist")


def refuse_other_plan(plan: StudyPlan, root: Path) -> None:
    """Raises UsageError where a study's folder is not one of this plan, or of a part of it; DataError for a damaged one."""
    path, asked = root / PLAN, _identity(plan)
    try:
        stored = json.loads(path.read_bytes())
        difference = _difference(stored["plan"], asked["plan"]) or _difference(stored["training"], asked["training"])
    except FileNotFoundError:
        raise UsageError(f"{root} holds no {PLAN}: it is no study's folder") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path} is damaged; restore it, or choose another --output") from None
    if difference:
        raise UsageError(f"{root} is the study of another plan: {difference}; choose another folder")


def _identity(plan: StudyPlan) -> dict[str, Any]:
    """What a study's folder says of its plan, as it is read back."""
    training = {str(cell): essentials(plan, cell) for cell in plan.cells()}
    said: dict[str, Any] = json.loads(json.dumps({"plan": plan.identity(), "training": training}))
    return said


def _difference(stored: Mapping[str, Any], asked: Mapping[str, Any], place: str = "") -> str | None:
    """The first value that differs; members that were added do not matter, one that is gone does."""
    for key, value in stored.items():
        at = f"{place}.{key}" if place else key
        if key not in asked:
            return f"{at} is not in this one"
        if isinstance(value, dict) and isinstance(asked[key], dict):
            inner = _difference(value, asked[key], at)
            added = set(asked[key]) - set(value) if _is_table_of_flags(at) else set()
            if inner or added:
                return inner or f"{at} had no {sorted(added)[0]}"
        elif asked[key] != value:
            return f"{at} was {json.dumps(value)}, now {json.dumps(asked[key])}"
    return None


def _is_table_of_flags(place: str) -> bool:
    """[training], [virtual] and [models.NAME] are whole; [models] itself may get more members."""
    table, _, member = place.partition(".")
    return place in ("training", "virtual") or (table in TABLES and bool(member))


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
        self.children: set[Child] = set()
        self.stopped = False

    def run(self, runs: Sequence[Run]) -> None:
        """Do those of ``runs`` that are not in the ledger. Raises the error of the first that could not be done."""
        waiting = [run for run in runs if run not in self.ledger]
        total, self.left = len(runs), len(waiting)
        self.say(f"{total} runs, {total - len(waiting)} of them done, {self.jobs} at once")
        for part in batches(group_by_set(self.sets, waiting), SETS_AT_ONCE):
            fresh = [key for key in part if not (Path(self.sets.uri(key)) / "manifest.json").exists()]
            if fresh:
                self.say(f"sharding: {len(fresh)} {'sets' if len(fresh) > 1 else 'set'}")
            self.sets.make(part)
            self._train(part, waiting, total)
        self._drop({self.sets.key(run) for run in runs})
        if not self.keep_sets:
            self.sets.drop_datasets()

    def _train(self, part: Mapping[SetKey, Sequence[Run]], waiting: Sequence[Run], total: int) -> None:
        chosen = {run for runs in part.values() for run in runs}
        ordered = [run for run in waiting if run in chosen]
        open_runs = {key: len(runs) for key, runs in part.items()}
        pool = ThreadPoolExecutor(self.jobs)
        try:
            futures: dict[Future[Record], Run] = {pool.submit(self._measure, run): run for run in ordered}
            pending = set(futures)
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda future: future.exception() is not None):  # keep what was done
                    run, record = futures[future], future.result()
                    self.contents.add(record)
                    self.ledger.append(record)
                    self.left -= 1
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

    def _drop(self, keys: set[SetKey]) -> None:
        if not self.keep_sets:
            for key in keys:
                self.sets.drop(key)

    def _measure(self, run: Run) -> Record:
        """The record of one run, made by a process of its own. Raises JobError."""
        name = str(run).replace("/", ",")
        folder, record = self.root / RUNS / name, self.root / RUNS / f"{name}.json"
        folder.parent.mkdir(exist_ok=True)
        record.unlink(missing_ok=True)
        plan = asdict(self.plan) | {"seeds": [run.seed]}
        task = {"plan": plan, "cell": run.cell, "seed": run.seed, "shards": self.sets.uri(self.sets.key(run))}
        task |= {"folder": str(folder), "record": str(record)}
        for _ in range(TRIES):
            code, said = run_child(
                "trainer.study.measure",
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
        accuracy = record["final_accuracy"]
        outcome = f"{accuracy:.2%}" if accuracy is not None else "diverged"
        left = remaining_s([run for run in waiting if run not in self.ledger], self.took, self.jobs)
        return f"[{total - self.left}/{total}] {run}: {outcome} in {record['wall_s']:.0f} s; {duration(left)} left"


def cost_class(run: Run) -> str:
    """Runs that take about as long as each other."""
    return f"{run.cell.dataset}/{run.cell.model}"


def remaining_s(waiting: Sequence[Run], took: Mapping[str, Sequence[float]], jobs: int) -> float:
    """Seconds until the end: each run takes the mean of its like, and those that nobody knows the mean of all."""
    known = [seconds for some in took.values() for seconds in some]
    usual = sum(known) / len(known) if known else 0.0
    means = {name: sum(some) / len(some) for name, some in took.items()}
    return sum(means.get(cost_class(run), usual) for run in waiting) / jobs


def duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours:
        return f"about {hours} h {minutes:02} min"
    return f"about {minutes} min" if minutes else "less than a minute"


def batches(grouped: Mapping[SetKey, list[Run]], size: int) -> Iterator[dict[SetKey, list[Run]]]:
    """Sets and their runs, so many sets at a time."""
    keys = list(grouped)
    for at in range(0, len(keys), size):
        yield {key: grouped[key] for key in keys[at : at + size]}
