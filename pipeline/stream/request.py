"""What a stream is to do, and what makes two starts of it the same stream."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass

from pipeline.core.errors import UsageError
from pipeline.core.shardset.manifest import FORMAT_VERSION
from pipeline.input.channels import check_channels
from pipeline.input.scan import MAX_CLASSES
from pipeline.strategies.hash import Hash

WINDOW_ROWS = 50_000


@dataclass(frozen=True)
class StreamRequest:
    """model: a committed set whose hash functions are used, None to fit them to the first batch. format, shape: of rows,
    where they do not tell. window_rows: a window closes with the generation in which it comes to so many rows; 0: never.
    late_after_s: records so much older than the newest before them are put aside; None: none are."""

    output: str
    num_workers: int
    strategy: Hash
    model: str | None = None
    format: str | None = None
    shape: tuple[int, int, int] | None = None
    num_classes: int | None = None
    unlabelled: bool = False
    channels: int | None = None
    window_rows: int = WINDOW_ROWS
    late_after_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise UsageError(f"--workers must be at least 1, got {self.num_workers}")
        if self.num_classes is not None and not 1 <= self.num_classes <= MAX_CLASSES:
            raise UsageError(f"--num-classes must be in 1..{MAX_CLASSES}, got {self.num_classes}")
        if self.unlabelled and self.num_classes is not None:
            raise UsageError("--unlabelled and --num-classes exclude each other")
        check_channels(self.channels)
        if self.window_rows < 0:
            raise UsageError(f"--window-rows must be 0 or more, got {self.window_rows}")
        if self.late_after_s is not None and not 0 < self.late_after_s < math.inf:
            raise UsageError(f"--late-after must be a positive number of seconds, got {self.late_after_s:g}")

    @property
    def seed(self) -> int:
        return self.strategy.seed

    def identity(self) -> str:
        """A digest of everything but the rows that decides the shards."""
        configuration = {
            "format_version": FORMAT_VERSION,
            "strategy": self.strategy.name,
            "params": self.strategy.params(),
            "seed": self.seed,
            "num_workers": self.num_workers,
            "shape": self.shape,
            "classes": self.num_classes,
            "unlabelled": self.unlabelled,
            "stream": {"window_rows": self.window_rows, "late_after_s": self.late_after_s, "model": self.model},
        }
        if self.channels:
            configuration["channels"] = self.channels
        return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()
