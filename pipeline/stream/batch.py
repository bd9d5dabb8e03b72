"""The steps of one batch: read and check its rows, hash them into buckets, write them, and describe them as a
generation.

The other modules decide; this one executes. The state that the next generation needs, i.e. the bucket counters, is
committed together with the rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pyspark import SparkContext

from pipeline.assignment.chunks import pass_pieces
from pipeline.assignment.groups import check_copies
from pipeline.clustering.hashes import Hashes
from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError
from pipeline.core.provenance import provenance
from pipeline.core.shardset.commit import Move
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.generations import sum_of_fingerprints
from pipeline.core.shardset.layout import MAX_CLASSES
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.shardset.parts import Generation, Neighbourhood, Stream
from pipeline.core.storage.store import Store
from pipeline.input.arrivals import Arrivals, BadRecord
from pipeline.input.committed import committed_dataset
from pipeline.input.scan import Scan
from pipeline.output.entries import (
    describe_assignment,
    describe_image,
    describe_labels,
    describe_workers,
    library_versions,
)
from pipeline.runs.steps.write import WrittenFiles, verify_chunks, write_all
from pipeline.spark.images import Images, run_on
from pipeline.spark.source import ScannedInput, bounds_of
from pipeline.strategies.hash import check_bucket_number
from pipeline.stream.buckets import BYTES, Buckets, CounterUpdate, StreamState, count_generation, first_workers_of
from pipeline.stream.look import BatchScan, LookJob, scan_batch
from pipeline.stream.model import fit_functions, load_hashes, load_state, ready_hashes, save_hashes, save_state
from pipeline.stream.placement import ByBucket, Copies, SomeBuckets
from pipeline.stream.request import StreamRequest


@dataclass
class StreamBatch:
    """A batch in progress; each method is a step.

    Attributes:
        context: runs the tasks.
        store: reaches the input and the output.
        request: configuration of the stream.
        staging: folder of the attempt.
        before: the committed set, or None for the first batch.
        dataset: the rows that have passed all checks so far, or None.
        phase: context manager that times a named phase.
    """

    context: SparkContext
    store: Store
    request: StreamRequest
    staging: str
    before: ShardSet | None
    dataset: Arrivals | None
    phase: Callable[[str], AbstractContextManager[None]]

    @property
    def rows(self) -> int:
        return self.dataset.rows if self.dataset else 0

    @property
    def num_classes(self) -> int:
        assert self.dataset
        if self.before:
            return self.before.manifest.labels.num_classes
        return self.request.read_options.num_classes or self.dataset.layout.num_classes or MAX_CLASSES

    def scan_rows(self, bad_records: list[BadRecord]) -> tuple[BatchScan | None, Hashes | None]:
        """Read every record, append the broken ones to ``bad_records``, and leave them out.

        The first batch fits the hash functions if the model is not given. Returns the scan of the remaining rows and the
        hash functions, or (None, None) if no row remains."""
        hashes = load_hashes(self.before) if self.before else ready_hashes(self.store, self.request.model)
        numbers = math.prod(self.dataset.layout.shape) if self.dataset else None
        if hashes and numbers is not None and len(hashes.weights) != numbers:
            raise UsageError(
                f"--model {self.request.model} has functions of {len(hashes.weights):,} numbers per image, and the images"
                f" have {numbers:,}; choose a set of images of their size"
            )
        with self.phase("scan"):
            # Repeated after rows are left out, which changes ids, and after hashes are fitted, without which rows have
            # no buckets.
            while batch_scan := self._scan_by_tasks(hashes):
                if batch_scan.skipped_rows:
                    self._leave_out(batch_scan, bad_records)
                    continue
                batch_scan = self._fix_num_classes(batch_scan)
                if hashes is not None:
                    return batch_scan, hashes
                hashes = self._fit(batch_scan)
        return None, None

    def _scan_by_tasks(self, hashes: Hashes | None) -> BatchScan | None:
        """Return the scan of all rows, by tasks, or None if no rows are left. Rows get buckets if there are hashes."""
        if not self.dataset or not self.rows:
            return None
        dataset = self.dataset
        pieces = pass_pieces(self.rows, dataset.record_bytes, self.context.defaultParallelism)
        return scan_batch(LookJob(dataset, self.num_classes, hashes), self._bounds()[1], pieces, run_on(self.context))

    def _leave_out(self, batch_scan: BatchScan, bad_records: list[BadRecord]) -> None:
        """Remove the bad rows of a scan from the data set, and append them to ``bad_records`` as records of their files."""
        assert self.dataset
        for entry in batch_scan.skipped_rows:
            file, record = self.dataset.record(entry.first)
            records = entry.end - entry.first
            whole = records > 1 and not entry.decoded
            bad_records.append(BadRecord(file.path, None if whole else record, entry.reason, records))
        self.dataset = self.dataset.leave_out((entry.first, entry.end) for entry in batch_scan.skipped_rows)

    def _fix_num_classes(self, batch_scan: BatchScan) -> BatchScan:
        """Return the scan with label counts for as many classes as the set has.

        The first batch fixes this number: from the request, else from the files' layout, else from the largest
        label."""
        assert self.dataset
        if self.before:
            return batch_scan
        counts = batch_scan.scan.label_counts
        num_classes = self.request.read_options.num_classes or self.dataset.layout.num_classes
        num_classes = num_classes or int(np.flatnonzero(counts.sum(axis=0))[-1]) + 1
        self.dataset = replace(self.dataset, layout=replace(self.dataset.layout, num_classes=num_classes))
        return replace(batch_scan, scan=replace(batch_scan.scan, label_counts=counts[:, :num_classes]))

    def _fit(self, batch_scan: BatchScan) -> Hashes:
        """Fit the hash functions to the first batch, or to a sample drawn by hashes of its ids."""
        assert self.dataset
        images = Images(self.context, self.dataset)
        return fit_functions(images, batch_scan.scan, self.request.strategy, self.staging, self.phase)

    def _bounds(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int | None]:
        """Return the id ranges of files and of tasks, and the workers per range, or None (see ``bounds_of``)."""
        assert self.dataset
        return bounds_of(self.dataset.first, self.rows, self.request.num_workers, self.dataset)

    def make(
        self, batch_scan: BatchScan, hashes: Hashes, batch: int, source_digest: str
    ) -> tuple[Manifest, list[Move]]:
        """Write the rows and return the manifest of this generation alone, with the files to move.

        Args:
            batch_scan: the scan of the rows.
            hashes: the hash functions.
            batch: number of the batch.
            source_digest: digest that identifies the batch's files or messages.
        """
        assert self.dataset
        state = load_state(self.before) if self.before else StreamState(Buckets.none(), np.zeros(1, np.int64))
        end = self.dataset.first + self.rows
        window = self.before.manifest.stream.window_first if self.before and self.before.manifest.stream else 0
        closes = bool(self.request.window_rows) and end - window >= self.request.window_rows
        # Buckets that are still sparse when the window closes are copied to every worker.
        update = count_generation(
            state.buckets,
            batch_scan.keys_by_chunk,
            seed=self.request.seed,
            num_workers=self.request.num_workers,
            closes=closes,
        )
        parts, bounds, width = self._bounds()
        self._check_limits(update, window, end, len(bounds))
        source = ScannedInput(self.dataset, batch_scan.scan, parts, bounds, width)
        with self.phase("write"):
            written_files, chunks = self._write(source, hashes, update, window)
        verify_chunks(written_files.chunks, batch_scan.scan, update.new_copies + update.old_copies)
        after = StreamState(update.after, state.sums + batch_scan.scan.channel_sums)
        models = [save_state(self.store, after, self.staging)]
        if not self.before:
            models += save_hashes(self.context, self.store, hashes, self.staging)
        manifest = self._describe(source, written_files, chunks, after, hashes, [path for _, path in models])
        generation = Generation(
            rows=manifest.rows,
            copies=manifest.copies,
            total=end,
            fingerprint=self._total_fingerprint(source),
            mean=manifest.image.mean,
            buckets=len(after.buckets),
            closes=closes,
            batch=batch,
            source=source_digest,
            version=0,
        )
        stream = Stream(
            state_bytes=BYTES * len(after.buckets),
            window_first=end if closes else window,
            settings=self.request.settings(),
        )
        return replace(manifest, stream=stream, generations=[generation]), written_files.moves() + models

    def _total_fingerprint(self, source: ScannedInput) -> str:
        """Return the fingerprint of all rows of the set, including this batch."""
        before = self.before.manifest.input.fingerprint if self.before else None
        return sum_of_fingerprints([*filter(None, [before]), source.fingerprint()])

    def _check_limits(self, update: CounterUpdate, window: int, end: int, tasks: int) -> None:
        """Raise UnsuitableError if the batch makes more buckets or copies than ``jobs/hash.py`` allows.

        Args:
            update: counters with this batch, and the copies that it adds.
            window: id of the first row of the window.
            end: number of rows of the set with this batch.
            tasks: number of tasks that write the batch.
        """
        assert self.dataset
        request = self.request
        before = self.before
        if update.old_copies:
            # _write_copies also counts the window's earlier rows by task and bucket.
            tasks += len(bounds_of(window, total_rows(before) - window, request.num_workers, self.dataset)[1])
        check_bucket_number(len(update.after), tasks, request.strategy.family)
        copies = update.new_copies + update.old_copies
        # A set that predates this limit may exceed it; it can grow as long as its new windows do not.
        if copies > end - window:
            copies += before.manifest.copies if before else 0
            check_copies(copies, end, "fewer workers, fewer --functions, or --window-rows 0, with another --output")

    def _write(
        self, source: ScannedInput, hashes: Hashes, update: CounterUpdate, window: int
    ) -> tuple[WrittenFiles, list[tuple[int, int]]]:
        """Write the rows of the batch and, if a window closes, copies of the window's earlier rows.

        Returns the written files and the id ranges of the chunks that they make."""
        at = len(self.before.manifest.chunks) if self.before else 0
        placement = ByBucket(hashes, self.request.num_workers, tuple(update.chunks))
        written_files = write_all(self.context, self.staging, source, placement, first=at)
        chunks = list(source.parts)
        end = source.parts[-1][1]
        if update.old_copies and self.before:
            # The assignment has one file per task, and there may be more tasks than file ranges.
            chunks += [(end, end)] * (len(source.bounds) - len(chunks))
            copies, parts = self._write_copies(self.before, update, window, at + len(chunks))
            chunks += [(end, end)] * parts
            assignment = written_files.assignment + copies.assignment
            written_files = WrittenFiles(written_files.chunks + copies.chunks, assignment)
        return written_files, chunks

    def _write_copies(self, before: ShardSet, update: CounterUpdate, window: int, at: int) -> tuple[WrittenFiles, int]:
        """Copy earlier rows of the window, whose buckets stayed sparse, to the workers that do not have them yet.

        Args:
            before: the committed set.
            update: counters with this batch.
            window: id of the first row of the window.
            at: first chunk number to use.

        Returns:
            The written files, and the number of chunk numbers that they take.
        """
        context = self.context
        num_workers = self.request.num_workers
        number = len(update.after)
        dataset = SomeBuckets.from_dataset(committed_dataset(before), update.pending)
        rows = total_rows(before) - window
        parts, bounds, width = bounds_of(window, rows, num_workers, dataset)

        def tally(bound: tuple[int, int]) -> Ints:
            """Return the rows of an id range by the number of their bucket, int64 [buckets]."""
            counts = np.zeros(number, np.int64)
            for block in dataset.read(*bound, images=False):
                counts += np.bincount(block.neighbourhoods, minlength=number)
            return counts

        # Owners depend on a row's rank in its bucket, so the ranks before each chunk are counted first.
        by_chunk = np.array(run_on(context)(tally, bounds))
        buckets = update.after
        counters_before = load_state(before).buckets.with_keys(buckets.keys)
        ranks_before = buckets.order_by_number(counters_before.copied)
        placement = Copies(
            num_workers,
            buckets.order_by_number(first_workers_of(buckets.keys, self.request.seed, num_workers)),
            ranks_before + np.cumsum(by_chunk, axis=0) - by_chunk,
        )
        none = Scan(0, np.zeros((len(bounds), self.num_classes), np.int64), np.zeros(1, np.int64), 0)
        source = ScannedInput(dataset, none, parts, bounds, width)
        return write_all(context, self.staging, source, placement, first=at), len(bounds)

    def _describe(
        self,
        source: ScannedInput,
        files: WrittenFiles,
        chunks: list[tuple[int, int]],
        after: StreamState,
        hashes: Hashes,
        models: list[str],
    ) -> Manifest:
        """Return the manifest of this generation alone.

        Args:
            source: the rows and their scan.
            files: the written files.
            chunks: the id ranges of the chunks.
            after: the counters and channel sums with this batch.
            hashes: the hash functions.
            models: paths of the model files.
        """
        request = self.request
        scan = source.scan
        end = source.dataset.rows + total_rows(self.before)
        copies = sum(file.copies for chunk in files.chunks for file in chunk.files)
        # The manifest's mean covers all rows of the set, not only this batch.
        whole = replace(source, scan=replace(scan, rows=end, channel_sums=after.sums))
        image = describe_image(whole)
        buckets = after.buckets
        sizes = buckets.order_by_number(buckets.counts).tolist()
        is_copied = buckets.order_by_number(buckets.counts == buckets.copied).tolist()
        return Manifest(
            strategy=request.strategy.name,
            params={**request.strategy.params(), **fitted_params(hashes), "buckets": len(after.buckets)},
            asked=request.strategy.params(),
            seed=request.seed,
            num_workers=request.num_workers,
            rows=scan.rows,
            copies=copies,
            input=source.describe(),
            image=image,
            labels=describe_labels(source),
            chunks=[list(part) for part in chunks],
            workers=describe_workers(files.chunks, request.num_workers, scan.num_classes, True),
            neighbourhoods=[Neighbourhood(*each) for each in zip(sizes, is_copied, strict=True)],
            model=models,
            assignment=describe_assignment(files.assignment),
            identity=request.identity(),
            versions=library_versions(),
            made={**provenance(), "master": str(self.context.master)},
        )


def total_rows(before: ShardSet | None) -> int:
    return before.manifest.rows if before else 0


def fitted_params(hashes: Hashes) -> dict[str, Any]:
    """Return the parameters that a fit decided."""
    params: dict[str, Any] = {"family": hashes.family, "functions": hashes.functions, "rows_fitted": hashes.rows}
    return params | ({"width": hashes.width} if hashes.family == "lsh" else {})
