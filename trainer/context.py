"""The context of a run: its configuration, with the places that it names resolved once, where it enters a process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from pipeline.core.errors import UsageError
from trainer.config import Config
from trainer.home.place import Place, place_of
from trainer.run_files import CHECKPOINTS
from trainer.runlog.run_record import SavedRun

if TYPE_CHECKING:
    from trainer.data.shards import Shards  # loading it takes a second, which --help should not


@dataclass(frozen=True)
class RunContext:
    """A run and its places, as one process sees them.

    It is not passed on to other processes, because the opened set may hold connections: role processes get the
    configuration and their host's folders, and open the set themselves, so that a restarted one notices a damaged set.

    Attributes:
        config: the configuration.
        home: the run's folder.
        opened: returns the shard set, at the generation to which the run is pinned, if any. The first call opens and
            checks it; later ones do not.
    """

    config: Config
    home: Place
    opened: Callable[[], Shards]

    @classmethod
    def from_config(cls, config: Config, home: Place | None = None, *, digest: str = "") -> RunContext:
        """Resolve the places of a run. Raises UsageError for an invalid --output.

        home: the run's folder (default: --output); digest: the digest that its set must have, "" for any."""

        @cache
        def opened() -> Shards:
            from trainer.data.pinned import open_pinned

            return open_pinned(config.data, digest=digest)

        return cls(config, home or place_of(config.run.output), opened)

    @classmethod
    def open(cls, config: Config, home: Place) -> RunContext:
        """Open the shard set of a run with this folder now. Raises UsageError and DataError."""
        context = cls.from_config(config, home)
        context.opened()
        return context

    @property
    def checkpoints(self) -> Place:
        return self.home / CHECKPOINTS

    @property
    def shards(self) -> Shards:
        """The shard set. Raises UsageError and DataError."""
        return self.opened()

    @property
    def num_workers(self) -> int:
        """The number of workers: one per shard, unless a resume has changed it."""
        return self.config.num_workers(self.shards.num_workers)

    def pinned(self, saved: SavedRun) -> RunContext:
        """Return the context of a run on a growing set, pinned to the generation at which it begins.

        That is the newest one, or for a resumed run the one at which it began. A context that is pinned, or whose set
        does not grow, is returned unchanged. saved: the run in the folder. Raises UsageError and DataError."""
        from pipeline.core.shardset.generations import generations
        from trainer.data.pinned import pin_generation

        data = self.config.data
        stream_generations = generations(self.shards) if data.generation is None else []
        if data.follow and data.generation is None and not stream_generations:
            raise UsageError(f"--follow: {self.shards.uri} was made at once, by no stream; leave it out")
        if not stream_generations:
            return self
        # A resumed run keeps its first generation: the rows appended since then would change its passes.
        record = saved.intact()
        number = None if record is None else record.config.data.generation
        begins = len(stream_generations) - 1 if number is None else number
        shards = pin_generation(self.shards, begins)
        pinned_config = replace(self.config, data=replace(data, generation=begins))
        return replace(self, config=pinned_config, opened=lambda: shards)
