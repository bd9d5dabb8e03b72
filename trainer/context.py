"""The context of a run: its configuration, with the places that it names resolved once, where it enters a process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from pipeline.core.errors import UsageError
from trainer.checkpoints.read import newest, read_state
from trainer.config import Config
from trainer.home.place import Place, place_of
from trainer.run_files import CHECKPOINTS
from trainer.runlog.run_folder import saved_generation, saved_mix
from trainer.sampling.mixture import changed_mix

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
        newest: returns the shard set with all its generations. The first call opens and checks it; later ones do not.
    """

    config: Config
    home: Place
    newest: Callable[[], Shards]

    @classmethod
    def from_config(cls, config: Config, home: Place | None = None) -> RunContext:
        """Resolve the places of a run. Raises UsageError for an invalid --output.

        home: the run's folder (default: --output)."""

        @cache
        def newest() -> Shards:
            from trainer.data.shards import open_pinned

            return open_pinned(replace(config.data, generation=None))

        return cls(config, home or place_of(config.run.output), newest)

    @property
    def shards(self) -> Shards:
        """The shard set at the generation to which the run is pinned, if any. Raises UsageError and DataError."""
        from trainer.data.shards import pin_generation

        return pin_generation(self.newest(), self.config.data.generation)

    def pinned(self, *, overwrite: bool = False) -> RunContext:
        """Return the context of a run on a growing set, pinned to the generation at which it begins.

        That is the newest one, or for a resumed run the one at which it began. A context that is pinned, or whose set
        does not grow, is returned unchanged. overwrite: begin anew, whatever an existing run was pinned to. Raises
        UsageError and DataError."""
        from pipeline.core.shardset.generations import generations

        data = self.config.data
        stream_generations = generations(self.newest()) if data.generation is None else []
        if data.follow and data.generation is None and not stream_generations:
            raise UsageError(f"--follow: {self.newest().uri} was made at once, by no stream; leave it out")
        if not stream_generations:
            return self
        # A resumed run keeps its first generation: the rows appended since then would change its passes.
        saved_number = None if overwrite else saved_generation(self.home)
        begins = len(stream_generations) - 1 if saved_number is None else saved_number
        return replace(self, config=replace(self.config, data=replace(data, generation=begins)))

    def mixed(self, *, overwrite: bool = False) -> RunContext:
        """Return the context of a run that mixes sets, with the history of its shares.

        If a start asks for other shares than the run had, these count from the first clock that no worker has reached, so
        that the mini-batches before it stay the same. Other contexts are returned unchanged.

        overwrite: begin anew, whatever an existing run had. Raises UsageError and DataError."""
        data = self.config.data
        history = saved_mix(self.home) if data.mix and not overwrite else ""
        if not history:
            return self
        version = newest(self.home / CHECKPOINTS)
        clocks = read_state(self.home / CHECKPOINTS, version).clocks if version is not None else {}
        mix = changed_mix(history, data.mix, max(clocks.values(), default=0))
        return replace(self, config=replace(self.config, data=replace(data, mix=mix)))
