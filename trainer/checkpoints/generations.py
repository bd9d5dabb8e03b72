"""Generations: the histories of a run between roll-backs.

Servers that load a checkpoint start a new generation. Everything that earlier generations wrote beyond that version is
void, even if it could not be deleted, or if a slow disk completes it only later."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pipeline.core.errors import DataError
from pipeline.core.json_values import fits, parse
from trainer.home.place import Place, make, write_whole

GENERATIONS = "generations.json"


@dataclass(frozen=True)
class Generations:
    """The generations of a run.

    begun: (generation, version at which it began), both ascending. A generation is left out if a later one began at an
    earlier version, which voids at least as much."""

    begun: tuple[tuple[int, int], ...] = ()

    @property
    def latest(self) -> int:
        return self.begun[-1][0] if self.begun else 0

    def includes(self, generation: int, version: int) -> bool:
        """Return whether a version of a generation belongs to the run's history."""
        return all(version <= start for later, start in self.begun if later > generation)

    def begin(self, generation: int, version: int) -> Generations:
        """Return the generations with one more, which begins at a version."""
        return Generations((*(entry for entry in self.begun if entry[1] < version), (generation, version)))


def read_generations(root: Place) -> Generations:
    """Read the generations of a run. Raises DataError if the file is damaged, OSError if it cannot be read."""
    path = root / GENERATIONS
    try:
        pairs = parse(path.read_bytes())
        if not fits(pairs, list[list[int]]):
            raise ValueError("it is no list of pairs")
        return Generations(tuple((generation, version) for generation, version in pairs))
    except FileNotFoundError:
        return Generations()
    except ValueError:
        raise DataError(f"{path} is damaged; choose another --output, or --overwrite") from None


def write_generations(root: Place, generations: Generations) -> None:
    """Write the generations of a run. Raises OSError."""
    make(root)
    write_whole(root / GENERATIONS, json.dumps(generations.begun).encode())
