"""The configuration of a stream, and its identity, by which a later start recognises it."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass

from pipeline.core.errors import UsageError
from pipeline.core.shardset.contract import FORMAT_VERSION
from pipeline.input.channels import check_channels
from pipeline.input.scan import MAX_CLASSES
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
        format: format of the input; None: recognised.
        shape: (channels, height, width), if the files do not contain it.
        num_classes: labels must be in 0..num_classes-1; None: the layout's, or the labels of the first batch.
        unlabelled: ignore labels.
        channels: 1 or 3, to convert images to grey or RGB; None: as they are.
        window_rows: a window closes with the generation in which it reaches this many rows; 0: never.
        late_after_s: quarantine records that are this much older than the newest before them; None: never.
    """

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
        """Return a digest of everything except the rows that decides the shards."""
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
        # Only added if set, so that identities without this option do not change.
        if self.channels:
            configuration["channels"] = self.channels
        return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()
