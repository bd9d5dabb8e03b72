"""A table, and the work folder beside it with a checkpoint and parts by ranges of ids until the table is complete.

  TABLE                         one Parquet file, ordered by id; replaced atomically
  _NAME.IDENTITY/checkpoint     state of a training before the table, if there is one
  _NAME.IDENTITY/part-N         Arrow IPC stream of the rows of the N-th range of ids
  _NAME.IDENTITY/table-DRAFT    the Parquet file while it is written; a random name

A work folder belongs to one configuration and input, and folders of other ones are never used. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.errors import DataError, UsageError
from pipeline.core.json_values import parse_object
from pipeline.core.shardset.schema import broken_is_data_error
from pipeline.core.storage.store import Store
from trainer.tables.progress import TableProgress

# most rows, and bytes of images, that are computed together
PART_ROWS = 16_384
PART_BYTES = 64 << 20


@dataclass(frozen=True)
class TableFile:
    """The table and work folder of a run.

    Attributes:
        store: where both are.
        uri: the table.
        identity: digest of the configuration and input.
        metadata_key: key of the JSON in the metadata of the Parquet file.
        overwrite: whether to replace a table of another configuration or input.
    """

    store: Store
    uri: str
    identity: str
    metadata_key: bytes
    overwrite: bool = False

    @cached_property
    def work(self) -> str:
        folder, _, name = self.uri.rpartition("/")
        return f"{folder}/_{name}.{self.identity}"

    def read_metadata(self) -> dict[str, Any] | None:
        """Return the metadata of the existing table, empty if this command did not write the file; None if there is none."""
        try:
            if self.store.info(self.uri).is_dir:
                raise UsageError(f"--output {self.uri} is a folder; name the file of the table")
            with self.store.open(self.uri) as file, broken_is_data_error(self.uri):
                return parse_object((pq.read_schema(file).metadata or {}).get(self.metadata_key, b"{}"))
        except DataError:
            return {}
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_finished(self) -> dict[str, Any] | None:
        """Return the metadata of the table if this configuration has made it already; None if it must be made.

        Deletes a work folder that a killed run left beside the finished table. Raises UsageError if the file is no table
        of this command, or one of another configuration and ``overwrite`` is false."""
        before = self.read_metadata()
        if before is None:
            return None
        # Not even --overwrite replaces a file of another program.
        if "identity" not in before:
            raise UsageError(f"--output {self.uri} exists, and is no table that this command made; choose another")
        if before["identity"] == self.identity:
            self.clear()
            return before
        if not self.overwrite:
            raise UsageError(
                f"{self.uri} exists, but has another configuration or input: give --overwrite, or another --output"
            )
        return None

    def checkpoint(self) -> bytes | None:
        try:
            return self.store.read(f"{self.work}/checkpoint")
        except FileNotFoundError:
            return None

    def write_checkpoint(self, data: bytes) -> None:
        self.store.replace(f"{self.work}/checkpoint", data)

    def write_parts(
        self,
        spans: list[tuple[int, int]],
        compute: Callable[[int, int], pa.RecordBatch],
        progress: TableProgress,
    ) -> None:
        """Compute and store the rows of the ranges of ids that are not stored yet.

        Args:
            spans: the ranges of ids, half-open.
            compute: compute(low, high) returns the rows with low <= id < high, ordered by id.
            progress: of the phase.
        """
        names = {entry.name for entry in self.store.list(self.work)}
        # What an earlier start has stored is neither computed again nor counted for the speed of this one.
        missing = {number: span for number, span in enumerate(spans) if f"part-{number}" not in names}
        total = sum(high - low for low, high in spans)
        rows = total - sum(high - low for low, high in missing.values())
        progress.begin(progress.phase, total, rows)
        for number, (low, high) in missing.items():
            sink = pa.BufferOutputStream()
            batch = compute(low, high)
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            self.store.replace(f"{self.work}/part-{number}", sink.getvalue().to_pybytes())
            rows += high - low
            progress.advance(rows, f"{rows:,} of {total:,} rows")

    def finish(self, parts: int, schema: pa.Schema, about: dict[str, Any]) -> None:
        """Write the table from all parts, and delete the work folder. Keeps one part in memory.

        Raises UsageError as ``read_finished``, if another command has made the file meanwhile.

        Args:
            parts: number of the parts.
            schema: columns of the table.
            about: values for the metadata of the table.
        """
        draft = f"{self.work}/table-{uuid4().hex}"  # a name of its own, in case the same command runs twice at once
        metadata = {self.metadata_key: json.dumps({"identity": self.identity, **about}).encode()}
        schema = schema.with_metadata(metadata)
        try:
            with self.store.create(draft) as file, pq.ParquetWriter(file, schema, use_dictionary=False) as writer:
                for number in range(parts):
                    with pa.ipc.open_stream(self.store.read(f"{self.work}/part-{number}")) as stream:
                        for batch in stream:
                            writer.write_batch(batch.replace_schema_metadata(metadata))
            try:
                if self.read_finished() is not None:
                    return  # another run of this command has written the same table
            except UsageError:
                self.store.delete(draft)  # the parts stay, for the same command with --overwrite
                raise
            self.store.rename(draft, self.uri, overwrite=True)
        except FileNotFoundError:
            if (self.read_metadata() or {}).get("identity") != self.identity:
                raise
            self.clear()  # the same, but it has deleted the folder earlier: before this run's last parts
            return
        self.store.sync_folder(self.uri.rpartition("/")[0])
        self.clear()

    def clear(self) -> None:
        """Delete the work folder, if it exists."""
        if self.store.exists(self.work):
            self.store.delete(self.work)


def spans_of(rows: int, record_bytes: int) -> list[tuple[int, int]]:
    """Return the half-open ranges of ids that are computed together. record_bytes: bytes of one image."""
    step = max(1, min(PART_ROWS, PART_BYTES // record_bytes))
    return [(low, min(low + step, rows)) for low in range(0, rows, step)]
