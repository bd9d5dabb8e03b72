"""The folders in which one host keeps a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.home.place import Place
from trainer.run_files import CHECKPOINTS


@dataclass(frozen=True)
class Folders:
    """The folders of a run on one host. Picklable, because every process of the host gets them.

    Args:
        home: the run's folder, which all hosts with servers or the evaluator can reach.
        work: this host's local folder, to which events, pushes and logs are appended; the home itself if that is local.
        source: prefix of this host's segments in the home: the number of its start on the leading host, "host-..." on
            others, empty if the home is local.
        rows: folder of this host for memory-mapped rows; None to load rows into memory.
        kept: folder of this host for the mean image of the set; None if the run subtracts none.
        begins: (log file, first byte that this start appended), for files that already had bytes of earlier starts.
    """

    home: Place
    work: Path
    source: str = ""
    begins: tuple[tuple[str, int], ...] = ()
    rows: Path | None = None
    kept: Path | None = None

    @classmethod
    def from_home(cls, home: Path) -> Folders:
        """Return the folders of a run in a local folder. A remote run gets its work folder from ``working`` instead."""
        return cls(home, home)

    @property
    def checkpoints(self) -> Place:
        return self.home / CHECKPOINTS

    @property
    def is_local(self) -> bool:
        return not self.source

    @property
    def leads(self) -> bool:
        """Return whether server 0 runs on this host."""
        return self.is_local or self.source.isdecimal()

    def home_place(self, path: Path) -> Place:
        """Return the place in the home to which a file of the work folder is copied by the end of the run.

        Of any other path the home itself, as the nearest place that a message can name."""
        place = self.home
        for part in path.relative_to(self.work).parts if path.is_relative_to(self.work) else ():
            place = place / part
        return place
