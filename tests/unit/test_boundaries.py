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

# Lowest first: a room, which is a folder or a file, imports from those before it.
CORE = (
    "errors", "import_path", "extras", "arrays", "json_values", "hashing", "seeds", "atomic", "provenance", "storage",
    "shardset", "reporting", "specs", "command_line",
)  # fmt: skip
PIPELINE = (
    "core", "assignment", "input", "datasets", "spark", "clustering", "strategies", "output", "quality", "upkeep", "doctor",
    "runs", "stream",
)  # fmt: skip
TRAINER = (
    "run_files", "protocols", "exchange", "coordination", "models", "config", "plan", "watchdog", "data", "transport",
    "home", "checkpoints", "rules", "runlog", "context", "report", "leader", "server", "worker", "evaluation", "options",
    "launch",
    "cluster", "simulation", "flags", "topology", "embed", "api", "simulate", "spark_job", "benchmark", "study",
)  # fmt: skip
STUDY = ("plan", "run", "analysis", "report", "check")
# Rooms of the trainer that enter more of the pipeline than its core: they stand above both packages.
ENTERS = {
    "study": {"runs", "datasets", "spark"},
    "spark_job": {"spark"},
    "embed": {"input"},
    "benchmark": {"clustering", "datasets", "input", "spark", "strategies"},
}
NEEDS_SPARK = ("trainer.study.run.make_sets", "trainer.benchmark")  # a process of its own; a job
FACES = {"__init__", "__main__", "entry"}  # the package's face and its commands: they stand above all


@functools.cache
def modules_of(package: str) -> list[str]:
    """Every module of a package but ``__main__``, which test_trainer_cli runs."""
    folder = ROOT / package.replace(".", "/")
    paths = [path.relative_to(ROOT).with_suffix("") for path in folder.rglob("*.py")]
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


def room_of(path: Path, package: str) -> str:
    """The file or folder right below a package that a file belongs to."""
    return path.relative_to(ROOT / package.replace(".", "/")).with_suffix("").parts[0]


def rooms_entered(path: Path, package: str) -> set[str]:
    """The rooms of a package that a file imports from."""
    inside = set(modules_of(package)) - {package}
    return {name.removeprefix(f"{package}.").split(".")[0] for name in imported_by(path) & inside}


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


@pytest.mark.parametrize(
    ("package", "order"),
    [("pipeline", PIPELINE), ("pipeline.core", CORE), ("trainer", TRAINER), ("trainer.study", STUDY)],
)
def test_no_room_imports_from_a_later_one(package: str, order: tuple[str, ...]) -> None:
    folder = ROOT / package.replace(".", "/")
    files = [path for path in folder.rglob("*.py") if room_of(path, package) not in FACES]
    assert {room_of(path, package) for path in files} == set(order), "a new room needs its place in this test"
    upwards = {
        f"{path.relative_to(ROOT)} -> {room}"
        for path in files
        for room in rooms_entered(path, package) - FACES
        if order.index(room) > order.index(room_of(path, package))
    }
    assert not upwards


def test_the_trainer_enters_the_core_of_the_pipeline_only() -> None:
    paths = list((ROOT / "trainer").rglob("*.py"))
    below = [path for path in paths if room_of(path, "trainer") not in ENTERS]
    assert {room for path in below for room in rooms_entered(path, "pipeline")} == {"core"}
    for above, rooms in ENTERS.items():
        mine = [path for path in paths if room_of(path, "trainer") == above]
        assert {room for path in mine for room in rooms_entered(path, "pipeline")} - {"core"} == rooms


def test_the_core_needs_neither_spark_nor_torch() -> None:
    core = modules_of("pipeline.core")
    assert len(core) > len(CORE)
    assert loaded_with(["pipeline", "trainer", *core]).isdisjoint({"pyspark", "py4j", "torch"})


@pytest.mark.full
def test_the_trainer_needs_no_spark() -> None:
    packages = loaded_with([name for name in modules_of("trainer") if not name.startswith(NEEDS_SPARK)])
    assert "torch" in packages
    assert packages.isdisjoint({"pyspark", "py4j"})


@pytest.mark.full
def test_the_pipeline_and_its_jobs_need_no_torch() -> None:
    """The benchmark stands above both packages: it enters the trainer's public face when it runs."""
    packages = loaded_with(modules_of("pipeline"))
    assert "pyspark" in packages
    assert packages.isdisjoint({"torch", "trainer"})
    below = [path for path in (ROOT / "pipeline").rglob("*.py") if room_of(path, "pipeline") not in FACES]
    jobs = [path for path in (ROOT / "jobs").glob("*.py") if path.name not in ("train.py", "benchmark.py")]
    for path in [*below, *jobs]:
        assert {name.partition(".")[0] for name in imported_by(path)}.isdisjoint({"torch", "trainer"}), path
    assert "torch" not in loaded_with(modules_of("trainer.benchmark"))


@pytest.mark.parametrize(
    "module",
    [
        "pipeline.core.command_line",
        "pipeline.entry",
        "trainer.__main__",
        "trainer.launch.supervisor",
        "trainer.study.__main__",
    ],
)
def test_a_command_line_and_a_supervisor_load_neither_spark_nor_torch(module: str) -> None:
    assert loaded_with([module]).isdisjoint({"pyspark", "torch"})
