"""The commit of a stream's batch: from the files that arrived to a committed generation.

The number of the batch is committed with its rows. A batch that is repeated after a kill is recognised by it and
skipped."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from pyspark import SparkContext

from pipeline.core.errors import JobError, UsageError
from pipeline.core.shardset.attempt import Attempt
from pipeline.core.shardset.commit import publish
from pipeline.core.shardset.generations import last_batch
from pipeline.core.shardset.manifest import ShardSet, read_committed
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.arrivals import Arrivals, BadRecord, survey
from pipeline.input.committed import layout_of
from pipeline.input.quarantine import VALUE, clear_drafts, lines_of, path_of, write_quarantine
from pipeline.spark.images import run_on
from pipeline.spark.progress import PhaseLog
from pipeline.stream.batch import StreamBatch, total_rows
from pipeline.stream.checkpoint import check_query
from pipeline.stream.lateness import latest_believable_ms
from pipeline.stream.request import StreamRequest
from pipeline.stream.topic import drop_servers, partition_of, record_bytes

LINE_RECORDS = 1000  # the most messages of a topic in one line of the quarantine


class IncomingBatch(NamedTuple):
    """A batch as its source delivers it.

    Attributes:
        uri: the source.
        files: in order of arrival.
        source: digest that identifies the batch's files or messages.
        aside: records that the source has already quarantined.
        newest_ms: time of the newest record, in ms since 1970.
        ignored: number of files that contain no training rows.
        lost_ranges: planned records that no longer exist.
        warnings: lines for the user.
    """

    uri: str
    files: list[FileInfo]
    source: str
    aside: int = 0
    newest_ms: int = 0
    ignored: int = 0
    lost_ranges: Sequence[BadRecord] = ()
    warnings: Sequence[str] = ()


class Outcome(NamedTuple):
    """The result of a batch.

    Attributes:
        shards: the set after the batch, or None if there is none yet.
        rows: rows of the batch.
        quarantined: records of the batch that were quarantined.
        seconds: duration of the batch.
        fresh: True if the batch was committed by this call.
        buckets: buckets of the set.
        warnings: lines for the user.
    """

    shards: ShardSet | None
    rows: int = 0
    quarantined: int = 0
    seconds: float = 0.0
    fresh: bool = False
    buckets: int = 0
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class GenerationRun:
    """The configuration with which batches are committed.

    Attributes:
        context: runs the tasks.
        request: configuration of the stream.
        store: reaches the source and the output.
        output: folder of the set, resolved.
        query: id that the checkpoint gave the stream.
    """

    context: SparkContext
    request: StreamRequest
    store: Store
    output: str
    query: str

    def commit_batch(self, batch: int, arrive: Callable[[str, int], IncomingBatch]) -> Outcome:
        """Commit a batch as a generation, unless it is committed already.

        Args:
            batch: number of the batch.
            arrive: arrive(folder, newest_ms) finds the batch's files, or writes them into a folder of the attempt;
                newest_ms is the time of the newest earlier record.

        Raises:
            UsageError: the set belongs to another stream.
            JobError: another run has committed meanwhile. The batch is then repeated, or skipped if it is in the set.
        """
        start = time.monotonic()
        before = read_committed(self.store, self.output)
        check_stream(before, self.request, self.query)
        if before and batch <= last_batch(before):
            return Outcome(before)
        clear_drafts(self.store, self.output, batch)
        progress = PhaseLog(self.context, quiet=True, title=f"batch {batch} to {self.output}")
        with Attempt(self.store, self.output) as attempt:
            newest_ms = before.manifest.stream.newest_ms if before and before.manifest.stream else 0
            if newest_ms > latest_believable_ms():  # committed by an older version, or this clock is behind
                newest_ms = 0
            with progress.phase("discover"):
                incoming = arrive(attempt.folder, newest_ms)
                check_source(before, incoming.uri)
                rows = total_rows(before)
                dataset, bad_records = self._survey(before, incoming, rows)
                self._refuse_deleted_files(attempt.folder, bad_records)
                bad_records = [*incoming.lost_ranges, *bad_records]
            work = StreamBatch(self.context, self.store, self.request, attempt.folder, before, dataset, progress.phase)
            # This pass adds the bad records that it finds to ``bad_records``.
            batch_scan, hashes = work.scan_rows(bad_records) if dataset else (None, None)
            lines = list(self._lines(attempt.folder, bad_records))
            aside = incoming.aside + sum(max(1, entry.records) for entry in bad_records)
            # Every batch leaves a trace, which check_checkpoint compares with Spark's checkpoint.
            if batch_scan is None and not aside and not incoming.ignored:
                lines = lines_of([BadRecord(incoming.uri, None, "the batch had no row", 0)])
            write_quarantine(self.store, path_of(self.output, batch), lines)
            if batch_scan is None or hashes is None:
                seconds = time.monotonic() - start
                return Outcome(before, quarantined=aside, seconds=seconds, warnings=incoming.warnings)
            # The batch number is committed with the rows, so that a repeated batch is recognised.
            manifest, moves = work.make(batch_scan, hashes, batch, incoming.source)
            assert manifest.stream
            entry = replace(manifest.generations[0], quarantined=aside, seconds=round(time.monotonic() - start, 3))
            manifest = replace(
                manifest,
                seconds=dict(progress.seconds),
                stream=replace(manifest.stream, query=self.query, newest_ms=max(newest_ms, incoming.newest_ms)),
                generations=[entry],
            )
            shards = publish(attempt, manifest, moves, before=before, supersedes=lambda other: False, appends=True)
            if not shards.manifest.generation.endswith(attempt.id):
                raise JobError(
                    f"{self.output}: another run has committed since batch {batch} began; only one stream may write to an"
                    " output"
                )
        spent = time.monotonic() - start
        buckets = shards.manifest.generations[-1].buckets
        return Outcome(shards, work.rows, aside, spent, True, buckets, incoming.warnings)

    def _survey(
        self, before: ShardSet | None, incoming: IncomingBatch, first: int
    ) -> tuple[Arrivals | None, list[BadRecord]]:
        """Return the rows of a batch's files, or None, and the problems of files that are left out (see ``survey``).

        first: id of the batch's first row."""
        expected = layout_of(before.manifest) if before else None
        options = self.request.read_options
        # Files must match the committed rows, except that --channels and --resize convert: the committed shape is then
        # not the files'.
        if before and expected:
            shape = options.shape if options.channels or options.resize else expected.shape
            options = replace(options, format=before.manifest.input.format, shape=shape)
        return survey(
            self.store,
            incoming.uri,
            incoming.files,
            run=run_on(self.context),
            first=first,
            read_options=options,
            expected=expected,
        )

    def _refuse_deleted_files(self, folder: str, bad_records: list[BadRecord]) -> None:
        """Raise JobError if a file that this attempt has just written cannot be surveyed.

        Such a file holds whole records only, so it can only be missing: another run considered this attempt dead and
        deleted it.

        folder: the attempt's. bad_records: problems of the survey, before any record is checked."""
        if any(entry.source.startswith(f"{folder}/") for entry in bad_records):
            raise JobError(
                f"{self.output}: another run considered this one dead and deleted its files (was it frozen?); run it again"
            )

    def _lines(self, folder: str, bad_records: list[BadRecord]) -> Iterator[dict[str, Any]]:
        """Yield the quarantine lines of broken records.

        Lines of a topic contain the bytes, in base64, because the file that holds them is deleted with the attempt."""
        for path, of_file in groupby(bad_records, lambda entry: entry.source):
            if not path.startswith(f"{folder}/"):
                yield from lines_of(list(of_file))
                continue
            size = record_bytes(self.request)
            with self.store.open(path) as file:
                for entry in of_file:
                    assert entry.record is not None  # records of fixed size can all be read
                    for first in range(entry.record, entry.record + entry.records, LINE_RECORDS):
                        file.seek(first * size)
                        records = min(LINE_RECORDS, entry.record + entry.records - first)
                        value = base64.b64encode(file.read(records * size)).decode()
                        reason = entry.reason.removeprefix(f"{path}: ")
                        line = {"source": partition_of(path), "record": None, "records": records, "reason": reason}
                        yield line | {VALUE: value}


def check_source(before: ShardSet | None, uri: str) -> None:
    """Raise UsageError if earlier rows came from another source, whose files would be in the set twice."""
    streamed_uri = before.manifest.input.uri if before else uri
    if drop_servers(streamed_uri) != drop_servers(uri):
        raise UsageError(
            f"{before.uri if before else uri} was streamed from {streamed_uri}: rows of {uri} would be in it again; give"
            " that --source, or choose another --output"
        )


def check_configuration(before: ShardSet | None, request: StreamRequest) -> None:
    """Raise UsageError if a stream of another configuration, or no stream, committed the set."""
    if before is None:
        return
    if before.manifest.stream is None:
        raise UsageError(f"{before.uri} holds a set that no stream has made; choose another --output")
    if before.manifest.identity != request.identity():
        differences = differences_of(before.manifest.stream.settings, request.settings())
        raise UsageError(
            f"{before.uri} holds a stream of another configuration{differences}; repeat its own (`sharding inspect` shows"
            " it), or choose another --output"
        )


def differences_of(committed: dict[str, Any], requested: dict[str, Any]) -> str:
    """Return the settings in which two streams differ, in words; "" if the committed set does not have its own."""
    names = [name for name in committed | requested if committed.get(name) != requested.get(name)]
    each = [f"{name} {json.dumps(committed.get(name))}, not {json.dumps(requested.get(name))}" for name in names]
    return f" ({'; '.join(each)})" if committed else ""


def check_stream(before: ShardSet | None, request: StreamRequest, query: str) -> None:
    """Raise UsageError if this stream did not commit the set."""
    check_configuration(before, request)
    check_query(before, query)
