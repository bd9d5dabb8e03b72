"""The shard sets of a study: their names and places, and the process that makes them with Spark."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.core.errors import DataError, UsageError, error_class
from pipeline.core.shardset.contract import Manifest
from trainer.study.plan.cases import ORDER, SEED, SHARDS_KEY, derivation, sharding_args, shards_use_seed
from trainer.study.plan.study_plan import Run, StudyPlan
from trainer.study.run.children import run_child
from trainer.study.run.prepared import Fingerprints, flatten, read_prepared, write_prepared

if TYPE_CHECKING:
    from trainer.data.shards import Shards

SETS = "sets"
DATASETS = "datasets"
GONE = ",gone"  # suffix of a folder that is being deleted; no name contains a comma
QUARTERS = (0, 0.25, 0.5, 0.75, 1)  # minimum, quartiles and maximum of the rows of a class in a shard
MOST_BOXES = 64  # shards whose quartiles are kept one by one; those of more would make long lines, and cannot be drawn


class SetKey(NamedTuple):
    """The key of a shard set of a study. seed: None if the shards do not depend on it."""

    dataset: str
    sharding: str
    seed: int | None
    workers: int

    def __str__(self) -> str:
        seed = "all" if self.seed is None else str(self.seed)
        return ",".join([self.dataset, self.sharding, seed, str(self.workers)])  # no name contains a comma


class Sets:
    """The shard sets of a study, made on demand, each batch in a process with a Spark of its own.

    Existing sets are reused."""

    def __init__(self, plan: StudyPlan, root: Path) -> None:
        self.plan = plan
        self.root = root
        self.made_keys: set[SetKey] = set()
        self.prepared = read_prepared(root)
        self.uses_seed = {
            name: SHARDS_KEY not in keys
            and SEED not in keys
            and "sharding" in plan.vary
            and shards_use_seed(plan, name)
            for name, keys in plan.shardings.items()
        }

    def key(self, run: Run) -> SetKey:
        """Return the key of the shard set on which a run trains."""
        seed = self.plan.seed_of("sharding", run) if self.uses_seed[run.cell.sharding] else None
        return SetKey(run.cell.dataset, run.cell.sharding, seed, self.plan.workers_of(run.cell))

    def uri(self, key: SetKey) -> str:
        """Return the URI of a ready set, or the folder of a set that the study makes."""
        ready = self.plan.shardings[key.sharding].get(SHARDS_KEY)
        return str(ready) if ready else str(self.root / SETS / str(key))

    def missing(self, keys: Iterable[SetKey]) -> list[SetKey]:
        """Return the sets that this process has not made.

        Sets on the disk are not trusted: a killed study may have made them from earlier contents of the data sets."""
        own = [key for key in dict.fromkeys(keys) if SHARDS_KEY not in self.plan.shardings[key.sharding]]
        return [key for key in own if key not in self.made_keys]

    def adopt(self, keys: Iterable[SetKey]) -> None:
        """Adopt the sets that ``--prepare`` made, so that they are not missing.

        They are trained on as they are, without a look at the data sets. Raises DataError if a set was changed since."""
        for key in dict.fromkeys(keys):
            if self._is_prepared(key):
                if self._fingerprints(key) != self.prepared[str(key)]:
                    raise DataError(
                        f"{self.uri(key)} is not the set that --prepare made; delete it, and run the command again with"
                        " --prepare"
                    )
                self.made_keys.add(key)

    def record_prepared(self) -> None:
        """Record all sets that this process has made as prepared."""
        write_prepared(self.root, {str(key): self._fingerprints(key) for key in sorted(self.made_keys, key=str)})

    def prepared_datasets(self, runs: Sequence[Run], waiting: Sequence[Run]) -> set[str]:
        """Return the data sets that are not needed here, because the sets of all waiting runs are prepared and there.

        Args:
            runs: the runs of the study, all of whose sets must have been prepared.
            waiting: the runs that are not in the ledger. The sets of the others may be deleted.
        """
        needed = {key.dataset for key in map(self.key, runs) if str(key) not in self.prepared}
        needed |= {key.dataset for key in map(self.key, waiting) if not self._is_prepared(key)}
        return {run.cell.dataset for run in runs} - needed

    def make(self, keys: Iterable[SetKey]) -> None:
        """Make sets, or verify that existing ones are as they would be made.

        Raises the error of the job that failed."""
        tasks = {key: self._task(key) for key in keys}
        if not tasks:
            return
        code, output = run_child("trainer.study.run.make_sets", list(tasks.values()))
        if code:
            if code == UsageError.exit_code:  # existing sets have other data; the job's advice is about its own flags
                folders = [str(self.root / name) for name in (SETS, DATASETS) if (self.root / name).is_dir()]
                output = f"{output.partition(';')[0]}; to have all made again, delete {' and '.join(folders)}"
            raise error_class(code)(f"the shard sets could not be made: {output or 'failed without a message'}")
        self.made_keys |= set(tasks)

    def owner(self, run: Run) -> tuple[str, str]:
        """Return the order of a run's rows, or the name of its ready set, and the seed and number of its shards."""
        keys = self.plan.shardings[run.cell.sharding]
        key = self.key(run)
        if SHARDS_KEY in keys:
            return f"ready {run.cell.sharding}", str((key.seed, key.workers))
        return order_text(str(keys.get(ORDER, "given")), key.workers), str((key.seed, key.workers))

    def drop(self, key: SetKey) -> None:
        """Delete a set that no run needs any more. Ready sets stay."""
        if SHARDS_KEY not in self.plan.shardings[key.sharding]:
            self.made_keys.discard(key)
            _delete(self.root / SETS / str(key))

    def drop_datasets(self) -> None:
        """Delete the data sets that were derived for the sets."""
        _delete(self.root / DATASETS)

    def _is_prepared(self, key: SetKey) -> bool:
        """Return whether a prepared set is there. One that was deleted after its last run is made again, with Spark."""
        return str(key) in self.prepared and (self.root / SETS / str(key)).is_dir()

    def _fingerprints(self, key: SetKey) -> Fingerprints:
        from trainer.data.opening import open_shards

        return flatten(identity_of(open_shards(self.uri(key))))

    def _task(self, key: SetKey) -> dict[str, Any]:
        """Return a task of make_sets: derive a data set if the plan changes it, then shard it.

        The task's ``derive`` is None if the data set is not changed."""
        dataset = self.plan.datasets[key.dataset]
        source = str(dataset["input"])
        evaluation = str(dataset.get("eval_input", dataset["input"]))
        order = str(self.plan.shardings[key.sharding].get(ORDER, "given"))
        derived = None
        # Any key besides the two paths changes the data. The folder is named by data set and order only, so that all
        # shardings and seeds share it.
        if len(dataset) > len({"input", "eval_input"} & set(dataset)) or order != "given":
            folder = self.root / DATASETS / (key.dataset + f",{order_text(order, key.workers)}" * (order != "given"))
            places = {"source": source, "evaluation": dataset.get("eval_input"), "target": str(folder)}
            derived = places | {"derivation": derivation(self.plan, key.dataset, order, key.workers).params()}
            source = evaluation = str(folder)
        seed = 0 if key.seed is None else key.seed
        output = self.root / SETS / str(key)
        keys = self.plan.shardings[key.sharding]
        return {"derive": derived, "shard": sharding_args(keys, key.workers, seed, source, evaluation, output)}


def order_text(order: str, workers: int) -> str:
    """Return the name of an order of rows, without characters that HDFS refuses. Only "given" suits all workers."""
    return order if order == "given" else f"{order.replace(':', '-')},{workers}"


def _delete(folder: Path) -> None:
    """Delete a folder under another name, so that a folder that is only partly deleted never looks complete."""
    renamed_folder = folder.with_name(f"{folder.name}{GONE}")
    shutil.rmtree(renamed_folder, ignore_errors=True)
    if folder.is_dir():
        folder.rename(renamed_folder)
        shutil.rmtree(renamed_folder, ignore_errors=True)


def identity_of(shards: Shards) -> dict[str, Any]:
    """Return fingerprints of a set's images and of the set itself."""
    manifest = shards.manifest
    assert manifest.evaluation, "every set of a study has evaluation rows"
    data = {"train": manifest.input.fingerprint, "eval": manifest.evaluation.input.fingerprint}
    return {"data": data, "shards": shards.digest}


def facts_of(manifest: Manifest, quality: dict[str, Any] | None) -> dict[str, Any]:
    """Return the facts about a set that the ledger keeps: evenness by every measure, sizes, and the seconds to make it.

    quality: the set's quality.json, None if it has none. Without classes to compare the facts about them are missing."""
    near = manifest.neighbourhoods or []
    rows = [worker.rows for worker in manifest.workers]
    facts: dict[str, Any] = {
        "rows": manifest.rows,
        "copies": manifest.copies,
        "sparse": sum(group.sparse for group in near),
        "sparse_rows": sum(group.size for group in near if group.sparse),
        "size_ratio": max(rows) / max(1, min(rows)),
        "seconds": sum(manifest.seconds.values()),
    }
    if quality:
        facts |= {"mmd_ratio": quality["mmd_ratio"], "mean_ratio": quality["mean_ratio"]}
    # Null for one shard and for one class, which rows with real targets may have.
    if quality and quality["classes"]:
        facts |= {"chi_square": quality["classes"]["statistic"], "cramers_v": quality["classes"]["cramers_v"]}
        # Quantiles instead of the table, which would make the ledger's lines long.
        table = np.array(quality["class_table"])
        facts["class_counts"] = np.quantile(table, QUARTERS).tolist()
        if len(table) <= MOST_BOXES:
            facts["shard_counts"] = np.quantile(table, QUARTERS, axis=1).T.tolist()
    return facts
