"""A committed set of shards, as the trainer reads it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import cast

from pipeline.core.shardset.layout import Dtype, Layout
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.shardset.parts import ShardFile
from pipeline.core.shardset.ratios import Ratios
from pipeline.core.shardset.schema import TARGET_COLUMN
from pipeline.core.shardset.versions import unstamped
from trainer.config import CHANNEL
from trainer.models.base import ModelInput

BARE = "bare shards"  # in place of a strategy's name: nothing is known about how the rows were placed
SET_BITS = 40  # the ids of set k of a mixture begin at k * 2^40


@dataclass(frozen=True)
class Shards(ShardSet):
    """A committed set as the trainer reads it, or a mixture of several.

    Attributes:
        mapped: local folder in which this process and others of its host share decoded rows in memory-mapped files; None
            to load rows into memory.
        normalise: the mean that is subtracted from images, as --normalise names it.
        kept: local folder in which the processes of this host keep the mean image; None for a process alone.
        sets: the sets of a mixture, in whose manifest all files of a worker are listed by their whole addresses; empty for
            a set.
    """

    sets: tuple[Shards, ...] = ()
    mapped: Path | None = None
    normalise: str = CHANNEL
    kept: Path | None = None

    def address(self, file: ShardFile) -> str:
        """Return the URI of a file."""
        return file.path if self.sets else f"{self.uri}/{file.path}"

    def first_id(self, file: ShardFile) -> int:
        """Return the number that is added to the ids of a file's rows, because sets of a mixture have equal ids."""
        return self._numbers[file.path] << SET_BITS if self.sets else 0

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The number of the set of each file of a mixture, by its address. Roots of sets may be equal, or nested."""
        return {
            each.address(file): number
            for number, each in enumerate(self.sets)
            for file in [*each.files(), *each.eval_files()]
        }

    @property
    def rows(self) -> int:
        """Number of distinct training examples. Copies count in ``worker_rows`` only."""
        return self.manifest.rows

    @property
    def num_classes(self) -> int:
        return self.manifest.labels.num_classes

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.manifest.image.chw

    @property
    def inputs(self) -> ModelInput:
        """The properties of the rows that a model depends on."""
        return ModelInput(self.shape, self.num_classes, self.has_targets, self.has_labels)

    @property
    def layout(self) -> Layout:
        return Layout(self.shape, dtype=cast(Dtype, self.manifest.image.dtype))

    @property
    def is_bare(self) -> bool:
        """Whether the shards were given by their paths, without a manifest."""
        return self.manifest.strategy == BARE

    @property
    def has_labels(self) -> bool:
        """Whether rows have a class label."""
        return "label" in self.manifest.labels.columns

    @property
    def has_neighbourhoods(self) -> bool:
        """Whether rows have the number of a group of similar rows."""
        return self.manifest.neighbourhoods is not None

    @property
    def has_targets(self) -> bool:
        """Whether rows have a real-valued target, beside or instead of a class."""
        return TARGET_COLUMN in self.manifest.labels.columns

    @property
    def fingerprint(self) -> int | None:
        """The sum of the hashes of all distinct rows, modulo 2^64; None if the manifest has none."""
        text = self.manifest.input.fingerprint
        return int(text.rpartition("-")[2], 16) if text else None

    @cached_property
    def digest(self) -> str:
        """A digest of all training and evaluation rows and their assignment to workers.

        It is unchanged if the set is moved, or written again with the same content."""
        if self.sets:
            return sha256(" ".join(each.digest for each in self.sets).encode()).hexdigest()[:16]
        files = [*self.files(), *self.eval_files()]
        return sha256("\n".join(f"{unstamped(file.path)} {file.sha256}" for file in files).encode()).hexdigest()[:16]

    @property
    def ratios(self) -> Ratios:
        """The ratios of the shards; empty if they are equal."""
        return tuple(self.manifest.ratios or ())

    def ratios_of(self, num_workers: int) -> Ratios:
        """Return the ratios for a number of workers; empty if it is not the set's own, because parts are equal then."""
        return self.ratios if num_workers == self.num_workers else ()

    def worker_files(self, worker: int) -> list[ShardFile]:
        return self.manifest.workers[worker].files

    def worker_rows(self, worker: int) -> int:
        """Return the number of rows of a worker, copies included."""
        return sum(file.rows for file in self.worker_files(worker))

    @property
    def shard_rows(self) -> tuple[int, ...]:
        """The number of rows of each shard, copies included."""
        return tuple(self.worker_rows(shard) for shard in range(self.num_workers))
