"""One batch of a stream, from the files that arrived to a committed generation. Small pure parts decide; this carries out.

What the next generation needs is committed with this one: its rows, the counters of its buckets, and the number of its
batch. A batch that comes again after a kill is known by that number, and skipped."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from pyspark import SparkContext

from pipeline.arrays import Ints
from pipeline.assignment.chunks import chunk_bounds, pass_pieces, piece_bounds, workers_a_task
from pipeline.clustering.hashes import Hashes
from pipeline.errors import JobError, UsageError
from pipeline.input.committed import committed_dataset, layout_of
from pipeline.input.dataset import Dataset
from pipeline.input.scan import MAX_CLASSES, Scan
from pipeline.output.entries import (
    describe_assignment,
    describe_image,
    describe_labels,
    describe_workers,
    versions,
)
from pipeline.runs.write import Written, verify, write_all
from pipeline.shardset.attempt import Attempt
from pipeline.shardset.commit import Move, publish
from pipeline.shardset.generations import KEY, last_batch, sum_of_fingerprints
from pipeline.shardset.manifest import FORMAT_VERSION, ShardSet, read_committed
from pipeline.spark.images import Images, run_on
from pipeline.spark.progress import PhaseLog
from pipeline.spark.source import Source
from pipeline.storage.files import FileInfo
from pipeline.storage.store import Store
from pipeline.stream.arrivals import Arrivals, Broken, survey
from pipeline.stream.buckets import BYTES, Buckets, Counted, State, count, starts
from pipeline.stream.look import LookJob, Seen, look
from pipeline.stream.model import fit_functions, load_hashes, load_state, ready_hashes, save_hashes, save_state
from pipeline.stream.placement import ByBucket, Copies, SomeBuckets, groups_of
from pipeline.stream.quarantine import lines_of, path_of, put_aside
from pipeline.stream.request import StreamRequest
from pipeline.stream.topic import partition_of, record_bytes, without_servers

STREAM = "stream"


class Arrived(NamedTuple):
    """A batch as its source gives it. files: in the order of arrival; source: a digest of what the batch was; aside: records
    that were put aside on the way here; newest_ms: the time of the newest record; ignored: files that are none of rows."""

    uri: str
    files: list[FileInfo]
    source: str
    aside: int = 0
    newest_ms: int = 0
    ignored: int = 0


class Outcome(NamedTuple):
    """shards: the set after a batch, None while there is none. rows, quarantined: of the batch; seconds: it took; fresh:
    whether it was committed now; files: of the generation; buckets: of the set."""

    shards: ShardSet | None
    rows: int = 0
    quarantined: int = 0
    seconds: float = 0.0
    fresh: bool = False
    files: int = 0
    buckets: int = 0


@dataclass(frozen=True)
class GenerationRun:
    """output: resolved. query: the id that a checkpoint gave the stream."""

    context: SparkContext
    request: StreamRequest
    store: Store
    output: str
    query: str

    def take(self, batch: int, arrive: Callable[[str, int], Arrived]) -> Outcome:
        """Commit a batch as a generation, unless it is committed already. arrive(folder, newest_ms): finds its files, or
        puts them into a folder of the attempt; newest_ms: of the records before it.

        Raises UsageError where the set is another stream's, and JobError where another run has committed meanwhile: then
        nothing of the batch is in the set."""
        began = time.monotonic()
        before = read_committed(self.store, self.output)
        check_stream(before, self.request, self.query)
        if before and batch <= last_batch(before):
            return Outcome(before)
        progress = PhaseLog(self.context, quiet=True, title=f"batch {batch} to {self.output}")
        with Attempt(self.store, self.output) as attempt:
            held = (before.manifest[STREAM] if before else {}).get("newest_ms", 0)
            with progress.phase("discover"):
                arrived = arrive(attempt.folder, held)
                check_source(before, arrived.uri)
                rows = total_rows(before)
                dataset, broken = self._survey(before, arrived, rows)
                self._check_landed(attempt.folder, broken)
            work = Batch(self, attempt.folder, before, dataset, progress.phase)
            seen, hashes = work.look(broken) if dataset else (None, None)
            lines = [self._line(attempt.folder, entry) for entry in broken]
            aside = arrived.aside + sum(max(1, entry.records) for entry in broken)
            # Every batch leaves a trace, by which the checkpoint is held against the set.
            if seen is None and not aside and not arrived.ignored:
                lines = lines_of([Broken(arrived.uri, None, "nothing of the batch was there any more", 0)])
            put_aside(self.store, path_of(self.output, batch), lines)
            if seen is None or hashes is None:
                return Outcome(before, quarantined=aside, seconds=time.monotonic() - began)
            manifest, moves = work.make(seen, hashes)
            manifest["seconds"] = dict(progress.seconds)
            entry = {"batch": batch, "source": arrived.source, "quarantined": aside}
            manifest[KEY][0] |= entry | {"seconds": round(time.monotonic() - began, 3)}
            manifest[STREAM] |= {"query": self.query, "newest_ms": max(held, arrived.newest_ms)}
            made = publish(attempt, manifest, moves, before=before, supersedes=lambda theirs: False, appends=True)
            if not made.manifest["generation"].endswith(attempt.id):
                raise JobError(
                    f"{self.output}: another run has committed since batch {batch} was begun; let one stream write there"
                )
        spent = time.monotonic() - began
        return Outcome(made, work.rows, aside, spent, True, len(moves), made.manifest[KEY][-1]["buckets"])

    def _survey(self, before: ShardSet | None, arrived: Arrived, first: int) -> tuple[Arrivals | None, list[Broken]]:
        expected = layout_of(before.manifest) if before else None
        return survey(
            self.store,
            arrived.uri,
            arrived.files,
            run=run_on(self.context),
            first=first,
            format=before.manifest["input"]["format"] if before else self.request.format,
            shape=expected.shape if expected else self.request.shape,
            expected=expected,
            unlabelled=self.request.unlabelled,
        )

    def _check_landed(self, folder: str, broken: list[Broken]) -> None:
        """Raises JobError where files are gone that tasks of this attempt have written: then it was taken for dead."""
        if any(entry.source.startswith(f"{folder}/") for entry in broken):
            raise JobError(
                f"{self.output}: files of this run are gone: another run took it for dead (was it frozen?); run it again"
            )

    def _line(self, folder: str, entry: Broken) -> dict[str, Any]:
        """With its bytes, in base64, where it came from a topic: the file that tells of it goes with the attempt."""
        (line,) = lines_of([entry])
        if entry.record is None or not entry.source.startswith(f"{folder}/"):
            return line
        size = record_bytes(self.request)
        with self.store.open(entry.source) as file:
            file.seek(entry.record * size)
            data = file.read(entry.records * size)
        reason = entry.reason.removeprefix(f"{entry.source}: ")
        source = partition_of(entry.source)
        return line | {"source": source, "record": None, "reason": reason, "value": base64.b64encode(data).decode()}


def check_source(before: ShardSet | None, uri: str) -> None:
    """Raises UsageError where the rows so far came from elsewhere: files that are found again would be in the set twice."""
    held = before.manifest["input"]["uri"] if before else uri
    if without_servers(held) != without_servers(uri):
        raise UsageError(
            f"{before.uri if before else uri} was streamed from {held}: rows of {uri} would be in it again; give that"
            " --source, or choose another --output"
        )


def total_rows(before: ShardSet | None) -> int:
    return int(before.manifest["rows"]) if before else 0


def check_stream(before: ShardSet | None, request: StreamRequest, query: str) -> None:
    """Raises UsageError where a set is not what this stream has committed so far."""
    if before is None:
        return
    if STREAM not in before.manifest:
        raise UsageError(f"{before.uri} holds a set that no stream has made; choose another --output")
    if before.manifest["identity"] != request.identity():
        raise UsageError(
            f"{before.uri} holds a stream of another configuration; repeat its own (python -m pipeline inspect shows it),"
            " or choose another --output"
        )
    if before.manifest[STREAM]["query"] != query:
        raise UsageError(
            f"{before.uri} was written with another checkpoint: this one does not know which files are in it;"
            " give --checkpoint of that stream, or choose another --output"
        )


@dataclass
class Batch:
    """A batch on its way; each method is a step."""

    run: GenerationRun
    staging: str
    before: ShardSet | None
    dataset: Arrivals | None
    phase: Callable[[str], AbstractContextManager[None]]

    @property
    def request(self) -> StreamRequest:
        return self.run.request

    @property
    def rows(self) -> int:
        return self.dataset.rows if self.dataset else 0

    @property
    def num_classes(self) -> int:
        assert self.dataset
        if self.before:
            return int(self.before.manifest["labels"]["num_classes"])
        return self.request.num_classes or self.dataset.layout.num_classes or MAX_CLASSES

    def look(self, broken: list[Broken]) -> tuple[Seen | None, Hashes | None]:
        """Every record; what is broken is left out, and told. None where no row is left."""
        hashes = load_hashes(self.before) if self.before else ready_hashes(self.run.store, self.request.model)
        with self.phase("scan"):
            while seen := self._look(hashes):
                if seen.broken:
                    self._leave_out(seen, broken)
                    continue
                seen = self._settle(seen)
                if hashes is not None:
                    return seen, hashes
                hashes = self._fit(seen)
        return None, None

    def _look(self, hashes: Hashes | None) -> Seen | None:
        if not self.dataset or not self.rows:
            return None
        dataset = self.dataset
        pieces = pass_pieces(self.rows, dataset.record_bytes, self.run.context.defaultParallelism)
        return look(LookJob(dataset, self.num_classes, hashes), self._bounds()[1], pieces, run_on(self.run.context))

    def _leave_out(self, seen: Seen, broken: list[Broken]) -> None:
        assert self.dataset
        for first, end, reason in seen.broken:
            file, record = self.dataset.record(first)
            broken.append(Broken(file.path, record, reason, end - first))
        self.dataset = self.dataset.without((first, end) for first, end, _ in seen.broken)

    def _settle(self, seen: Seen) -> Seen:
        """What classes there are is settled with the first batch."""
        assert self.dataset
        if self.before:
            return seen
        counts = seen.scan.label_counts
        settled = self.request.num_classes or self.dataset.layout.num_classes
        settled = settled or int(np.flatnonzero(counts.sum(axis=0))[-1]) + 1
        self.dataset = replace(self.dataset, layout=replace(self.dataset.layout, num_classes=settled))
        return replace(seen, scan=replace(seen.scan, label_counts=counts[:, :settled]))

    def _fit(self, seen: Seen) -> Hashes:
        """On a keyed sample of the first batch."""
        assert self.dataset
        images = Images(self.run.context, self.dataset)
        return fit_functions(images, seen.scan, self.request.strategy, self.staging, self.phase)

    def _bounds(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int | None]:
        """Of files and of tasks, and for how many workers a task writes where that is not all."""
        assert self.dataset
        return bounds_of(self.dataset.first, self.rows, self.request.num_workers, self.dataset)

    def make(self, seen: Seen, hashes: Hashes) -> tuple[dict[str, Any], list[Move]]:
        """Write the rows, and say what they are: the manifest of this generation alone, and what to move."""
        assert self.dataset
        state = load_state(self.before) if self.before else State(Buckets.none(), np.zeros(1, np.int64))
        end = self.dataset.first + self.rows
        window = int(self.before.manifest[STREAM]["window_first"]) if self.before else 0
        closes = bool(self.request.window_rows) and end - window >= self.request.window_rows
        counted = count(
            state.buckets, seen.found, seed=self.request.seed, num_workers=self.request.num_workers, closes=closes
        )
        parts, bounds, width = self._bounds()
        source = Source(self.dataset, seen.scan, parts, bounds, width)
        with self.phase("write"):
            written, chunks = self._write(source, hashes, counted, window)
        verify(written.chunks, seen.scan, counted.new_copies + counted.old_copies)
        after = State(counted.after, state.sums + seen.scan.channel_sums)
        models = [save_state(self.run.store, after, self.staging)]
        if not self.before:
            models += save_hashes(self.run.context, self.run.store, hashes, self.staging)
        manifest = self._describe(source, written, chunks, after, hashes, [path for _, path in models])
        manifest[STREAM] |= {"window_first": end if closes else window}
        manifest[KEY][0] |= {"closes": closes}
        return manifest, written.moves() + models

    def _write(
        self, source: Source, hashes: Hashes, counted: Counted, window: int
    ) -> tuple[Written, list[tuple[int, int]]]:
        """The rows of the batch and, where a window closes, copies of those before it; and what chunks that makes."""
        at = len(self.before.manifest["chunks"]) if self.before else 0
        placement = ByBucket(hashes, self.request.num_workers, tuple(counted.chunks))
        written = write_all(self.run.context, self.staging, source, placement, first=at)
        chunks, end = list(source.parts), source.parts[-1][1]
        if counted.old_copies and self.before:
            # The lines of the assignment are by tasks, of which there may be more than files.
            chunks += [(end, end)] * (len(source.bounds) - len(chunks))
            copies, parts = self._write_copies(self.before, counted, window, at + len(chunks))
            chunks += [(end, end)] * parts
            written = Written(written.chunks + copies.chunks, written.assignment + copies.assignment)
        return written, chunks

    def _write_copies(self, before: ShardSet, counted: Counted, window: int, at: int) -> tuple[Written, int]:
        """Rows that arrived earlier in the window, whose buckets stayed sparse, for those workers who have not got them; and
        how many numbers of chunks that takes. at: the first of these."""
        context, num_workers = self.run.context, self.request.num_workers
        number = len(counted.after)
        dataset = SomeBuckets.of(committed_dataset(before), counted.pending)
        rows = total_rows(before) - window
        parts, bounds, width = bounds_of(window, rows, num_workers, dataset)

        def tally(bound: tuple[int, int]) -> Ints:
            counts = np.zeros(number, np.int64)
            for block in dataset.read(*bound, images=False):
                counts += np.bincount(groups_of(block), minlength=number)
            return counts

        by_chunk = np.array(run_on(context)(tally, bounds))
        buckets = counted.after
        held = load_state(before).buckets.with_keys(buckets.keys)
        copied = buckets.by_number(held.copied)
        placement = Copies(
            num_workers,
            buckets.by_number(starts(buckets.keys, self.request.seed, num_workers)),
            copied + np.cumsum(by_chunk, axis=0) - by_chunk,
        )
        none = Scan(0, np.zeros((len(bounds), self.num_classes), np.int64), np.zeros(1, np.int64), 0)
        source = Source(dataset, none, parts, bounds, width)
        return write_all(context, self.staging, source, placement, first=at), len(bounds)

    def _describe(
        self,
        source: Source,
        written: Written,
        chunks: list[tuple[int, int]],
        after: State,
        hashes: Hashes,
        models: list[str],
    ) -> dict[str, Any]:
        request, scan, end = self.request, source.scan, source.dataset.rows + total_rows(self.before)
        copies = sum(file.copies for chunk in written.chunks for file in chunk.files)
        whole = replace(source, scan=replace(scan, rows=end, channel_sums=after.sums))
        image = describe_image(whole)
        prints = [self.before.manifest["input"]["fingerprint"]] if self.before else []
        total = sum_of_fingerprints([*prints, source.fingerprint()])
        generation = {
            "rows": scan.rows,
            "copies": copies,
            "total": end,
            "fingerprint": total,
            "mean": image["mean"],
            "buckets": len(after.buckets),
        }
        buckets = after.buckets
        sizes, copied = buckets.by_number(buckets.counts).tolist(), buckets.by_number(buckets.copied).tolist()
        return {
            "format_version": FORMAT_VERSION,
            "strategy": request.strategy.name,
            "params": {**request.strategy.params(), **resolved(hashes), "buckets": len(after.buckets)},
            "asked": request.strategy.params(),
            "seed": request.seed,
            "num_workers": request.num_workers,
            "ratios": None,
            "rows": scan.rows,
            "copies": copies,
            "interval": None,
            "input": source.describe(),
            "image": image,
            "labels": describe_labels(source),
            "chunks": [list(part) for part in chunks],
            "workers": describe_workers(written.chunks, request.num_workers, True),
            "neighbourhoods": [
                {"size": size, "sparse": size == known} for size, known in zip(sizes, copied, strict=True)
            ],
            "eval": None,
            "model": {"files": [{"path": path} for path in models]},
            "assignment": describe_assignment(written.assignment),
            "assignment_only": False,
            "identity": request.identity(),
            "seconds": {},
            "versions": versions(),
            STREAM: {"state_bytes": BYTES * len(buckets)},
            KEY: [generation],
        }


def bounds_of(
    first: int, rows: int, num_workers: int, dataset: Dataset
) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int | None]:
    """How rows from id ``first`` on are cut: see Source."""
    parts = chunk_bounds(rows, num_workers, dataset.record_bytes)
    width = workers_a_task(num_workers, dataset.record_bytes)
    spills = num_workers > width
    bounds = piece_bounds(parts, dataset.record_bytes) if spills else parts
    return _moved(parts, first), _moved(bounds, first), width if spills else None


def _moved(bounds: list[tuple[int, int]], by: int) -> list[tuple[int, int]]:
    return [(low + by, high + by) for low, high in bounds]


def resolved(hashes: Hashes) -> dict[str, Any]:
    """What a fit has decided."""
    params: dict[str, Any] = {"functions": hashes.functions, "rows_fitted": hashes.rows}
    return params | ({"width": hashes.width} if hashes.family == "lsh" else {})
