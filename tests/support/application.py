"""Jobs one after the other in one process: the tests' own, or one Spark application.

A spark-submit takes 10 s and more to start, most of it the JVM. A job inside a running application takes 1 or 2 s.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.clusters import ROOT, spark_submit

APPLICATION = """
import json, sys
root, plan = sys.argv[1:]
sys.path.insert(0, root)
from pipeline.spark.session import spark_context
from tests.support.application import run_job
with spark_context():
    done = [vars(run_job(*command)) for command in json.loads(plan)]
print("RESULT", json.dumps(done))
"""


@dataclass(frozen=True)
class Ended:
    """The exit code of one job, and what its Python side printed."""

    code: int
    out: str
    err: str


def run_job(job: str, *arguments: object) -> Ended:
    """Run jobs/JOB in this process as its command line does, with / as the current folder.

    The job uses the Spark session of this process if there is one.
    """
    return run_program(ROOT / "jobs" / job, *arguments)


def run_program(program: Path, *arguments: object, folder: Path = Path("/")) -> Ended:
    """Run a file of Python as run_job() does a job. folder: the current one meanwhile."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", [program.name, *map(str, arguments)]))
        stack.enter_context(mock.patch.object(sys, "path", list(sys.path)))
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            runpy.run_path(str(program), run_name="__main__")
        except SystemExit as end:
            return Ended(int(end.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError(f"{program.name} ended without an exit code")


def run_application(tmp_path: Path, plan: Sequence[tuple[object, ...]], **submit: Any) -> tuple[list[Ended], str]:
    """Run jobs in one application. Return how each of them ended, and all else that the application printed.

    plan: (job, *arguments) for each job. submit: keyword arguments of spark_submit().
    """
    script = tmp_path / "application.py"
    script.write_text(APPLICATION)
    commands = json.dumps([[str(part) for part in command] for command in plan])
    done = spark_submit(script, ROOT, commands, **submit)
    result = re.search(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    assert result, done.stdout + done.stderr
    return [Ended(**each) for each in json.loads(result[1])], done.stdout.replace(result[0], "") + done.stderr
