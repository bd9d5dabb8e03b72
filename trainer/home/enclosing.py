"""The committed set, or the run, in whose folder a path lies: no other command may write a file there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pipeline.core.json_values import parse_object
from pipeline.core.shardset.versions import NAME as MANIFEST
from pipeline.core.storage.uri import split_uri
from trainer.home.place import Place
from trainer.run_files import CONFIG, METRICS

# A folder above a path may be closed to the user, or may be a file; a manifest may be another program's file or folder.
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, ValueError)


def enclosing_set(place: Place) -> Place | None:
    """Return the folder of the committed set that a path lies in, None if there is none. Costs a read per folder."""
    for folder in _folders_above(place):
        with suppress(*ABSENT):
            if parse_object((folder / MANIFEST).read_bytes()).keys() >= {"num_workers", "workers"}:
                return folder
    return None


def enclosing_run(place: Place) -> Place | None:
    """Return the folder of the run that a path lies in, None if there is none. Costs two look-ups per folder."""
    for folder in _folders_above(place):
        with suppress(*ABSENT):
            if (folder / METRICS).exists() and (folder / CONFIG).exists():
                return folder
    return None


def _folders_above(place: Place) -> Iterator[Place]:
    """Yield the folders above a path, the nearest one first, without symbolic links."""
    if isinstance(place, Path):
        yield from Path(os.path.realpath(place)).parents
        return
    while split_uri(place.uri)[2].strip("/"):
        place = place.parent
        yield place
