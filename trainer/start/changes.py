"""The continuation of a run whose workers are to change: the next start, and its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from pipeline.core import console
from pipeline.core.errors import JobError, UsageError
from trainer.launch.workers_request import Requests
from trainer.lifecycle.interruption import RunInterruptedError
from trainer.options import Options
from trainer.report.progress import LOGGER
from trainer.runlog.run_record import saved_run

T = TypeVar("T")


def start_until_end(start: Callable[[Options], T], options: Options, requests: Requests) -> T:
    """Start a run, and start it again for every change of its workers. Returns the result of the last start.

    Args:
        start: trains until the end of the run, or until its workers are to change.
        options: of the first start.
        requests: the requests of other workers.
    """
    while True:
        try:
            return start(options)
        except JobError as error:
            following = next_options(error, options, requests)
            if following is None:
                raise
            options = following


def next_options(error: JobError, options: Options, requests: Requests) -> Options | None:
    """Return the options with which a run continues whose workers are to change; None if it has ended.

    Args:
        error: the error with which this start has ended.
        options: its options.
        requests: the requests of other workers.
    """
    if isinstance(error, RunInterruptedError) and error.changes:
        request = requests.take()
        workers = request.workers if request else _present_workers(requests)
        return replace(options, resume=True, overwrite=False, workers=workers, batch_size_given=False)
    if not isinstance(error, UsageError) or requests.tried is None:
        return None
    # The start that should have these workers has changed nothing.
    requests.refuse(str(error))
    if not options.silent:
        console.say(LOGGER, f"the workers stay as they are: {error}", level="warning")
    return replace(options, workers=_present_workers(requests))


def _present_workers(requests: Requests) -> int | None:
    """Return the number of workers of the run in the folder; None if its record cannot be read."""
    record = saved_run(requests.home).record
    return record.num_workers if record else None
