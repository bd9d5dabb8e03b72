"""Run the main of a program: print one line for an error, and exit with the documented exit code.

Needs no Spark, but is used by programs on Spark too."""

from __future__ import annotations

import io
import os
import select
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, TextIO

from pipeline.core import console
from pipeline.core.errors import JobError
from pipeline.core.import_path import hiding_file
from pipeline.core.storage import retries

_shows_traces = False
BROKEN_PIPE = 128 + 13  # the exit code that a shell reports for a program that was ended by SIGPIPE


def show_traces(shows: bool) -> None:
    """Set whether ``execute`` prints the stack trace of an error: --debug, or debug = true in a configuration file."""
    global _shows_traces
    _shows_traces = shows


def unforeseen(error: Exception) -> tuple[str, int]:
    """Return the line and exit code of an error without a message of its own."""
    text = hiding_file(error) or str(error).strip()
    detail = f": {text.splitlines()[0][:300]}" if text else ""
    return f"{type(error).__name__}{detail} (--debug shows the whole trace)", 1


def execute(
    main: Callable[[], int], *, interrupted: str, cause: Callable[[Exception], tuple[str, int]] = unforeseen
) -> NoReturn:
    """Run a program's main, print one line for an error, and exit with the documented exit code.

    Args:
        main: returns the exit code.
        interrupted: message after Ctrl-C.
        cause: returns the line and exit code of an unforeseen error.
    """
    show_traces("--debug" in sys.argv)  # for errors before the command line is parsed
    if os.getpid() == 1:
        # The kernel keeps signals from the first process of a container while they have no handler.
        signal.signal(signal.SIGTERM, _interrupt)
    _replace_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of another encoding, as standard error has it
    try:
        code = main()
        sys.stdout.flush()  # here, where its errors are still caught
    except JobError as error:
        code = fail(str(error), error.exit_code, _shows_traces)
    except KeyboardInterrupt:
        code = fail(f"interrupted; {interrupted}", 1, _shows_traces)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            code = BROKEN_PIPE
        elif follows_interrupt(error):
            code = fail(f"interrupted; {interrupted}", 1, _shows_traces)
        elif isinstance(error, OSError) and (reason := _output_error()):
            code = fail(f"standard output cannot be written: {reason}", 1, _shows_traces)
        elif isinstance(error, FileNotFoundError) and not _has_current_folder():
            code = fail("the current folder has been deleted: change to another one", 1, _shows_traces)
        elif isinstance(error, (OSError, MemoryError)):
            code = fail(str(error) or type(error).__name__, 1, _shows_traces)
        else:
            line, code = cause(error)
            code = fail(line, code, _shows_traces)
    for output in (sys.stdout, sys.stderr):
        try:
            output.flush()
        except OSError:  # of a full disk, and reported above
            _discard(output)
    # A thread of a native client that returns during Python's shutdown would abort the process.
    if retries.has_abandoned_threads():
        os._exit(code)
    sys.exit(code)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _replace_closed_streams() -> None:
    """Open /dev/null for the standard streams that the program was started without.

    A file that the program opens would otherwise get the number of the stream, on which native libraries write."""
    # Each of them takes the lowest number that is free. Programs that this one starts inherit them.
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            file = open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8")  # noqa: SIM115 (kept to the end)
            os.set_inheritable(file.fileno(), True)
            setattr(sys, name, file)


def _output_error() -> str | None:
    """Return why standard output cannot take what was written to it, such as a full disk; None if it can."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return error.strerror
    return None


def _has_current_folder() -> bool:
    """Return whether the current folder still exists."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def follows_interrupt(error: BaseException) -> bool:
    """Return whether a connection failed while the program cleaned up after Ctrl-C.

    Spark's JVM gets the signal too, and may have ended before the last call to it."""
    if not (isinstance(error, ConnectionError) or type(error).__module__.startswith("py4j.")):
        return False
    earlier = error.__context__
    while earlier is not None and not isinstance(earlier, KeyboardInterrupt):
        earlier = earlier.__context__
    return earlier is not None


def _output_is_closed() -> bool:
    """Return True and discard further output if the reader of standard output has exited, as ``head`` does."""
    poll = select.poll()
    try:
        poll.register(sys.stdout, select.POLLOUT)
    except ValueError:  # an object in its place, without a file
        return False
    is_closed = any(event & select.POLLERR for _, event in poll.poll(0))
    if is_closed:
        _discard(sys.stdout)
    return is_closed


def _discard(output: TextIO) -> None:
    """Discard all that is and will be written to an output, so that Python's own flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())


def fail(line: str, code: int, debug: bool) -> int:
    """Print an error as one line, after the stack trace if ``debug``, and return the exit code."""
    if debug:
        import traceback

        traceback.print_exc()
    text = console.printable(" ".join(line.split()))
    console.say("sharding", text, text=f"error: {text}", level="error", fields={"exit_code": code})
    return code
