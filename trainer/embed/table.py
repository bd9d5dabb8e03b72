"""The table, and the work folder beside it with a checkpoint and vectors by ranges of ids until the table is complete.

  TABLE                         one Parquet file, (id int64, embedding float32 [d]), ordered by id; replaced atomically
  _NAME.IDENTITY/checkpoint     state of the auto-encoder's training
  _NAME.IDENTITY/vectors-N      float32 vectors of the N-th range of ids
  _NAME.IDENTITY/table-DRAFT    the Parquet file while it is written; a random name

A work folder belongs to one configuration and input, and folders of other ones are never used. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.errors import UsageError
from pipeline.core.json_values import parse_object
from pipeline.core.shardset.schema import broken_is_data_error
from pipeline.core.storage.store import Store

ABOUT = b"sharding.embedding"  # key of JSON in the file's metadata
# most rows, and bytes of images, that are embedded together
PART_ROWS = 16_384
PART_BYTES = 64 << 20
Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TableFile:
    """The table and work folder of a run.

    Attributes:
        store: where both are.
        uri: the table.
        identity: digest of the configuration and input.
    """

    store: Store
    uri: str
    identity: str

    @cached_property
    def work(self) -> str:
        folder, _, name = self.uri.rpartition("/")
        return f"{folder}/_{name}.{self.identity}"

    def read_metadata(self) -> dict[str, Any] | None:
        """Return the metadata of the existing table, empty if another program wrote it; None if there is no table."""
        try:
            if self.store.info(self.uri).is_dir:
                raise UsageError(f"--output {self.uri} is a folder; name the file of the table")
            with self.store.open(self.uri) as file, broken_is_data_error(self.uri):
                return parse_object((pq.read_schema(file).metadata or {}).get(ABOUT, b"{}"))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def checkpoint(self) -> bytes | None:
        try:
            return self.store.read(f"{self.work}/checkpoint")
        except FileNotFoundError:
            return None

    def write_checkpoint(self, data: bytes) -> None:
        self.store.replace(f"{self.work}/checkpoint", data)

    def stored_ranges(self) -> set[int]:
        """Return the numbers of the ranges whose vectors exist."""
        names = [entry.name for entry in self.store.list(self.work)]
        return {int(name.removeprefix("vectors-")) for name in names if name.startswith("vectors-")}

    def write_range(self, number: int, vectors: Vectors) -> None:
        """Write the vectors of a range, float32 [rows, d]. number: number of the range."""
        self.store.replace(f"{self.work}/vectors-{number}", vectors.astype("<f4").tobytes())

    def finish(self, spans: list[tuple[int, int]], length: int, about: dict[str, Any]) -> None:
        """Write the table from the vectors of all ranges, and delete the work folder. Keeps one range in memory.

        Args:
            spans: the ranges of ids, half-open.
            length: numbers per vector.
            about: values for the metadata of the table.
        """
        draft = f"{self.work}/table-{uuid4().hex}"  # a name of its own, in case the same command runs twice at once
        schema = table_schema(length, {"identity": self.identity, **about})
        try:
            with self.store.create(draft) as file, pq.ParquetWriter(file, schema, use_dictionary=False) as writer:
                for batch in self._batches(spans, length, schema):
                    writer.write_batch(batch)
            self.store.rename(draft, self.uri, overwrite=True)
        except FileNotFoundError:
            if (self.read_metadata() or {}).get("identity") != self.identity:
                raise
            return  # another run of this command has written the same table and deleted the folder
        self.store.sync_folder(self.uri.rpartition("/")[0])
        self.clear()

    def clear(self) -> None:
        """Delete the work folder, if it exists."""
        if self.store.exists(self.work):
            self.store.delete(self.work)

    def _batches(self, spans: list[tuple[int, int]], length: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the table, one batch per range of ids."""
        for number, (low, high) in enumerate(spans):
            vectors = np.frombuffer(self.store.read(f"{self.work}/vectors-{number}"), "<f4")
            column = pa.FixedSizeListArray.from_arrays(pa.array(vectors), length)
            yield pa.RecordBatch.from_arrays([pa.array(np.arange(low, high)), column], schema=schema)


def table_schema(length: int, about: dict[str, Any]) -> pa.Schema:
    item = pa.field("element", pa.float32(), nullable=False)
    fields = [pa.field("id", pa.int64(), nullable=False), pa.field("embedding", pa.list_(item, length), nullable=False)]
    return pa.schema(fields, metadata={ABOUT: json.dumps(about).encode()})


def spans_of(rows: int, record_bytes: int) -> list[tuple[int, int]]:
    """Return the half-open ranges of ids that are embedded together. record_bytes: bytes of one image."""
    step = max(1, min(PART_ROWS, PART_BYTES // record_bytes))
    return [(low, min(low + step, rows)) for low in range(0, rows, step)]
