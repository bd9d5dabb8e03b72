"""Where one host keeps a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.home.place import Place, place_of
from trainer.run_files import CHECKPOINTS


@dataclass(frozen=True)
class Folders:
    """Picklable: every process of a host has them.

    home: the run's, which all its hosts with servers or the evaluator reach; work: this host's own local folder, to which
    events, gradients and logs are appended: the home itself where that is local. source: what this host's segments in the
    home are called, by the number of its start where it leads the run; empty where the home is local.
    begins: where this start's own bytes begin in a file of the log, behind those of earlier ones."""

    home: Place
    work: Path
    source: str = ""
    begins: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, output: str | Path) -> Folders:
        """Those of a run in a local folder. Raises UsageError for another one: its work folder is made by ``working``."""
        home = place_of(str(output))
        assert isinstance(home, Path), "a run elsewhere has a work folder"
        return cls(home, home)

    @property
    def checkpoints(self) -> Place:
        return self.home / CHECKPOINTS

    @property
    def is_local(self) -> bool:
        return not self.source

    @property
    def leads(self) -> bool:
        """Whether server 0 is here."""
        return self.is_local or self.source.isdecimal()

    def at_home(self, path: Path) -> Place:
        """Where a file of the work folder is found when the run has ended."""
        place = self.home
        for part in path.relative_to(self.work).parts if path.is_relative_to(self.work) else ():
            place = place / part
        return place
