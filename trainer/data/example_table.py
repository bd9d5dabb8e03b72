"""Tables with a value for each row, such as weights or the example ledger of another run: Parquet files with ids."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError
from pipeline.core.ledger_origin import warning_of
from pipeline.core.shardset.schema import broken_is_data_error, numbers_of
from pipeline.core.storage.retries import unreadable_is_data_error, with_retries
from trainer.data.opening import store_of
from trainer.sampling.base import Sampler
from trainer.watchdog import kick

ID = "id"
EPOCH = "epoch"
SUFFIX = ".parquet"


def check_table(sampler: Sampler) -> None:
    """Check that the table of a sampler, if it has one, can be opened and has the columns.

    Reads the footers of its files. Raises DataError."""
    if sampler.table_uri:
        for _ in _open_files(sampler.table_uri, sampler.column):
            pass


def table_warning(sampler: Sampler, fingerprint: int | None) -> str:
    """Return a warning if the first file of a sampler's table names other rows, else an empty text. Raises DataError.

    fingerprint: of the rows that the run trains on, None if unknown."""
    if not sampler.table_uri:
        return ""
    first = next(_open_files(sampler.table_uri, sampler.column))
    return warning_of(f"--example-table {sampler.table_uri}", [first.metadata], fingerprint)


def values_of(sampler: Sampler, ids: Ints) -> npt.NDArray[np.float64] | None:
    """Return the value of each row in the table of a sampler, float64 [N]; None if it has no table.

    In a table with epochs, such as an example ledger, the last value of the last epoch of a row counts. Raises DataError if
    a row has no value, or several in a table without epochs, or one that is not finite. ids: int64 [N]."""
    if not sampler.table_uri:
        return None
    uri = sampler.table_uri
    distinct = np.unique(ids)
    values = np.full(len(distinct), np.nan)
    epochs = np.full(len(distinct), -1, np.int64)
    has_value = np.zeros(len(distinct), np.bool_)
    for file in _open_files(uri, sampler.column):
        for group in range(file.num_row_groups):
            kick()  # the watchdog: a large table takes long to read
            columns = _columns(file, group, sampler.column, uri)
            places = np.searchsorted(distinct, columns[ID]).clip(max=len(distinct) - 1)
            is_own = distinct[places] == columns[ID]
            at = places[is_own]
            epoch = columns[EPOCH][is_own]
            if has_value[at].any() or len(np.unique(at)) < len(at):
                _refuse_repeated(file, uri)
            # Ascending by epoch, so that the last assignment to a row is the last value of its last epoch.
            order = np.argsort(epoch, kind="stable")
            order = order[epoch[order] >= epochs[at[order]]]
            epochs[at[order]] = epoch[order]
            values[at[order]] = columns[sampler.column][is_own][order]
            has_value[at] = True
    missing = distinct[~has_value]
    if len(missing):
        raise DataError(
            f"--example-table {uri} has no {sampler.column} for {len(missing)} of {len(distinct)} rows, such as id"
            f" {missing[0]}: add them"
        )
    if not np.isfinite(values).all():
        raise DataError(
            f"--example-table {uri}: the {sampler.column} of id {distinct[~np.isfinite(values)][0]} is no finite number"
        )
    return values[np.searchsorted(distinct, ids)]


def _refuse_repeated(file: pq.ParquetFile, uri: str) -> None:
    """Raise DataError if a table has no epochs, which say which of a row's values counts."""
    if EPOCH not in file.schema_arrow.names:
        raise DataError(
            f"--example-table {uri} has several values of one row: keep one per id, or add a column {EPOCH}"
        )


def _open_files(uri: str, column: str) -> Iterator[pq.ParquetFile]:
    """Yield the files of a table, in the order of their names. Raises DataError."""
    store = store_of(uri)
    with unreadable_is_data_error(uri):
        address = store.resolve(uri)
        try:
            info = with_retries(store.info)(address)
        except FileNotFoundError:
            raise DataError(f"--example-table {uri} does not exist") from None
        paths = [address]
        # A ledger is a folder; files of other kinds beside it are left alone.
        if info.is_dir:
            paths = sorted(entry.path for entry in with_retries(store.list)(address) if entry.name.endswith(SUFFIX))
        if not paths:
            raise DataError(f"--example-table {uri} holds no {SUFFIX} files")
        for path in paths:
            with broken_is_data_error(path):
                file = pq.ParquetFile(pa.BufferReader(with_retries(store.read)(path)))
                for name in (ID, column):
                    if name not in file.schema_arrow.names:
                        raise DataError(f"--example-table {uri}: {path} has no column {name}")
            yield file


def _columns(file: pq.ParquetFile, group: int, column: str, uri: str) -> dict[str, npt.NDArray[np.float64]]:
    """Return the ids, epochs and values of a row group; all epochs are 0 if the table has none. Raises DataError."""
    with broken_is_data_error(uri):
        names = [name for name in (ID, EPOCH, column) if name in file.schema_arrow.names]
        table = file.read_row_group(group, columns=names)
    for name in names:
        kind = table.column(name).type
        fits = pa.types.is_integer(kind) or (name == column and pa.types.is_floating(kind))
        if table.column(name).null_count or not fits:
            raise DataError(f"--example-table {uri}: column {name} holds nulls, or no numbers")
    columns = {name: numbers_of(table.column(name)) for name in names}
    columns.setdefault(EPOCH, np.zeros(len(table), np.int64))
    return columns
