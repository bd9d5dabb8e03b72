"""The example ledger of a training run: Parquet files of (id, epoch, loss), in any order. No Spark.

``sharding train --example-ledger`` writes such tables. The id of a row is its position in the input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError, UsageError
from pipeline.core.ledger_origin import warning_of
from pipeline.core.shardset.schema import broken_is_data_error
from pipeline.core.storage.store import Store
from pipeline.input.assignment_table import MOST_ROWS, whole_numbers
from pipeline.input.embedding_table import BATCH_ROWS, PART_BYTES, FilePart, split_files
from pipeline.input.files import match_paths, plain_files

FLAG = "--example-ledger"
ID = "id"
EPOCH = "epoch"
LOSS = "loss"
MOST_EPOCHS = (1 << 31) - 1

Losses = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LossLedger:
    """An example ledger. Picklable, O(files).

    Attributes:
        store: the file system.
        uri: the resolved path.
        parts: the units that tasks read.
        bytes: size of all files.
    """

    store: Store
    uri: str
    parts: tuple[FilePart, ...]
    bytes: int

    @property
    def paths(self) -> list[str]:
        return [part.path for part in self.parts if not part.part]

    def tasks(self, cores: int) -> int:
        """Return the number of tasks that read the parts. A run writes a small file per checkpoint."""
        return min(len(self.parts), max(cores, self.bytes // PART_BYTES))

    def epochs(self, part: FilePart, above: int) -> dict[int, int]:
        """Return the number of losses of each epoch > ``above`` in a part. Raises DataError with the file."""
        counts: dict[int, int] = {}
        for batch in self._batches(part, [EPOCH]):
            epochs = whole_numbers(batch.column(EPOCH), EPOCH, part.path, MOST_EPOCHS)
            numbers, sizes = np.unique(epochs[epochs > above], return_counts=True)
            for epoch, size in zip(numbers.tolist(), sizes.tolist(), strict=True):
                counts[epoch] = counts.get(epoch, 0) + size
        return counts

    def read(self, part: FilePart, above: int) -> Iterator[tuple[Ints, Ints, Losses]]:
        """Yield ids int64 [L], epochs int64 [L] and losses float32 [L] of epochs > ``above``, in batches.

        Raises DataError with the file, and for a loss that is not a finite number."""
        for batch in self._batches(part, [ID, EPOCH, LOSS]):
            ids = whole_numbers(batch.column(ID), ID, part.path, MOST_ROWS)
            epochs = whole_numbers(batch.column(EPOCH), EPOCH, part.path, MOST_EPOCHS)
            column = batch.column(LOSS)
            if column.null_count or not pa.types.is_floating(column.type):
                raise DataError(f"{part.path}: column {LOSS} holds nulls, or no numbers with a fraction")
            losses = column.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
            # A diverged run may have had losses that are ignored here.
            used = epochs > above
            if len(odd := np.flatnonzero(used & ~np.isfinite(losses))):
                at = odd[0]
                raise DataError(
                    f"{part.path}: the loss of id {ids[at]} in epoch {epochs[at]} is {losses[at]}, not a finite number;"
                    " use the ledger of a run that did not diverge"
                )
            yield ids[used], epochs[used], losses[used]

    def warning(self, fingerprint: int) -> str:
        """Return a warning if the first file names other rows, else an empty text. Raises DataError.

        fingerprint: of the rows to which the losses will be given."""
        path = self.paths[0]
        with self.store.open(path) as file, broken_is_data_error(path):
            return warning_of(f"{FLAG} {self.uri}", [pq.read_metadata(file)], fingerprint)

    def _batches(self, part: FilePart, columns: list[str]) -> Iterator[pa.RecordBatch]:
        with self.store.open(part.path) as file, broken_is_data_error(part.path):
            parquet = pq.ParquetFile(file)
            for name in (ID, EPOCH, LOSS):
                if name not in parquet.schema_arrow.names:
                    raise DataError(
                        f"{part.path} has no column {name}; an example ledger has {ID}, {EPOCH} and {LOSS}, got"
                        f" {', '.join(parquet.schema_arrow.names)}"
                    )
            groups = range(part.part, parquet.num_row_groups, part.parts)
            yield from parquet.iter_batches(BATCH_ROWS, list(groups), columns=columns)


def open_ledger(store: Store, uri: str) -> LossLedger:
    """Open the ledger in a file, a folder or a pattern. Opens no file of it.

    Raises UsageError for the folder of a run, DataError if there is no ledger."""
    uri = store.resolve(uri)
    files = plain_files(store, match_paths(store, uri, flag=FLAG))
    if any(file.name == "config.json" for file in files):
        raise UsageError(
            f"{FLAG} {uri} is the folder of a run; give {uri}/examples, which it has if it was trained with {FLAG}"
        )
    if not files:
        raise DataError(f"{uri} holds no example ledger; expected Parquet files with {ID}, {EPOCH} and {LOSS}")
    return LossLedger(store, uri, split_files(files), sum(file.bytes for file in files))
