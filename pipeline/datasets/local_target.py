"""A local folder that appears complete or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.atomic import path_in_errors
from pipeline.core.errors import UsageError


@dataclass(frozen=True)
class LocalTarget:
    """A folder of a local file system."""

    folder: Path

    def sizes(self) -> dict[str, int] | None:
        if not self.folder.exists():
            return None
        if not self.folder.is_dir():
            raise UsageError(f"{self.folder} is a file; give --to a folder that does not exist yet")
        return {entry.name: entry.stat().st_size for entry in self.folder.iterdir()}

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def publish(self, fill: Callable[[Path], None]) -> None:
        """Fill a temporary folder beside the target and rename it. Raises OSError if the target is not empty."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{self.folder.name}.", dir=self.folder.parent, ignore_cleanup_errors=True
        ) as work:
            files = Path(work) / "files"  # the temporary folder itself is private; this one has the usual rights
            files.mkdir()
            with path_in_errors(self.folder.parent):
                fill(files)
            os.replace(files, self.folder)  # fails if the target folder is not empty
