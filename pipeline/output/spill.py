"""Writing for more workers than one task can buffer row groups for.

The rows pass once through files of the attempt, by ranges of workers. Row groups then have about 1,000 rows and a task
has few open files, for any number of workers. First, each task reads a piece of the ids and sends every row, and every
copy, to the file of its range of workers (Arrow's stream format). Then each task takes the rows of one range from all
pieces of a part, in id order, and writes one file per worker. The choice between this and a direct write depends only
on the data and on N, as every byte of a set does. Images are written twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.assignment.ranks import runs_of_equal_keys
from pipeline.core.arrays import Ints
from pipeline.core.shardset.attempt import make_task_folder
from pipeline.input.decoded import decoder_versions
from pipeline.input.records import record_batch
from pipeline.output.assignment import AssignmentFile, AssignmentWriter
from pipeline.output.hashing_file import HashingFile
from pipeline.output.writer import ChunkJob, ShardWriter, WrittenChunk, close_writers

WINDOW_BYTES = 128 << 20  # rows that are sorted by worker at once
WORKER = pa.field("worker", pa.int32())


class SpillFiles(NamedTuple):
    """The files that a task made from a piece.

    Attributes:
        folder: folder of the files.
        ranges: ranges of workers that have a file.
        assignment: the piece's assignment file, or None.
        versions: versions of the libraries that decoded the rows.
    """

    folder: str
    ranges: frozenset[int]
    assignment: AssignmentFile | None
    versions: str


@dataclass(frozen=True)
class SpillJob:
    """The work of both kinds of tasks. Picklable.

    Attributes:
        job: the work of a direct write.
        width: workers per range.
        parts: id ranges of files; each of the job's pieces is within one.
    """

    job: ChunkJob
    width: int
    parts: list[tuple[int, int]]

    def tasks(self) -> list[tuple[int, int]]:
        """Return (part, range of workers) for every task of the second kind, part by part."""
        ranges = -(-self.job.placement.num_workers // self.width)
        return [(part, at) for part in range(len(self.parts)) for at in range(ranges)]

    def spill(self, piece: int, task: str) -> SpillFiles:
        """Write the rows of a piece to the files of their ranges. task: a name unique to this try."""
        folder = f"{self.job.staging}/{task}"
        store = self.job.dataset.store
        make_task_folder(store, folder)
        schema = self.job.schema.append(WORKER)
        lines = self.job.open_assignment(piece, task) if self.job.keeps_assignment else None
        files: dict[int, HashingFile] = {}
        streams: dict[int, pa.RecordBatchStreamWriter] = {}
        for window in windows(self._rows(piece, schema, lines), self.job.dataset.record_bytes):
            rows = sort_by_worker(window)
            for at, part in slices(rows, rows.column("worker").to_numpy() // self.width):
                # Opened at the first row, so that ranges without rows have no file.
                if at not in streams:
                    files[at] = HashingFile(store.create(f"{folder}/{at:05d}.arrow"))
                    streams[at] = pa.ipc.new_stream(files[at], schema)
                streams[at].write_table(part)
        for at, stream in streams.items():
            stream.close()
            files[at].close()
        return SpillFiles(folder, frozenset(streams), lines.close() if lines else None, decoder_versions())

    def _rows(self, piece: int, schema: pa.Schema, lines: AssignmentWriter | None) -> Iterator[pa.RecordBatch]:
        """Yield every row of a piece once for each worker that gets it, with the worker's number as a column.

        lines: writer of the piece's assignment, or None."""
        for deliveries in self.job.place_blocks(piece):
            if lines:
                lines.append(deliveries)
            block, groups, rows, workers, copies = deliveries
            extra = {"neighbourhood": groups} if self.job.placement.neighbourhoods else {}
            step = max(1, WINDOW_BYTES // self.job.dataset.record_bytes)  # a sparse row is delivered to all
            for low in range(0, len(rows), step):
                some = rows[low : low + step]
                values = {"copy": copies[low : low + step], "worker": workers[low : low + step].astype(np.int32)}
                yield record_batch(schema, block, some, **values, **{name: of[some] for name, of in extra.items()})

    def gather(self, spills: list[SpillFiles], part: int, at: int, task: str) -> WrittenChunk:
        """Write a part's shard files for one range of workers.

        Args:
            spills: results of all pieces, in order.
            part: number of the part.
            at: number of the range of workers.
            task: a name unique to this try.
        """
        low, high = self.parts[part]
        pieces = [index for index, bound in enumerate(self.job.bounds) if low <= bound[0] < high]
        sources = [f"{spills[index].folder}/{at:05d}.arrow" for index in pieces if at in spills[index].ranges]
        writers: dict[int, ShardWriter] = {}
        for window in windows(self._read(sources), self.job.dataset.record_bytes):
            rows = sort_by_worker(window)
            for worker, window_slice in slices(rows.drop_columns(["worker"]), rows.column("worker").to_numpy()):
                if worker not in writers:
                    writers[worker] = self.job.open(worker, part, task, self.job.schema)
                # A slice would keep the whole window in memory, so its rows are copied.
                worker_rows = window_slice.take(pa.array(np.arange(len(window_slice))))
                for batch in worker_rows.to_batches():
                    writers[worker].append(batch)
        versions = frozenset(spills[index].versions for index in pieces)
        return replace(close_writers(writers), versions=versions)

    def _read(self, paths: Iterable[str]) -> Iterator[pa.RecordBatch]:
        """Yield the batches of some spill files, one file after the other."""
        for path in paths:
            with self.job.dataset.store.open(path) as file, pa.ipc.open_stream(file) as stream:
                yield from stream


def windows(batches: Iterable[pa.RecordBatch], record_bytes: int) -> Iterator[pa.Table]:
    """Group consecutive batches into tables of about WINDOW_BYTES of images."""
    pending: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        pending.append(batch)
        size += len(batch) * record_bytes
        if size >= WINDOW_BYTES:
            yield pa.Table.from_batches(pending)
            pending = []
            size = 0
    if pending:
        yield pa.Table.from_batches(pending)


def sort_by_worker(rows: pa.Table) -> pa.Table:
    """Return the rows sorted by worker; the order of a worker's rows does not change."""
    order = np.argsort(rows.column("worker").to_numpy(), kind="stable")
    return rows.combine_chunks().take(pa.array(order))


def slices(rows: pa.Table, keys: Ints) -> Iterator[tuple[int, pa.Table]]:
    """Yield each key with its rows. keys: ascending, one per row."""
    for key, first, end in runs_of_equal_keys(keys):
        yield key, rows.slice(first, end - first)
