"""Shards as the trainer reads them: made by the pipeline, held against the input; broken in every way; HDFS failing."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.input.read_options import ReadOptions
from pipeline.runs.request import Request
from pipeline.runs.shard import shard
from pipeline.spark.progress import PhaseLog
from pipeline.strategies.distribution_aware import DistributionAware
from tests.clusters import Hdfs
from tests.conftest import make_rows, write_binary
from trainer.data.loading import load_worker
from trainer.data.opening import open_shards

pytestmark = pytest.mark.full

SHAPE = (3, 4, 4)
PIXELS = 48
WORKERS = 2
ROWS = 8200  # enough for two files a worker
ISOLATED = (17, 400, 8100)  # images like no other: a neighbourhood so small that every worker gets a copy


@dataclass(frozen=True)
class Made:
    """A committed set and the input it was made of."""

    folder: Path
    labels: np.ndarray
    images: np.ndarray
    eval_labels: np.ndarray
    eval_images: np.ndarray


@pytest.fixture(scope="module")
def made(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("trainer")
    labels, images = make_rows(ROWS, seed=5, pixels=PIXELS)
    rng = np.random.default_rng(5)
    for row in ISOLATED:
        images[row] = rng.integers(0, 2, PIXELS) * 255
    eval_labels, eval_images = make_rows(90, seed=6, pixels=PIXELS)
    write_binary(root / "train", labels, images)
    write_binary(root / "test", eval_labels, eval_images)
    request = Request(
        input=str(root / "train"),
        eval_input=str(root / "test"),
        output=str(root / "shards"),
        num_workers=WORKERS,
        read_options=ReadOptions("cifar10-binary", SHAPE),
    )
    strategy = DistributionAware(clusters=40, components=20.0, whiten=True)
    shard(spark.sparkContext, request, strategy, PhaseLog(quiet=True))
    return Made(root / "shards", labels, images, eval_labels, eval_images)


def test_shards_on_hdfs_load_whole_while_datanodes_die(hdfs: Hdfs, made: Made) -> None:
    hdfs.client().upload("/trainer", str(made.folder))
    web = f"{hdfs.web_uri}/trainer"
    expected = load_worker(open_shards(str(made.folder)), 0)
    with ThreadPoolExecutor(3) as restarting:
        for uri in (f"{hdfs.uri}/trainer", web):
            restarted: list[Future[None]] = []

            def lose_every_datanode(rows: int, total: int, restarted: list[Future[None]] = restarted) -> None:
                """After the first file: the second is nowhere until one is back."""
                if not restarted:
                    for index in range(3):
                        hdfs.kill_datanode(index)
                    restarted += [restarting.submit(hdfs.restart_datanode, index) for index in range(3)]

            shards = open_shards(uri, num_workers=WORKERS)
            try:
                rows = load_worker(shards, 0, lose_every_datanode)
            finally:
                for each in restarted:
                    each.result()
                hdfs.wait_live(3)
            assert len(restarted) == 3
            assert np.array_equal(rows.images_NCHW, expected.images_NCHW), uri
            assert np.array_equal(rows.labels, expected.labels)
            assert np.array_equal(rows.ids, expected.ids)
    with pytest.raises(DataError, match=r"has no manifest\.json"):
        open_shards(web + "/nothing")
