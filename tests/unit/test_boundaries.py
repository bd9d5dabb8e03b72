"""What loads what: the trainer never needs Spark, the pipeline never needs torch, no folder imports from one above it."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Lowest first; a room imports from its own floor's earlier rooms and from floors below. A folder is one room.
GROUND_FLOOR = (
    "errors", "import_path", "extras", "arrays", "json_values", "hashing", "seeds", "atomic", "storage", "shardset",
    "reporting", "specs", "command_line",
)  # fmt: skip
UPPER_FLOORS = (
    "assignment", "input", "datasets", "spark", "clustering", "strategies", "output", "quality", "upkeep", "doctor",
    "runs", "stream", "benchmark",
)  # fmt: skip
TRAINER = (
    "run_files", "protocols", "coordination", "models", "config", "plan", "watchdog", "data", "transport", "home",
    "checkpoints", "runlog", "report", "server", "worker", "evaluation", "options", "launch", "cluster", "simulation",
    "flags", "embed", "api", "simulate", "spark_job", "study",
)  # fmt: skip
# What stands above both packages, and what of the pipeline it enters beside the ground floor: its commands, its session.
ENTERS = {"study": {"runs", "datasets", "spark"}, "spark_job": {"spark"}, "embed": {"input"}}
SHARDS_FOR_STUDIES = "trainer.study.make_sets"  # a process of its own, with Spark
FACES = {"__init__", "__main__", "entry"}  # the package's face and its commands: they stand above all


@functools.cache
def modules_of(package: str) -> list[str]:
    """Every module of a package but ``__main__``, which test_trainer_cli runs."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / package).rglob("*.py")]
    names = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    return sorted(name for name in names if not name.endswith("__main__"))


@functools.cache
def imported_by(path: Path) -> set[str]:
    """The modules that a file imports, those inside functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""}
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room_of(path: Path) -> str:
    """The file or folder right below its package that a file belongs to."""
    return path.relative_to(ROOT).with_suffix("").parts[1]


def rooms_entered(path: Path, package: str) -> set[str]:
    """The rooms of a package that a file imports from."""
    inside = set(modules_of(package)) - {package}
    return {name.split(".")[1] for name in imported_by(path) & inside}


def loaded_with(modules: list[str]) -> set[str]:
    """The packages in a fresh interpreter that has imported some modules."""
    program = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "print(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    )
    command = [sys.executable, "-c", program, json.dumps(modules)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(("package", "floors"), [("pipeline", GROUND_FLOOR + UPPER_FLOORS), ("trainer", TRAINER)])
def test_no_room_imports_from_one_that_stands_above_it(package: str, floors: tuple[str, ...]) -> None:
    files = [path for path in (ROOT / package).rglob("*.py") if room_of(path) not in FACES]
    assert {room_of(path) for path in files} == set(floors), "a new room needs its floor in this test"
    upwards = {
        f"{path.relative_to(ROOT)} -> {room}"
        for path in files
        for room in rooms_entered(path, package)
        if floors.index(room) > floors.index(room_of(path))
    }
    assert not upwards


def test_the_trainer_enters_the_ground_floor_of_the_pipeline_and_no_other() -> None:
    paths = list((ROOT / "trainer").rglob("*.py"))
    entered = {room for path in paths if room_of(path) not in ENTERS for room in rooms_entered(path, "pipeline")}
    assert "shardset" in entered
    assert entered <= set(GROUND_FLOOR)
    for above, rooms in ENTERS.items():
        entered = {room for path in paths if room_of(path) == above for room in rooms_entered(path, "pipeline")}
        assert entered - set(GROUND_FLOOR) == rooms


def test_the_ground_floor_needs_neither_spark_nor_torch() -> None:
    ground = [name for name in modules_of("pipeline") if name.split(".")[1:2] and name.split(".")[1] in GROUND_FLOOR]
    assert len(ground) > len(GROUND_FLOOR)
    assert loaded_with(["pipeline", "trainer", *ground]).isdisjoint({"pyspark", "py4j", "torch"})


@pytest.mark.full
def test_the_trainer_needs_no_spark() -> None:
    packages = loaded_with([name for name in modules_of("trainer") if name != SHARDS_FOR_STUDIES])
    assert "torch" in packages
    assert packages.isdisjoint({"pyspark", "py4j"})


@pytest.mark.full
def test_the_pipeline_and_its_jobs_need_no_torch() -> None:
    """The benchmark stands above both packages: it may enter the trainer's public face, when it runs."""
    packages = loaded_with(modules_of("pipeline"))
    assert "pyspark" in packages
    assert packages.isdisjoint({"torch", "trainer"})
    below = [path for path in (ROOT / "pipeline").rglob("*.py") if room_of(path) not in {"benchmark", *FACES}]
    jobs = [path for path in (ROOT / "jobs").glob("*.py") if path.name != "train.py"]
    for path in [*below, *jobs]:
        assert {name.partition(".")[0] for name in imported_by(path)}.isdisjoint({"torch", "trainer"}), path


@pytest.mark.parametrize(
    "module",
    [
        "pipeline.command_line",
        "pipeline.entry",
        "trainer.__main__",
        "trainer.launch.supervisor",
        "trainer.study.__main__",
    ],
)
def test_a_command_line_and_a_supervisor_load_neither_spark_nor_torch(module: str) -> None:
    assert loaded_with([module]).isdisjoint({"pyspark", "torch"})
