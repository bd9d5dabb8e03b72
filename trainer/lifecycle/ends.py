"""The start and the end of a run: the first event of its log, and the last one with result.json and the report."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pipeline.core.provenance import provenance
from trainer.checkpoints.read import newest
from trainer.config import Config
from trainer.home.folders import Folders
from trainer.home.place import Place, write_whole
from trainer.home.work import WorkFolder
from trainer.options import Options
from trainer.plan import RunPlan
from trainer.report.terminal import ending
from trainer.run_files import BEST, BEST_OF, METRICS, PUSHES, RESULT
from trainer.runlog.events import log_event, write_refused_lines
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.read import best, evaluations, read_pushes
from trainer.runlog.result import REPORTED, SUMMARISED, Result, is_best_of, summarise
from trainer.runlog.thinned import thinned_log
from trainer.transport.status import RunStatus

if TYPE_CHECKING:
    from trainer.report.page import Read

logger = logging.getLogger(__name__)


@cache
def _version(package: str) -> str:
    """Return the version of an installed package. Its metadata are parsed once per process: they take milliseconds."""
    return version(package)


def log_start(config: Config, run_plan: RunPlan, folders: Folders, simulated: dict[str, Any] | None = None) -> None:
    """Log the start of a run.

    Args:
        config, run_plan: the run and its plan.
        folders: the run's folders on this host.
        simulated: settings of the virtual cluster, for virtual-time runs.
    """
    versions = {name: _version(name) for name in ("torch", "numpy", "pyzmq")} | {"python": sys.version.split()[0]}
    resumed = newest(folders.checkpoints)
    log_event(
        folders.work,
        "start",
        config=config.to_json(),
        plan=asdict(run_plan),
        versions=versions,
        made=provenance(),
        resumed_from=resumed or None,
        **({"simulated": simulated} if simulated is not None else {}),
    )


def conclude(
    work: WorkFolder, options: Options, status: RunStatus, cause: str, error: BaseException | None = None
) -> Result:
    """Log the end of a run, write result.json and the report, and print a summary; also for an incomplete run.

    Args:
        work: the work folder of this host, which leads.
        options: how this host takes part.
        status: the last status of server 0.
        cause: finished, interrupted or failed.
        error: the error with which the run failed, None for another cause.

    Raises:
        OSError: a file could not be read or written.
        JobError: another start of the run leads it now.
    """
    output = work.folders.home
    log = work.folders.work
    log_end(work, status, cause, error)
    events = thinned_log(log / METRICS)
    pushes = read_pushes(log / PUSHES, REPORTED if options.report else SUMMARISED)
    result = summarise(events, pushes)
    _withdraw_other_best(output, events)
    write_whole(output / RESULT, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    report = try_report(output, (events, pushes)) if options.report else None
    outcome = Result(output=output, **result)
    announce(outcome, options, report)
    return outcome


def log_end(work: WorkFolder, status: RunStatus, cause: str, error: BaseException | None = None) -> None:
    """Log the end of a start. See ``conclude`` for the arguments and errors."""
    version = status.version
    why = {} if error is None else {"error": one_line(error)}
    log_event(work.folders.work, "end", cause=cause, seconds=status.seconds, version=version, updates=version, **why)
    write_refused_lines(work.folders.work)
    work.settle()  # raises if another start leads the run now, before result.json is written


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line of at most 500 characters, or its type if it has no message."""
    return " ".join(str(error).split())[:500] or type(error).__name__


def try_report(output: Place, read: Read | None = None) -> Place | None:
    """Write the report of a run that has ended and return its place; None if that failed.

    A failure is only a warning, because the result is valid without a report. As an error it would count as a lost
    host, and the run would be restarted again and again.

    output: the run's folder; read: its events and pushes, if they are in memory (default: read from the folder)."""
    try:
        from trainer.report.page import write_report  # loads matplotlib, which takes 1.5 s

        return write_report(output, read)
    except Exception as error:
        logger.warning(
            f"warning: the run has ended and {output / RESULT} is written, but its report failed: {one_line(error)};"
            " the same command writes the report again"
        )
        return None


def announce(result: Result, options: Options, report: Place | None) -> None:
    """Print a summary of the result, unless the options say silent."""
    if not options.silent:
        print(ending(vars(result), result.output, report), flush=True)


def _withdraw_other_best(output: Place, events: list[LogEvent]) -> None:
    """Delete best.safetensors if it is not the model of the best evaluation, whose accuracy result.json reports.

    That happens if a run ends between an evaluation and the write of its model, or right after a roll-back. The
    evaluator of a resume writes the right model."""
    top = best(evaluations(events))
    if top and not is_best_of(output, top):
        for name in (BEST_OF, BEST):
            (output / name).unlink(missing_ok=True)
