"""Forked processes that do some work, and are killed before a chosen change of a file."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any


class Countdown:
    """Kills its process by SIGKILL just before step number ``left``."""

    def __init__(self, left: int) -> None:
        self.left = left

    def step(self) -> None:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, change: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, as one step."""

        def dying(*args: Any, **more: Any) -> Any:
            self.step()
            return change(*args, **more)

        return dying


def forked(work: Callable[[], object]) -> int:
    """A process that does some work and ends with 0, or with 1 and a stack trace."""
    if child := os.fork():
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def was_killed(work: Callable[[], object], step: int) -> bool:
    """Return whether a forked process was killed in some work, before file change number ``step``.

    Raises AssertionError if the process ended in any other way; its stack trace is on stderr."""
    code = os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1])
    assert code in (0, -signal.SIGKILL), f"the work ended with {code} before file change {step}"
    return code != 0


def was_killed_at(
    step: int,
    work: Callable[[], object],
    changes: Iterable[str],
    prepare: Callable[[Countdown], object] = lambda countdown: None,
) -> bool:
    """The same, with functions of ``os`` as changes. prepare: called first in the forked process, for other changes."""

    def count_and_work() -> None:
        countdown = Countdown(step)
        for name in changes:
            setattr(os, name, countdown.before(getattr(os, name)))
        prepare(countdown)
        work()

    return was_killed(count_and_work, step)
