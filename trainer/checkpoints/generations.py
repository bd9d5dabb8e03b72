"""Which histories a run has left. Servers that go on from a checkpoint are a new generation; what earlier ones wrote beyond
that version is void, even where it could not be deleted, or comes from a slow disk only afterwards."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pipeline.core.errors import DataError
from pipeline.core.json_values import fits, parse
from trainer.home.place import Place, make, write_whole

GENERATIONS = "generations.json"


@dataclass(frozen=True)
class Generations:
    """begun: (generation, the version that it went on from), both ascending. One that a later one began before is left out:
    the later one voids at least as much."""

    begun: tuple[tuple[int, int], ...] = ()

    @property
    def latest(self) -> int:
        return self.begun[-1][0] if self.begun else 0

    def count(self, generation: int, version: int) -> bool:
        """Whether what that generation did at that version is in the history of the run."""
        return all(version <= start for later, start in self.begun if later > generation)

    def begin(self, generation: int, version: int) -> Generations:
        return Generations((*(entry for entry in self.begun if entry[1] < version), (generation, version)))


def read_generations(root: Place) -> Generations:
    """Raises DataError where the file is damaged, OSError where it cannot be read."""
    path = root / GENERATIONS
    try:
        begun = parse(path.read_bytes())
        if not fits(begun, list[list[int]]):
            raise ValueError("it is no list of pairs")
        return Generations(tuple((generation, version) for generation, version in begun))
    except FileNotFoundError:
        return Generations()
    except ValueError:
        raise DataError(f"{path} is damaged; choose another --output, or --overwrite") from None


def write_generations(root: Place, generations: Generations) -> None:
    """Raises OSError."""
    make(root)
    write_whole(root / GENERATIONS, json.dumps(generations.begun).encode())
