"""What loads what: the trainer never needs Spark, the pipeline and its jobs never need torch, --help needs neither."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.session import PACKAGE

ROOT = PACKAGE.parent


def modules_of(package: str) -> list[str]:
    """Every module of a package but ``__main__``, which test_trainer_cli runs."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / package).rglob("*.py")]
    names = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    return sorted(name for name in names if not name.endswith("__main__"))


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


def test_the_trainer_and_all_of_the_pipeline_that_it_uses_need_no_spark():
    inside = set(modules_of("pipeline"))
    used = {name for path in (ROOT / "trainer").rglob("*.py") for name in imported_by(path)} & inside
    assert "pipeline.fetch" in used  # a late import: one that only running the function would load
    packages = loaded_with([*modules_of("trainer"), *sorted(used)])
    assert "torch" in packages
    assert packages.isdisjoint({"pyspark", "py4j"})


def test_the_pipeline_and_its_jobs_need_no_torch():
    packages = loaded_with(modules_of("pipeline"))
    assert "pyspark" in packages
    assert packages.isdisjoint({"torch", "trainer"})
    for path in [*(ROOT / "pipeline").rglob("*.py"), *(ROOT / "jobs").glob("*.py")]:
        assert {name.partition(".")[0] for name in imported_by(path)}.isdisjoint({"torch", "trainer"}), path


@pytest.mark.parametrize("module", ["pipeline.commandline", "trainer.__main__", "trainer.supervisor"])
def test_a_command_line_and_a_supervisor_load_neither_spark_nor_torch(module):
    assert loaded_with([module]).isdisjoint({"pyspark", "torch"})
