"""Training on a set that grows: a worker adopts appended rows at the start of a pass, and records where it did.

RUN/followed/worker-003-000000001200.json says that worker 3 uses the rows of a generation from its example 1,200 on, which
begins a pass. The file is created before the first such mini-batch and never changed, so a worker that is restarted or
resumed draws the same examples again. The generation in use is therefore a function of a checkpoint's clocks."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

from pipeline.core.errors import DataError, UsageError
from pipeline.core.json_values import fits, parse_object
from pipeline.core.shardset.generations import as_of, generations
from pipeline.core.shardset.manifest import read_committed
from pipeline.core.storage.claim import claim
from pipeline.core.storage.retries import with_retries
from pipeline.core.storage.store import Store
from trainer.data.follow import Following, Stretch
from trainer.data.loading import load_files
from trainer.data.rows import Rows, join_rows
from trainer.data.shards import Shards
from trainer.home.place import Place, entries
from trainer.run_files import CONFIG, FOLLOWED
from trainer.runlog.events import log_event

LOOK_S = 0.2  # least time between two reads of the manifest: passes over few rows are short


def name_of(worker: int, position: int) -> str:
    return f"worker-{worker:03d}-{position:012d}.json"


def recorded(home: Place, worker: int) -> list[Stretch]:
    """Return the recorded decisions of a worker, ordered by position."""
    folder = home / FOLLOWED
    pattern = re.compile(rf"worker-{worker:03d}-\d+\.json")
    places = [folder / entry.name for entry in entries(folder) if pattern.fullmatch(entry.name)]
    return sorted(_parse(place, place.read_bytes()) for place in places)


def record(home: Place, worker: int, stretch: Stretch) -> Stretch:
    """Write a worker's decision, unless one is recorded for the same position, and return the recorded one.

    Raises DataError if that is damaged."""
    place = home / FOLLOWED / name_of(worker, stretch.position)
    store = Store() if isinstance(place, Path) else place.store
    # A different record was written by an earlier start of this worker that was presumed dead.
    content = with_retries(claim)(store, str(place), json.dumps(stretch._asdict()).encode())
    return _parse(place, content or b"")


def _parse(place: Place, text: bytes) -> Stretch:
    """Return the stretch of a record. Raises DataError if it is damaged."""
    try:
        values = parse_object(text)
        if not fits(values, dict[str, int]):
            raise ValueError("its values are no whole numbers")
        return Stretch(**values)
    except (ValueError, TypeError) as error:
        raise DataError(f"{place} is damaged ({error}); choose another --output, or --overwrite") from None


class GrowingRows:
    """The rows of a worker in a growing set; implements trainer.data.follow.RowSource.

    Args:
        home: folder of the run.
        work: work folder of this host.
        worker: number of the worker.
        shards: the set at the start of the run.
        rows: the worker's rows at the start of the run.
        targets: whether rows have real targets instead of labels.
        looks: whether to adopt newer generations than the recorded ones.
    """

    def __init__(
        self, home: Place, work: Path, worker: int, shards: Shards, rows: Rows, *, targets: bool, looks: bool
    ) -> None:
        self.home = home
        self.work = work
        self.worker = worker
        self.targets = targets
        self.looks = looks
        self.shards = shards
        self.newest = shards
        self._rows = rows
        self.loaded = last_generation(shards)
        self._last_look = -LOOK_S

    def following(self) -> Following:
        """Return the passes over the rows, with all decisions that are recorded so far."""
        first = Stretch(0, 0, len(self._rows), self.loaded)
        return Following([first, *recorded(self.home, self.worker)], self)

    def next(self, now: Stretch, position: int, turn: int) -> Stretch | None:
        """Return the stretch from pass ``turn`` on if a newer generation has rows for this worker, otherwise None.

        The decision is recorded and logged, and its rows are loaded. See RowSource for the arguments."""
        if not self.looks or time.monotonic() - self._last_look < LOOK_S:
            return None
        self._look()
        self._last_look = time.monotonic()
        generation = last_generation(self.newest)
        rows = self.newest.worker_rows(self.worker)
        # A generation without rows for this worker changes none of its mini-batches, so it needs no record.
        if generation <= now.generation or rows == now.rows:
            return None
        # Recorded before the rows are used. The record of an earlier start counts, if it has chosen another generation.
        stretch = record(self.home, self.worker, Stretch(position, turn, rows, generation))
        start = time.monotonic()
        self.rows(stretch.generation)
        spent = time.monotonic() - start
        at = {"turn": stretch.turn, "position": stretch.position}
        about = {"rows": stretch.rows, "set_generation": stretch.generation, "load_s": spent}
        log_event(self.work, "appended", worker=self.worker, **at, **about)
        return stretch

    def rows(self, generation: int) -> Rows:
        """Return the worker's rows up to a generation or later; files that are not loaded yet are read now."""
        if generation > self.loaded:
            if generation > last_generation(self.newest):
                self._look()
            # The set was restored from a copy that lacks rows of this run.
            if generation > (last := last_generation(self.newest)):
                raise DataError(
                    f"{self.newest.uri} ends at generation {last}, but this run has trained on generation {generation}:"
                    " restore the set"
                )
            view = as_of(self.newest, generation)
            before = {file.path for file in as_of(self.newest, self.loaded).worker_files(self.worker)}
            files = [file for file in view.worker_files(self.worker) if file.path not in before]
            self._rows = join_rows([self._rows, load_files(view, files, targets=self.targets)])
            self.loaded = generation
        return self._rows

    def _look(self) -> None:
        """Read the newest version of the set. A set of another stream, which replaced it, is ignored."""
        shards = with_retries(read_committed)(self.shards.store, self.shards.uri)
        own_stream = self.shards.manifest.stream
        stored_stream = shards.manifest.stream if shards else None
        if shards and stored_stream and own_stream and stored_stream.query == own_stream.query:
            self.newest = replace(self.shards, manifest=shards.manifest)


def last_generation(shards: Shards) -> int:
    return len(generations(shards)) - 1


def follow(
    home: Place, work: Path, worker: int, shards: Shards, rows: Rows, *, targets: bool, looks: bool
) -> Following | None:
    """Return the passes over a growing set, or None if the worker's rows never change in this run.

    That is so if the set does not grow, and if the run does not look for new rows and never has. Raises UsageError if
    the run's folder is not shared with server 0. See ``GrowingRows`` for the arguments."""
    if not generations(shards):
        return None
    if looks and isinstance(home, Path) and not (home / CONFIG).exists():
        raise UsageError(
            f"--follow: {home} is not a folder that this host shares with server 0, where a run keeps what its workers have"
            " followed; give all hosts one folder, hdfs:// or s3://"
        )
    source = GrowingRows(home, work, worker, shards, rows, targets=targets, looks=looks)
    following = source.following()
    return following if looks or len(following.stretches) > 1 else None
