"""What a user would write who shards by neighbourhoods without Spark: one process, numpy and scikit-learn.

    python -m tests.benchmarks.sklearn_sharding fastest|exact INPUT OUTPUT

fastest: ``PCA(50)`` as it comes, which picks the randomised solver for images, in float32, and ``KMeans`` as it comes.
exact: the eigenvectors of the covariance in float64. Prints the seconds of the phases as JSON."""

from __future__ import annotations

import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA

COMPONENTS, CLUSTERS, WORKERS = 50, 20, 12
PIXELS = 3072
Rows = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def training_files(folder: Path) -> list[Path]:
    """The training side of a CIFAR folder in any of its layouts, or of Parquet files."""
    names = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in names if path.name.startswith(("data_batch", "train")) or path.suffix == ".parquet"]


def read_file(path: Path) -> Rows:
    """Labels and uint8 images [rows, pixels] of one file: CIFAR-10 or CIFAR-100, binary or pickle, or Parquet."""
    if path.suffix == ".parquet":
        table = pq.read_table(path, columns=["label", "image"])
        images = np.frombuffer(b"".join(table["image"].to_pylist()), np.uint8).reshape(len(table), -1)
        return table["label"].to_numpy(), images
    if path.suffix == ".bin":
        data = np.fromfile(path, np.uint8)
        records = data.reshape(-1, PIXELS + (1 if path.name.startswith("data_batch") else 2))
        return records[:, -PIXELS - 1], records[:, -PIXELS:]
    with path.open("rb") as file:
        held = pickle.load(file, encoding="bytes")
    return np.array(held[b"labels"] if b"labels" in held else held[b"fine_labels"]), held[b"data"]


def read(folder: Path) -> Rows:
    labels, images = zip(*map(read_file, training_files(folder)), strict=True)
    return np.concatenate(labels).astype(np.int32), np.concatenate(images)


def main(way: str, folder: Path, output: Path) -> dict[str, float]:
    """Read, PCA, k-means, deal every cluster round robin, twelve Parquet files."""
    seconds: dict[str, float] = {}
    began = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        now = time.perf_counter()
        seconds[name], began = now - began, now

    labels, images = read(folder)
    values = images.astype(np.float32 if way == "fastest" else np.float64)
    lap("read")
    pca = (PCA(COMPONENTS) if way == "fastest" else PCA(COMPONENTS, svd_solver="covariance_eigh")).fit(values)
    lap("pca")
    points = pca.transform(values)
    lap("project")
    clusters = KMeans(CLUSTERS).fit(points).labels_
    lap("kmeans")
    owner = np.empty(len(labels), np.int64)
    for cluster in range(CLUSTERS):
        rows = np.flatnonzero(clusters == cluster)
        owner[rows] = np.arange(len(rows)) % WORKERS
    lap("assign")
    for worker in range(WORKERS):
        rows = np.flatnonzero(owner == worker)
        flat = pa.py_buffer(images[rows].tobytes())
        offsets = pa.py_buffer(np.arange(len(rows) + 1, dtype=np.int32) * images.shape[1])
        column = pa.Array.from_buffers(pa.binary(), len(rows), [None, offsets, flat])
        table = pa.table({"id": rows, "label": labels[rows], "image": column})
        folder = output / f"worker={worker:03d}"
        folder.mkdir(parents=True)
        pq.write_table(table, folder / "part.parquet", compression="none", use_dictionary=False, row_group_size=1000)
    lap("write")
    return seconds


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))))
