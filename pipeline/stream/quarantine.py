"""What a stream puts aside: OUTPUT/_quarantine/batch-NNNNNNNN.jsonl, a line for each record or file, with the reason.

A batch that is done again begins with none, and writes its files again. Of files the line says where a record is; what came
from a topic, which forgets it, is in the line itself, in base64. No Spark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from pipeline.core.errors import DataError
from pipeline.core.json_values import parse_object
from pipeline.core.storage.store import Store
from pipeline.stream.arrivals import Broken

FOLDER = "_quarantine"
VALUE = "value"  # the key of bytes, in base64


def path_of(output: str, batch: int, part: int | None = None) -> str:
    """part: of a batch that tasks put aside from, each by itself."""
    return f"{output}/{FOLDER}/batch-{batch:08d}{'' if part is None else f'-{part:05d}'}.jsonl"


def clear_drafts(store: Store, output: str, batch: int) -> None:
    """Delete what an earlier try of a batch was writing when it was killed. One listing."""
    for entry in store.list(f"{output}/{FOLDER}"):
        if entry.name.startswith(f".batch-{batch:08d}"):
            store.delete(entry.path)


def put_aside(store: Store, path: str, lines: Iterable[dict[str, object]]) -> None:
    """Have a file hold these lines; none, where there are none. What an earlier try of the batch has put there goes, as
    files may be good or gone by now, but for lines with a value: the topic may have forgotten that since. Raises DataError
    where those that are there cannot be read."""
    texts = {json.dumps(line, ensure_ascii=False): None for line in lines}
    if there := store.exists(path):
        try:
            earlier = store.read(path).decode().splitlines()
            texts |= {text: None for text in earlier if VALUE in parse_object(text)}
        except ValueError as error:
            raise DataError(
                f"{path} is damaged: {error}; move it away, as it may hold messages that exist no more"
            ) from None
    if texts:
        store.replace(path, "".join(f"{text}\n" for text in texts).encode())
    elif there:
        store.delete(path)


def lines_of(broken: Sequence[Broken]) -> list[dict[str, object]]:
    return [
        {"source": entry.source, "record": entry.record, "records": entry.records, "reason": entry.reason}
        for entry in broken
    ]
