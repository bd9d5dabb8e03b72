"""The place of a file for the textfile collector of Prometheus's node_exporter."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.core.errors import UsageError
from pipeline.core.extras import require

SUFFIX = ".prom"  # of the files that the collector reads


def check_metrics_file(path: Path) -> None:
    """Raise UsageError if no metrics can be written to a path that the collector reads."""
    require("metrics", "--metrics-file")
    if path.suffix != SUFFIX:
        raise UsageError(f"--metrics-file {path} does not end in {SUFFIX}; node_exporter reads no other files")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"--metrics-file {path}: {path.parent} is no folder that this user may write to")
