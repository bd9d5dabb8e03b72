"""Run the main of a job: print one line for an error of Spark or of a task, and exit with the documented exit code."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn

from pipeline.core import errors, program
from pipeline.core.errors import JobError
from pipeline.spark.failures import cluster_failure, raised_error


def execute(main: Callable[[], int]) -> NoReturn:
    """Run a job's main and exit with the documented exit code and one line for every expected error."""
    program.execute(
        main, interrupted="a set is committed completely or not at all, so run the same command again", cause=cause
    )


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a job that ends with an error."""
    if isinstance(error, JobError):
        return error.exit_code
    # The same as ``program.execute``: errors of the system are no errors of Spark, and need no text.
    if not isinstance(error, Exception) or isinstance(error, OSError | MemoryError):
        return 1
    return cause(error)[1]


def cause(error: Exception) -> tuple[str, int]:
    """Return the line that a task or the JVM raised, extracted from Spark's error, and the exit code."""
    text = str(error)
    # An error that a task raised reaches the driver only as text inside Spark's message.
    if match := re.search(r"pipeline\.core\.errors\.(\w+): (.+)", text):
        kind = getattr(errors, match[1], JobError)
        return match[2], kind.exit_code
    if not isinstance(error, ImportError) and (line := cluster_failure(text)):
        return line, 1
    detail = raised_error(text) or next(iter(text.strip().splitlines()), "")[:300]
    return f"{type(error).__name__}{': ' * bool(detail)}{detail} (--debug shows the whole trace)", 1
