"""What loads what: the trainer never needs Spark, the pipeline never needs torch, no folder imports from one above it.

Nothing in the trainer turns bytes of others into objects."""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.sources import modules, nodes

ROOT = Path(__file__).resolve().parents[2]

# Lowest first: a room, which is a folder or a file, imports from those before it.
CORE = (
    "errors", "console", "sizes", "import_path", "extras", "metrics_file", "arrays", "npz", "json_values",
    "hashing", "seeds", "atomic", "provenance", "storage", "shardset", "importance", "ledger_origin",
    "reporting", "argparse_internals",
    "specs", "program", "command_line", "machine",
)  # fmt: skip
PIPELINE = (
    "core", "assignment", "input", "datasets", "spark", "clustering", "strategies", "output", "quality", "upkeep", "doctor",
    "runs", "stream",
)  # fmt: skip
TRAINER = (
    "run_files", "protocols", "exchange", "coordination", "models", "sampling", "gossip", "config", "stages", "plan",
    "watchdog", "data",
    "transport", "home", "checkpoints", "rules", "runlog", "context", "report", "leader", "server", "worker",
    "evaluation", "options", "regroup", "lifecycle", "launch",
    "cluster", "start", "comparison", "simulation", "flags", "topology", "tables", "embed", "inference", "export", "api",
    "simulate", "spark_driver", "report_command", "workers_command", "benchmark", "study",
)  # fmt: skip
STUDY = ("plan", "run", "analysis", "report", "check")
# Rooms of the trainer that enter more of the pipeline than its core: they stand above both packages.
ENTERS = {
    "study": {"clustering", "runs", "datasets", "spark"},
    "spark_driver": {"spark"},
    "tables": {"input"},
    "embed": {"input"},
    "inference": {"input"},
    "export": {"input"},
    "report_command": {"quality", "runs", "upkeep"},
    "benchmark": {"clustering", "datasets", "input", "runs", "spark", "strategies"},
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
    for node in nodes(path):
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


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions and those for annotations count; faces, which load names when they are used, do not."""
    imports: dict[str, set[str]] = {}
    for package in ("pipeline", "trainer"):
        for path in (ROOT / package).rglob("*.py"):
            if path.stem not in FACES:
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                imports[name] = imported_by(path) - {name}
    files_only = {name: entered & imports.keys() for name, entered in imports.items()}
    graphlib.TopologicalSorter(files_only).prepare()  # raises CycleError with the circle


def test_the_trainer_enters_the_core_of_the_pipeline_only() -> None:
    paths = list((ROOT / "trainer").rglob("*.py"))
    below = [path for path in paths if room_of(path, "trainer") not in ENTERS]
    assert {room for path in below for room in rooms_entered(path, "pipeline")} == {"core"}
    for above, rooms in ENTERS.items():
        mine = [path for path in paths if room_of(path, "trainer") == above]
        assert {room for path in mine for room in rooms_entered(path, "pipeline")} - {"core"} == rooms


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_command_line_and_a_supervisor_load_neither_spark_nor_torch() -> None:
    commands = ["pipeline.core.command_line", "pipeline.entry", "trainer.__main__", "trainer.study.__main__"]
    assert loaded_with([*commands, "trainer.launch.supervisor"]).isdisjoint({"pyspark", "torch"})


# Each may print: a command, a display of progress, or the output of train(), simulate() and the jobs unless they are silent.
COMMANDS_PRINT = {"__main__.py", "command.py", "plan_command.py", "report_command.py", "workers_command.py", "check.py",
    "child.py",
}  # fmt: skip
FILES_PRINT = {
    "pipeline/core": {"command_line.py", "console.py", "import_path.py"},
    "pipeline/datasets": {"cifar.py", "derive.py", "synthetic.py"},
    "pipeline/runs": {"compare.py"},
    "pipeline/spark": {"package.py"},
    "pipeline/upkeep": {"clean.py", "contents.py", "verify.py"},
    "trainer/cluster": {"run.py"},
    "trainer/launch": {"role_main.py", "run.py"},
    "trainer/lifecycle": {"ends.py"},
    "trainer/start": {"decide.py", "folder.py"},
    "trainer/simulation": {"replay.py", "run.py"},
    "trainer/simulation/comparison": {"compare.py"},
    "trainer/study/run": {"make_sets.py", "measure.py"},
}
# The files that use private members of a library, which has no public ones for that.
ADAPTERS = {
    "argparse": {"pipeline/core/argparse_internals.py"},
    "multiprocessing": {"trainer/launch/fork_server.py"},
    "py4j": {"pipeline/spark/jvm.py", "trainer/cluster/spark.py"},
}
INTERNALS = {
    "argparse": {"_actions", "_action_groups", "_group_actions", "_mutually_exclusive_groups", "_option_string_actions"}
    | {"_get_formatter", "_get_value", "_get_values", "_ActionsContainer", "_ArgumentGroup", "_AppendAction"}
    | {"_StoreTrueAction"},
    "multiprocessing": {"_forkserver", "_callback"},
    "py4j": {"_jvm", "_jsc", "_gateway", "_active_spark_context", "_ensure_initialized"},
}


def sources() -> list[Path]:
    return [path for path in modules() if path.relative_to(ROOT).parts[0] in ("pipeline", "trainer")]


def test_only_commands_and_displays_print() -> None:
    """The rest of the library logs, or returns its texts."""
    printing = {path for path in sources() for node in nodes(path) if isinstance(node, ast.Name) and node.id == "print"}
    allowed = {ROOT / folder / name for folder, names in FILES_PRINT.items() for name in names}
    assert {path for path in printing if path.name not in COMMANDS_PRINT} == allowed


@pytest.mark.parametrize("library", ADAPTERS)
def test_private_members_of_a_library_stay_in_its_adapter(library: str) -> None:
    using = {
        str(path.relative_to(ROOT))
        for path in sources()
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in INTERNALS[library]
    }
    assert using == ADAPTERS[library]


def forbidden(tree: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names in a module that turn bytes into code or objects."""
    for node in tree:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            packages = {name.split(".")[0] for name in names}
            yield from {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"} & packages
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield from {"eval", "exec", "compile", "__import__"} & {node.func.id}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            called = {f"{owner}.{node.func.attr}", f".{node.func.attr}"}
            if owner == "super()":  # of a ZeroMQ socket, whose recv returns bytes
                called.discard(".recv")
            yield from {"torch.load", "np.load", ".recv_pyobj", ".recv_serialized", ".recv"} & called


def test_nothing_in_the_trainer_turns_bytes_into_objects_or_code() -> None:
    """``recv`` of a multiprocessing pipe unpickles; ``recv_bytes`` does not."""
    paths = [path for path in sources() if path.is_relative_to(ROOT / "trainer")]
    assert paths
    for path in paths:
        assert list(forbidden(nodes(path))) == [], path
    assert list(forbidden(ast.walk(ast.parse("import pickle\neval('1')\ntorch.load(f)\npipe.recv()")))) != []


@pytest.mark.parametrize(("package", "order"), [("pipeline", PIPELINE), ("trainer", TRAINER)])
def test_the_layout_in_the_manual_has_no_arrow_up(package: str, order: tuple[str, ...]) -> None:
    """A line for each room, which imports only from those above it; ``a, b`` are two files in one line."""
    text = (ROOT / package / "README.md").read_text()
    block = text.partition("\n## Layout\n")[2].partition("```text\n")[2].partition("```")[0]
    lines = [line for line in block.splitlines() if line[:1].strip()]
    listed = [name.strip("/") for line in lines for name in line.partition("  ")[0].split(", ")]
    assert set(listed) - FACES == set(order)
    entered = {
        (room_of(path, package), room)
        for path in (ROOT / package).rglob("*.py")
        for room in rooms_entered(path, package)
        if {room_of(path, package), room}.isdisjoint(FACES) and room_of(path, package) != room
    }
    assert not {(room, other) for room, other in entered if listed.index(room) < listed.index(other)}
