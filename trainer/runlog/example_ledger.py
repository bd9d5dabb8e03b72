"""The example ledger of a run: the loss of every trained example, in Parquet files that end at checkpoints.

  RUN/examples/00000120-1790000000000000.parquet   (id int64, epoch int32, loss float32, correct bool)

A file has the examples of the gradients that were accepted up to version 120 and are in no earlier file, in the order of
the log. It is written before the checkpoint of that version is complete. A roll-back deletes the files of later versions.
Up to any complete checkpoint, the ledger therefore has every example of the run exactly once, whatever was killed."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.ledger_origin import with_origin
from pipeline.core.shardset.schema import numbers_of
from trainer.config import Config
from trainer.coordination.orders import Record, RowLosses
from trainer.home.place import Place, entries, make, write_whole
from trainer.run_files import EXAMPLES
from trainer.watchdog import kick

SCHEMA = pa.schema([("id", pa.int64()), ("epoch", pa.int32()), ("loss", pa.float32()), ("correct", pa.bool_())])
_NAME = re.compile(r"(\d{8,})-\d+\.parquet")
_DRAFT = re.compile(rf"\.{_NAME.pattern}\.[0-9a-f]+\.tmp")  # see write_durably


IdLosses: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


class LedgerEntry(NamedTuple):
    """The examples of an accepted gradient.

    Attributes:
        version: the version whose update applies it.
        epoch: number of the global epoch of that update, from 1.
        rows: ids, losses and hits.
    """

    version: int
    epoch: int
    rows: RowLosses


class ExampleLedger:
    """The example ledger of one generation. The owner's thread adds entries, a thread in the background writes them.

    Args:
        folder: RUN/examples.
        generation: the number of this generation.
        fingerprint: of the rows that the run trains on, which each file names; None if unknown.
    """

    def __init__(self, folder: Place, generation: int, fingerprint: int | None = None) -> None:
        self.folder = folder
        self.generation = generation
        self.fingerprint = fingerprint
        self._entries: list[LedgerEntry] = []  # that are in no file, by version
        self._is_void = False
        self._has_folder = False
        self._doubtful: Place | None = None  # the file of a write that failed
        self._lock = threading.Lock()  # of the entries
        self._writing = threading.Lock()  # held as long as a file is written

    def add(self, records: Iterable[Record], epoch: float) -> None:
        """Take over the examples of accepted gradients. epoch: global epochs after their update."""
        number = math.ceil(epoch)
        entries = [
            LedgerEntry(record.version, number, record.measured.row_losses)
            for record in records
            if record.accepted and record.measured.row_losses is not None
        ]
        with self._lock:
            self._entries += entries

    def write(self, version: int) -> None:
        """Write the entries up to a version that are in no file yet, before its checkpoint is complete. Raises OSError.

        No-op without entries, and after ``discard``."""
        with self._writing:
            with self._lock:
                entries = [entry for entry in self._entries if entry.version <= version]
            if self._is_void or not entries:
                return
            # Once, because making it durable takes as long as encoding a file; and again after a failed write.
            if not self._has_folder:
                make(self.folder)
            self._has_folder = False
            # A write that failed may have stored its file, if only the answer was lost. Its entries are written again.
            if self._doubtful:
                self._doubtful.unlink(missing_ok=True)
            self._doubtful = path = self.folder / f"{version:08d}-{self.generation}.parquet"
            # Entries are added meanwhile: the owner's thread must not wait for a slow store.
            write_whole(path, to_parquet(entries, self.fingerprint))
            self._doubtful = None
            self._has_folder = True
            with self._lock:
                del self._entries[: len(entries)]

    def discard(self) -> None:
        """Write nothing from now on, because the run rolls back. Waits until a write that is under way is done."""
        with self._writing:
            self._is_void = True


def to_parquet(entries: Iterable[LedgerEntry], fingerprint: int | None = None) -> bytes:
    """Return entries as the content of a Parquet file. fingerprint: of the set's rows, None if unknown."""
    _, numbers, rows = zip(*entries, strict=True)
    ids, losses, hits = (np.concatenate(column) for column in zip(*rows, strict=True))
    epochs = np.repeat(np.array(numbers, np.int32), [len(each.ids) for each in rows])
    sink = pa.BufferOutputStream()
    # Differences of ids are packed in few bits; losses become no smaller. Compression, statistics and dictionaries of all
    # columns would take most of the time, for larger files.
    pq.write_table(
        pa.table([ids, epochs, losses, hits], schema=with_origin(SCHEMA, fingerprint)),
        sink,
        column_encoding={"id": "DELTA_BINARY_PACKED"},
        use_dictionary=["epoch"],
        compression="none",
        write_statistics=False,
    )
    content: bytes = sink.getvalue().to_pybytes()
    return content


def recorded_losses(home: Place, version: int) -> Iterator[IdLosses]:
    """Yield the ids and losses of the examples of a run up to a version, file by file, in the order of the log.

    Nothing without a ledger. Raises OSError.

    Args:
        home: the run's folder.
        version: of the checkpoint from which the run continues; a file of a later version may be void.
    """
    folder = home / EXAMPLES
    names = [match for entry in entries(folder) if (match := _NAME.fullmatch(entry.name))]
    for match in sorted(names, key=lambda match: int(match[1])):
        if int(match[1]) <= version:
            kick()  # the watchdog: the ledger of weeks takes long to read
            table = pq.read_table(pa.BufferReader((folder / match[0]).read_bytes()), columns=["id", "loss"])
            yield numbers_of(table["id"]), numbers_of(table["loss"])


def begin_ledger(
    config: Config, home: Place, generation: int, version: int, fingerprint: int | None
) -> ExampleLedger | None:
    """Return the ledger of a generation that begins at a checkpoint; None if the run keeps none. Raises OSError.

    The files of later versions are deleted, because the run has rolled back, and the drafts of a killed writer.

    Args:
        config: the run.
        home: the run's folder.
        generation: number of the generation.
        version: of the checkpoint.
        fingerprint: of the rows that the run trains on, None if unknown.
    """
    if not config.run.example_ledger:
        return None
    folder = home / EXAMPLES
    for entry in entries(folder):
        match = _NAME.fullmatch(entry.name)
        if _DRAFT.fullmatch(entry.name) or (match and int(match[1]) > version):
            (folder / entry.name).unlink(missing_ok=True)
    return ExampleLedger(folder, generation, fingerprint)
