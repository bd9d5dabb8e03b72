"""The file or folder that an export writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pipeline.core.errors import JobError, UsageError
from pipeline.core.json_values import parse_object
from trainer.export.formats import BEGUN, FORMATS
from trainer.home.enclosing import enclosing_run, enclosing_set
from trainer.home.place import Place, entries
from trainer.run_files import LEASE, LOCK
from trainer.runlog.run_folder import locked

LOCKS = (LOCK, LEASE)  # in a folder that an export writes


def check_outside(target: Place) -> None:
    """Raise UsageError if a file or folder to write lies in a committed set, or in the folder of a run."""
    if around := enclosing_set(target):
        raise UsageError(f"--to {target} lies in the shard set {around}; choose another")
    if around := enclosing_run(target):
        raise UsageError(f"--to {target} lies in the run {around}; choose another")


def names_in(folder: Place) -> set[str]:
    """Return the names of the files and folders in a folder, without hidden ones (git's), locks and incomplete files."""
    names = {entry.name for entry in entries(folder) if not entry.name.startswith(".")}
    return {name for name in names if not name.endswith(".tmp")} - {*LOCKS}


def read_begun(folder: Place, source: str) -> dict[str, str] | None:
    """Return the identity of the export in a folder; None if there is none, or the file is another program's.

    source: "set" or "model", the key of what was exported."""
    try:
        values = parse_object((folder / BEGUN).read_bytes())
    except (FileNotFoundError, IsADirectoryError, ValueError):
        return None
    return values if values.keys() == {source, "format"} and values["format"] in FORMATS else None


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
