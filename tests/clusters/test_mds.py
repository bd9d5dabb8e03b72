"""``sharding export --as mds`` of a shard set, read by MosaicML's own reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.clusters import ROOT
from tests.clusters.environments import MDS
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from trainer.data.rows import Rows
from trainer.export.__main__ import main

pytestmark = pytest.mark.full
# Reads the samples in the order of their numbers without any code of the project.
PROGRAM = """
import sys
import numpy
from streaming import StreamingDataset
for folder in sys.argv[1:]:
    data = StreamingDataset(local=folder, batch_size=1)
    samples = [data[number] for number in range(len(data))]
    images = [numpy.asarray(sample.pop("image")) for sample in samples]
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    numpy.savez(f"{folder}.npz", image=numpy.stack(images), **columns)
"""


def real_rows(rows: Rows) -> Rows:
    """Return the rows with images that PNG cannot hold."""
    images = np.random.default_rng(0).normal(size=rows.images_NCHW.shape).astype(np.float32)
    return Rows(images, rows.labels, rows.ids)


def test_its_reader_gives_the_rows_of_every_worker(tmp_path: Path) -> None:
    written = {"bytes": [rows_of(30, 2), rows_of(50, 3, 100)], "floats": [real_rows(rows_of(20, 2))]}
    folders: dict[Path, Rows] = {}
    for name, workers in written.items():
        shards, exported = str(tmp_path / name), tmp_path / f"{name}-mds"
        write_shards(Path(shards), workers, EVAL_ROWS if name == "bytes" else None)
        assert main([shards, "--as", "mds", "--to", str(exported), "--quiet"]) == 0
        folders |= {exported / "data" / f"worker-{worker:03}": rows for worker, rows in enumerate(workers)}
    folders[tmp_path / "bytes-mds" / "data" / "test"] = EVAL_ROWS

    MDS.make()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(MDS.packages)])}
    command = [sys.executable, "-c", PROGRAM, *map(str, folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for folder, rows in folders.items():
        with np.load(f"{folder}.npz") as read:
            # A PNG file is decoded as [H, W, C].
            images = read["image"] if rows.images_NCHW.dtype == np.float32 else np.moveaxis(read["image"], -1, 1)
            assert np.array_equal(images, rows.images_NCHW)
            assert np.array_equal(read["id"], rows.ids)
            assert np.array_equal(read["label"], rows.labels)
