"""The file or folder that an export writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pipeline.core.errors import JobError, UsageError
from trainer.home.place import Place
from trainer.run_files import LEASE, LOCK
from trainer.runlog.run_folder import locked

LOCKS = (LOCK, LEASE)  # in a folder that an export writes


@contextmanager
def unwritable_is_usage_error(target: Place) -> Iterator[None]:
    """Raise UsageError for an OSError, which names the target."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"--to {target} cannot be written: {error.strerror or error}; choose another") from error


@contextmanager
def locked_folder(target: Place) -> Iterator[None]:
    """Hold the lock of a folder while an export writes it. Raises UsageError while another export holds it.

    A local folder is left without the lock's file, so that only the export is uploaded or copied; a store keeps a
    released lease."""
    with ExitStack() as stack:
        with unwritable_is_usage_error(target):
            try:
                stack.enter_context(locked(target))
            except JobError:
                raise UsageError(
                    f"--to {target} is in use by an export that has not ended; wait for it, or choose another"
                ) from None
        if isinstance(target, Path):
            stack.callback((target / LOCK).unlink, missing_ok=True)
        yield
