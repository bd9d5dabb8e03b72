"""The commands of the project: subcommands of `sharding` and files of jobs/, and how to run many in one process."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from pipeline.core.extras import EXTRAS
from pipeline.entry import COMMANDS
from tests.clusters import QUICK_START, ROOT
from tests.clusters.environments import DEMO
from tests.clusters.settings import COMPILED
from tests.support.application import Ended

Command = tuple[object, ...]
BATCH = Path(__file__).with_name("command_batch.py")
JOBS = {path.name: path for path in sorted((ROOT / "jobs").glob("*.py"))}
HELP: Mapping[str, Command] = {
    **{f"sharding {name} --help": ("sharding", name, "--help") for name in COMMANDS},
    **{f"{name} --help": (path, "--help") for name, path in JOBS.items()},
}


def plan_batch(
    commands: Iterable[Command], hidden: Iterable[str] = (), *, path: Iterable[Path] = (), spark: bool = False
) -> str:
    """Return the argument of BATCH.

    Args:
        commands: each a program and its arguments.
        hidden: modules that the commands do not find.
        path: folders that come first in sys.path.
        spark: whether the commands share one Spark context.
    """
    each = [{"argv": [str(part) for part in command], "hidden": sorted(hidden)} for command in commands]
    return json.dumps({"path": [str(folder) for folder in path], "spark": spark, "commands": each})


def read_batch(done: CompletedProcess[str]) -> list[Ended]:
    """Return how each command of a process of BATCH ended."""
    match = re.search(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    assert match, done.stdout + done.stderr
    return [Ended(**each) for each in json.loads(match[1])]


def in_demo(master: str, **env: str) -> dict[str, Any]:
    """Return what spark_submit takes for a job in the demo environment, driver and tasks alike."""
    variables = DEMO.variables
    options = shlex.join([*shlex.split(variables["SPARK_SUBMIT_OPTS"]), *QUICK_START])
    # YARN's containers take the interpreter from these, which otherwise name the tests' own.
    names = ("spark.yarn.appMasterEnv.PYSPARK_PYTHON", "spark.executorEnv.PYSPARK_PYTHON")
    conf = {**COMPILED, **(dict.fromkeys(names, str(DEMO.python)) if master == "yarn" else {})}
    return {"master": master, "env": {**variables, "SPARK_SUBMIT_OPTS": options, **env}, "conf": conf}


def assert_shows_help(result: Ended) -> None:
    assert result.code == 0, result.err
    assert result.out.startswith("usage: ")
    assert result.err == ""


def assert_names_extra(result: Ended, extra: str) -> None:
    """Check that the exit code is 2 and the output is one line, which says how to install the extra."""
    assert extra in EXTRAS
    assert result.code == 2, result.out + result.err
    (line,) = [line for line in result.err.splitlines() if not line.startswith("WARNING: Using incubator modules")]
    assert line.startswith("error: ")
    assert f"run pip install '.[{extra}]'" in line
    assert result.out == ""
