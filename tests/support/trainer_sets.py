"""What tests of whole runs share: small shard sets of the same images, and where this machine can be reached."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.shardset.layout import Layout
from pipeline.core.shardset.schema import record_schema
from pipeline.input.read_options import ReadOptions
from pipeline.runs.request import Request
from pipeline.runs.shard import shard
from pipeline.spark.progress import PhaseLog
from pipeline.strategies.round_robin import RoundRobin
from pipeline.strategies.stratified import Stratified
from tests.conftest import make_rows, write_binary
from trainer.data.rows import Rows

SHAPE, CLASSES = (3, 8, 8), 4


def make_sets(spark: Any, root: Path, *counts: int, seed: int = 1, ratios: Any = None) -> dict[int, Path]:
    """The same 720 training and 200 evaluation images, sharded for each number of workers. ratios: of a single number's
    shards, which are then dealt round robin."""
    strategy = RoundRobin() if ratios else Stratified()
    labels, images = make_rows(920, seed=seed, pixels=192)
    write_binary(root / "train", labels[:720], images[:720])
    write_binary(root / "test", labels[720:], images[720:])
    for workers in counts:
        request = Request(
            input=str(root / "train"),
            eval_input=str(root / "test"),
            output=str(root / f"shards-{workers}"),
            num_workers=workers,
            read_options=ReadOptions("cifar10-binary", SHAPE),
            ratios=ratios,
        )
        shard(spark.sparkContext, request, strategy, PhaseLog(quiet=True))
    return {workers: root / f"shards-{workers}" for workers in counts}


def copy_of(shards: Path, target: Path) -> Path:
    """A set that a test may damage."""
    return Path(shutil.copytree(shards, target))


def own_address(family: socket.AddressFamily = socket.AF_INET) -> str | None:
    """An address of this machine that others may use, neither loopback nor of one link only, if it has one."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == family and not address.address.startswith(("127.", "::1", "fe80:")):
                return str(address.address)
    return None


def rows_of(count: int, seed: int, first_id: int = 0) -> Rows:
    """Random images and labels under consecutive ids."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, *SHAPE), dtype=np.uint8)
    return Rows(images, rng.integers(0, CLASSES, count), np.arange(first_id, first_id + count))


EVAL_ROWS = rows_of(60, 1, 1000)


def write_rows(folder: Path, path: str, rows: Rows) -> dict[str, Any]:
    images = pa.array([image.tobytes() for image in np.asarray(rows.images_NCHW)], pa.binary())
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": rows.ids, "label": rows.labels, "image": images}), folder / path)
    data = (folder / path).read_bytes()
    return {"path": path, "rows": len(rows), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_shards(folder: Path, workers: list[Rows], eval_rows: Rows | None) -> Path:
    """A shard set of given rows, which no Spark has made: a file for each worker."""
    dtype = str(workers[0].images_NCHW.dtype)
    manifest = {
        "format_version": 1,
        "num_workers": len(workers),
        "rows": len({int(i) for rows in workers for i in rows.ids}),
        "labels": {"num_classes": CLASSES},
        "image": {"shape": SHAPE, "dtype": dtype, "layout": "CHW", "mean": [120.0, 125.0, 130.0]},
        "workers": [
            {"index": w, "files": [write_rows(folder, f"worker={w:03d}/part.parquet", rows)]}
            for w, rows in enumerate(workers)
        ],
        "eval": {"files": [write_rows(folder, "eval/part.parquet", eval_rows)]} if eval_rows else None,
        "model": None,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def write_bare_shard(
    path: Path, first: int, rows: int = 10, shape: tuple[int, int, int] = (3, 4, 4), **columns: Any
) -> Path:
    """Write a shard of rows first, first + 1, ..., whose labels go round 4 classes, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = np.arange(first, first + rows)
    images = np.random.default_rng(first).integers(0, 256, (rows, int(np.prod(shape))), np.uint8)
    schema = record_schema(Layout(shape), neighbourhood=False)
    values = {"id": ids, "label": ids % 4, "image": [row.tobytes() for row in images], "copy": np.zeros(rows)} | columns
    table = pa.table({name: pa.array(values[name]).cast(schema.field(name).type) for name in schema.names}, schema)
    pq.write_table(table, path)
    return path


def append_rows(shards: Path, workers: list[Rows]) -> None:
    """Append a generation of given rows to a set of ``write_shards``, whose rows become generation 0."""
    manifest = json.loads((shards / "manifest.json").read_text())
    number = len(manifest.setdefault("generations", []))
    if not number:
        manifest |= {"input": {}, "assignment": {"rows": 0, "files": []}}
        manifest["generations"].append(_generation(manifest, 0))
        number = 1
    for worker, rows in zip(manifest["workers"], workers, strict=True):
        worker["files"].append(write_rows(shards, f"worker={worker['index']:03d}/part-v{number}-0a.parquet", rows))
    manifest["rows"] += sum(map(len, workers))
    manifest["generations"].append(_generation(manifest, number))
    (shards / "manifest.json").write_text(json.dumps(manifest))


def _generation(manifest: dict[str, Any], version: int) -> dict[str, Any]:
    total = manifest["rows"]
    about = {"rows": total, "copies": 0, "total": total, "fingerprint": "", "mean": manifest["image"]["mean"]}
    return about | {"batch": version, "version": version, "source": ""}
