"""The configuration of a stream, and its identity, by which a later start recognises it."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

from pipeline.core.errors import UsageError
from pipeline.core.shardset.contract import FORMAT_VERSION
from pipeline.input.formats import FORMATS
from pipeline.input.read_options import ReadOptions
from pipeline.strategies.hash import Hash

WINDOW_ROWS = 50_000


@dataclass(frozen=True)
class StreamRequest:
    """The configuration of a stream.

    Attributes:
        output: folder of the set.
        num_workers: number of shards.
        strategy: the hash functions.
        model: a committed set whose hash functions are used; None: fit them to the first batch.
        read_options: how the rows are read; without num_classes, labels must be in the layout's classes, or among those
            of the first batch.
        window_rows: a window closes with the generation in which it reaches this many rows; 0: never.
        late_after_s: quarantine records that are this much older than the newest before them; None: never.
    """

    output: str
    num_workers: int
    strategy: Hash
    model: str | None = None
    read_options: ReadOptions = ReadOptions()
    window_rows: int = WINDOW_ROWS
    late_after_s: float | None = None

    def __post_init__(self) -> None:
        """Check the values. Raises UsageError."""
        if self.num_workers < 1:
            raise UsageError(f"--workers must be at least 1, got {self.num_workers}")
        if self.window_rows < 0:
            raise UsageError(f"--window-rows must be 0 or more, got {self.window_rows}")
        if self.late_after_s is not None and not 0 < self.late_after_s < math.inf:
            raise UsageError(f"--late-after must be a positive number of seconds, got {self.late_after_s:g}")
        # Formats that are recognised by content are refused file by file (input/arrivals.py).
        kind = FORMATS.get(self.read_options.format or "")
        if kind and kind.needs_others:
            raise UsageError(
                f"--format {kind.name}: its labels are not in the same file, and a stream takes each file alone; pack them"
                " into tar, Parquet or npz files"
            )

    @property
    def seed(self) -> int:
        return self.strategy.seed

    def settings(self) -> dict[str, Any]:
        """Return the configuration without levels, with the types of JSON."""
        values = self._configuration()
        values |= values.pop("params") | values.pop("stream")
        settings: dict[str, Any] = json.loads(json.dumps(values))  # tuples become lists
        return settings

    def identity(self) -> str:
        """Return a digest of the configuration."""
        return hashlib.sha256(json.dumps(self._configuration(), sort_keys=True).encode()).hexdigest()

    def _configuration(self) -> dict[str, Any]:
        """Return everything except the rows that decides the shards."""
        options = self.read_options
        configuration: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "strategy": self.strategy.name,
            "params": self.strategy.params(),
            "seed": self.seed,
            "num_workers": self.num_workers,
            "shape": options.shape,
            "classes": options.num_classes,
            "unlabelled": options.unlabelled,
            "stream": {"window_rows": self.window_rows, "late_after_s": self.late_after_s, "model": self.model},
        }
        # Only options that are set, so that identities without them do not change.
        return configuration | options.identity_values()
