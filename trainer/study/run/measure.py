"""The process of one run: trains, and writes the run's ledger line into a file. Its parent sends the task."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.core.atomic import write_durably
from pipeline.core.errors import DivergenceError, JobError
from pipeline.core.provenance import installed_version, processor
from pipeline.core.storage.store import Store
from trainer.options import Options
from trainer.runlog.result import Result
from trainer.study.plan.cases import Case, case_of
from trainer.study.plan.study_plan import SOURCES, Cell, Run, StudyPlan, plan_of
from trainer.study.run.children import task_of_parent
from trainer.study.run.ledger import Record, dumps
from trainer.study.run.predictions import outcome_by_image
from trainer.study.run.sets import facts_of, identity_of

DIGITS = 6
FIGURES = (
    "final_accuracy", "final_loss", "best_accuracy", "best_loss", "best_epoch", "train_accuracy", "train_loss",
    "running_train_accuracy", "running_train_loss",
)  # fmt: skip
CURVE = ("epoch", "accuracy", "loss", "train_accuracy", "train_loss", "seconds")


def measure(plan: StudyPlan, run: Run, shards: str, folder: Path) -> Record:
    """Train one run from the start and return its record; a diverged run is a result too.

    Raises JobError if there is no result: broken shards, a full disk, a run that could not start.

    Args:
        plan: the plan of the study.
        run: its cell and seed.
        shards: URI of the shard set.
        folder: of the run; replaced if it exists.
    """
    case = case_of(plan, run, shards, folder)
    made_on = environment(case)  # before the training, because the code may be edited during it
    start = time.monotonic()
    cpu = time.process_time()
    failed = None
    result = None
    try:
        result = _train(case)
    except DivergenceError as error:
        failed = str(error).partition(" (see ")[0]  # drop the path of the folder, which is deleted
    record = {
        "run": str(run),
        "seeds": {source: plan.seed_of(source, run) for source in SOURCES},  # type: ignore[arg-type]
        "failed": failed,
        **_fingerprints_of_set(shards),
    }
    if result:
        record |= _outcome(case, result) | _outcome_by_image(case, result, shards, folder.parent)
    else:
        record |= dict.fromkeys((*FIGURES, "curve", "parameters"))
    return record | {
        "wall_s": round(time.monotonic() - start, 2),
        "cpu_s": round(time.process_time() - cpu, 2) if case.simulated else None,  # unknown for other processes
        "environment": made_on,
    }


def _train(case: Case) -> Result:
    """Train once, in virtual time or on real processes. Raises DivergenceError for a diverged run, and JobError."""
    options = Options(overwrite=True, silent=True, report=False)
    if case.simulated:
        from trainer.simulate import simulate

        return simulate(case.config, case.simulated, options)
    from trainer.api import train

    result = train(case.config, options)
    assert result, "all of it runs here"
    return result


def _fingerprints_of_set(uri: str) -> dict[str, Any]:
    """Return the fingerprints of the images and the shards of a set, and the facts about the evenness of its shards."""
    from trainer.data.opening import open_shards

    store = Store()
    shards = open_shards(uri)
    path = f"{shards.uri}/quality.json"
    quality = json.loads(store.read(path)) if store.exists(path) else None
    return {**identity_of(shards), "sharding": _round_numbers(facts_of(shards.manifest, quality))}


def _outcome(case: Case, result: Result) -> dict[str, Any]:
    """Return the results of a run that ended with a model: scores, curve, staleness, work and a digest of the model."""
    from trainer.comparison.measurements import sent_bytes
    from trainer.runlog.read import evaluations

    events = result.events()
    evaluated = evaluations(events)
    versions = result.pushes()["version"].to_numpy()
    traffic = [sent_bytes(case.config, result, events, versions, until=event.version) for event in evaluated]
    # The digest shows runs that end bit-identical, on two hosts or with two seeds.
    weights = sha256(b"".join(array.tobytes() for array in result.weights().values())).hexdigest()[:16]
    figures: dict[str, Any] = {name: getattr(result, name) for name in FIGURES}
    figures |= {
        "learned": result.learned,
        "curve": {name: [getattr(event, name) for event in evaluated] for name in CURVE}
        | ({} if None in traffic else {"sent_bytes": traffic}),
        "sent_bytes": sent_bytes(case.config, result, events, versions),
        "parameters": weights,
        "staleness": {"mean": result.staleness["mean"], "max": result.staleness["max"]},
        "seconds": result.seconds,
        "updates": result.updates,
        "examples": result.examples,
        "rejected": result.rejected,
        "restarts": sum(result.restarts.values()),
    }
    rounded: dict[str, Any] = _round_numbers(figures)
    return rounded


def _outcome_by_image(case: Case, result: Result, shards: str, cache: Path) -> dict[str, Any]:
    """Return the packed predictions, and accuracies by class and neighbourhood. cache: see ``outcome_by_image``."""
    from trainer.data.opening import open_shards

    rounded: dict[str, Any] = _round_numbers(
        outcome_by_image(result, open_shards(shards), cache, case.config.run.evaluation_mode)
    )
    return rounded


def _round_numbers(value: Any) -> Any:
    """Round numbers for a compact file. An accuracy over 10,000 images has four decimals."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {key: _round_numbers(inner) for key, inner in value.items()}
    return [_round_numbers(inner) for inner in value] if isinstance(value, list) else value


def environment(case: Case) -> dict[str, Any]:
    """Return everything outside the plan that can change the results or times.

    These are versions, processor, device, and a digest of this program's code."""
    from trainer.models.devices import pick_device

    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "sharding": installed_version(),
        "code": code_digest(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "device": pick_device(case.config.processes.device, 0).type,
    }


def code_digest() -> str:
    """Return a digest of the trainer's and the pipeline's modules, without the study, the benchmark and the reports."""
    import pipeline
    import trainer

    parts = []
    for package in (pipeline, trainer):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            place = path.relative_to(root).as_posix()
            # These modules cannot change the result of a run.
            if not place.startswith(("study/", "benchmark/", "report")):
                parts.append(f"{package.__name__}/{place} ".encode() + sha256(path.read_bytes()).digest())
    return sha256(b"\n".join(parts)).hexdigest()[:12]


def main(task: dict[str, Any]) -> None:
    """Do a task of the parent: plan, run, shards, folder, and the file for the line. Raises JobError in one line."""
    run = Run(Cell(*task["cell"]), task["seed"])
    try:
        record = measure(plan_of(task["plan"]), run, task["shards"], Path(task["folder"]))
    except JobError as error:
        error.args = (" ".join(str(error).split()),)  # the parent reads the last line
        raise
    write_durably(Path(task["record"]), dumps(record))


if __name__ == "__main__":
    try:
        main(task_of_parent())
    except JobError as failure:
        print(failure)
        sys.exit(failure.exit_code)
