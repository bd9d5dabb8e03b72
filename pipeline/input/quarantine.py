"""The quarantine of a set: OUTPUT/_quarantine/batch-NNNNNNNN.jsonl, one line per record or file, with the reason.

Batch jobs write batch 0. A repeated batch replaces its quarantine files. A line about a file gives the position of the
record. A line about a topic contains the message itself, in base64, because topics delete old messages. No Spark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipeline.core.errors import DataError
from pipeline.core.json_values import parse_object
from pipeline.core.storage.store import Store
from pipeline.input.arrivals import BadRecord

FOLDER = "_quarantine"
VALUE = "value"  # key of a message's bytes, in base64


def path_of(output: str, batch: int, part: int | None = None) -> str:
    """Return the path of a quarantine file of a batch.

    part: partition of a topic, or 0 for files that the source itself sets aside; None: the file of the batch's broken
    rows."""
    return f"{output}/{FOLDER}/batch-{batch:08d}{'' if part is None else f'-{part:05d}'}.jsonl"


def clear_drafts(store: Store, output: str, batch: int) -> None:
    """Delete drafts that an earlier try of a batch left when it was killed. Costs one listing."""
    for entry in store.list(f"{output}/{FOLDER}"):
        if entry.name.startswith(f".batch-{batch:08d}"):
            store.delete(entry.path)


class QuarantineChange(NamedTuple):
    """The content of a quarantine file before and after it was written; b"" for no file."""

    before: bytes
    after: bytes


def write_quarantine(store: Store, path: str, lines: Iterable[dict[str, object]]) -> QuarantineChange:
    """Replace the lines of a quarantine file, or delete the file if there are none.

    Lines of an earlier try of the batch are dropped, because its files may have been mended or deleted since. Lines
    with a value are kept, because the topic may have deleted their messages. Raises DataError if the existing file
    cannot be read."""
    texts = {json.dumps(line, ensure_ascii=False): None for line in lines}
    content = b""
    if exists := store.exists(path):
        try:
            content = store.read(path)
            # A name may hold a letter such as U+2028, at which splitlines() would split.
            earlier = [text for text in content.decode().split("\n") if text]
            # Keyed by text, so that a line of the earlier try is not repeated.
            texts |= {text: None for text in earlier if VALUE in parse_object(text)}
        except ValueError as error:
            raise DataError(
                f"{path} is damaged: {error}; move it away, as it may hold messages that exist no more"
            ) from None
    change = QuarantineChange(content, "".join(f"{text}\n" for text in texts).encode())
    if texts:
        store.replace(path, change.after)
    elif exists:
        store.delete(path)
    return change


def restore_quarantine(store: Store, path: str, change: QuarantineChange) -> None:
    """Undo a change of a quarantine file, unless another run has changed it since."""
    if (store.read(path) if store.exists(path) else b"") != change.after:
        return
    if change.before:
        store.replace(path, change.before)
    else:
        store.delete(path)


def repeat_quarantine(store: Store, path: str, change: QuarantineChange) -> None:
    """Make a change of a quarantine file again if another run has changed the file since."""
    if (store.read(path) if store.exists(path) else b"") == change.after:
        return
    if change.after:
        store.replace(path, change.after)
    else:
        store.delete(path)


def count_records(content: bytes) -> int:
    """Return the number of records in the lines of a quarantine file."""
    return sum(int(parse_object(text).get("records", 0)) for text in content.decode().split("\n") if text)


def lines_of(bad_records: Sequence[BadRecord]) -> list[dict[str, object]]:
    return [
        {"source": entry.source, "record": entry.record, "records": entry.records, "reason": entry.reason}
        for entry in bad_records
    ]
