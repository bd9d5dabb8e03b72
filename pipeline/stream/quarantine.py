"""What a stream puts aside: OUTPUT/_quarantine/batch-NNNNNNNN.jsonl, a line for each record or file, with the reason.

A batch that is done again begins with none, and writes its files again. Of files the line says where a record is; what came
from a topic, which forgets it, is in the line itself, in base64. No Spark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from pipeline.storage.store import Store
from pipeline.stream.arrivals import Broken

FOLDER = "_quarantine"


def path_of(output: str, batch: int, part: int | None = None) -> str:
    """part: of a batch that tasks put aside from, each by itself."""
    return f"{output}/{FOLDER}/batch-{batch:08d}{'' if part is None else f'-{part:05d}'}.jsonl"


def clear(store: Store, output: str, batch: int) -> None:
    """Delete what an earlier try of a batch has put aside, those of partitions and drafts included: it may have seen files
    that are good or gone by now. One listing."""
    name = f"batch-{batch:08d}"
    for entry in store.list(f"{output}/{FOLDER}"):
        if entry.name.removeprefix(".").startswith((f"{name}.", f"{name}-")):
            store.delete(entry.path)


def put_aside(store: Store, path: str, lines: Iterable[dict[str, object]]) -> None:
    """Write what there is; nothing where there is none."""
    data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    if data:
        store.replace(path, data.encode())


def lines_of(broken: Sequence[Broken]) -> list[dict[str, object]]:
    return [
        {"source": entry.source, "record": entry.record, "records": entry.records, "reason": entry.reason}
        for entry in broken
    ]
