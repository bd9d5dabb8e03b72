"""What tests of streams share: batches taken in this process without Spark's streaming, and sets held against an oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import SparkContext

from pipeline.core.shardset.manifest import ShardSet, open_committed
from pipeline.input.arrivals import digest
from pipeline.input.read_options import ReadOptions
from pipeline.strategies.hash import Hash
from pipeline.stream.generation import GenerationRun, IncomingBatch, Outcome
from pipeline.stream.request import StreamRequest
from tests.support.places import STORE

SHAPE = (3, 8, 8)
RAW = ReadOptions("cifar10-binary", SHAPE)
STRATEGY = Hash(family="sign", functions=6)


def take(
    context: SparkContext,
    output: Path | str,
    batch: int,
    files: Sequence[Path | str],
    workers: int = 3,
    source: str = "source",
    **options: Any,
) -> Outcome:
    """Commit some files as a batch, as the stream does with those that Spark names."""
    request = StreamRequest(str(output), workers, **{"strategy": STRATEGY, "read_options": RAW, **options})
    found = [STORE.info(str(file)) for file in files]
    run = GenerationRun(context, request, STORE, str(output), "query")
    return run.commit_batch(batch, lambda folder, newest_ms: IncomingBatch(source, found, digest(found)))


def rows_of(shards: ShardSet) -> list[dict[str, Any]]:
    """Every row of every worker, with the worker, in the order of files and rows."""
    rows = []
    for worker in shards.manifest.to_json()["workers"]:
        for file in worker["files"]:
            path = f"{shards.uri}/{file['path']}"
            table = pq.read_table(pa.BufferReader(STORE.read(path)))
            rows += [row | {"worker": worker["index"], "path": path} for row in table.to_pylist()]
    return rows


def check_set(output: Path | str, images: np.ndarray, labels: np.ndarray) -> ShardSet:
    """The set at a place, if it holds these rows in this order of ids, each once with its owner, and every bucket's rows are
    dealt round robin in that order; copies go to all others, and to all or none. Independent of how it was made."""
    shards = open_committed(STORE, str(output))
    rows, workers = rows_of(shards), shards.num_workers
    owners = sorted((row for row in rows if row["copy"] == 0), key=lambda row: row["id"])
    assert [row["id"] for row in owners] == list(range(len(images)))
    assert b"".join(row["image"] for row in owners) == images.tobytes()
    assert [row["label"] for row in owners] == labels.tolist()
    firsts: dict[int, int] = {}
    counts: Counter[int] = Counter()
    for row in owners:
        bucket = row["neighbourhood"]
        first = firsts.setdefault(bucket, row["worker"])
        assert row["worker"] == (first + counts[bucket]) % workers
        counts[bucket] += 1
    held = Counter(row["id"] for row in rows)
    assert set(held.values()) <= {1, workers}
    for row in rows:
        if row["copy"]:
            others = [worker for worker in range(workers) if worker != owners[row["id"]]["worker"]]
            assert row["worker"] == others[row["copy"] - 1]
    near = shards.manifest.to_json()["neighbourhoods"]
    assert [entry["size"] for entry in near] == [counts[number] for number in range(len(near))]
    copied = Counter(owners[row]["neighbourhood"] for row, times in held.items() if times > 1 or workers == 1)
    assert workers == 1 or [entry["sparse"] for entry in near] == [
        copied[number] == counts[number] for number in range(len(near))
    ]
    assert shards.manifest.copies == len(rows) - len(owners)
    return shards
