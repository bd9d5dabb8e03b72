"""The file or folder that an export writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.core.errors import UsageError
from trainer.home.place import Place


@contextmanager
def unwritable_is_usage_error(target: Place) -> Iterator[None]:
    """Raise UsageError for an OSError, which names the target."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"--to {target} cannot be written: {error.strerror or error}; choose another") from error
