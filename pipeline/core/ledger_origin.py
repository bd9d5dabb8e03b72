"""The fingerprint in the files of an example ledger, which tells the rows that it is of. Pure.

Losses belong to rows by their ids, which are positions in the input. Once the input changes, a ledger of as many rows would
give each row the losses of another one, and no id would show it."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.parquet as pq

KEY = b"fingerprint"  # in the key-value metadata of each file: 16 hexadecimal digits


def with_origin(schema: pa.Schema, fingerprint: int | None) -> pa.Schema:
    """Return a schema that names the rows of a run. fingerprint: of these rows, None if unknown."""
    return schema if fingerprint is None else schema.with_metadata({KEY: f"{fingerprint:016x}"})


def warning_of(place: str, files: Iterable[pq.FileMetaData], fingerprint: int | None) -> str:
    """Return a warning if files name other rows; empty if none does, as files of other programs.

    Args:
        place: the name of the ledger, for the warning.
        files: metadata of its files.
        fingerprint: of the rows to which the losses would be given, None if unknown.
    """
    if fingerprint is None:
        return ""
    expected = f"{fingerprint:016x}"
    origins = {(file.metadata or {}).get(KEY, b"").decode(errors="replace") for file in files}
    others = sorted(origins - {"", expected})
    if not others:
        return ""
    return (
        f"{place} is of rows with fingerprint {', '.join(others)}, and these rows have {expected}: losses are given"
        " to rows by their positions, so check that only content of rows has changed, such as labels"
    )
