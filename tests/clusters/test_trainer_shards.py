"""Shards that the trainer reads on HDFS while its DataNodes fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError
from tests.clusters import Hdfs
from tests.support.trainer_sets import rows_of, write_rows, write_shards
from trainer.data import loading
from trainer.data.loading import load_worker
from trainer.data.opening import open_shards
from trainer.data.rows import Rows
from trainer.data.shard_file import row_blocks

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of one worker with two files."""
    folder = write_shards(tmp_path_factory.mktemp("trainer") / "set", [rows_of(900, 1)], None)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["workers"][0]["files"].append(write_rows(folder, "worker=000/second.parquet", rows_of(700, 2, 900)))
    manifest["rows"] = 1600
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_shards_on_hdfs_load_whole_while_datanodes_die(hdfs: Hdfs, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hdfs.client().upload("/trainer", str(made))
    web = f"{hdfs.web_uri}/trainer"
    expected = load_worker(open_shards(str(made)), 0)
    with ThreadPoolExecutor(3) as restarting:
        for uri in (f"{hdfs.uri}/trainer", web):
            restarted: list[Future[None]] = []

            def read_and_lose(*args: Any, restarted: list[Future[None]] = restarted, **options: Any) -> Iterator[Rows]:
                """Lose all DataNodes after the first file: the second is nowhere until one is back."""
                yield from row_blocks(*args, **options)
                if not restarted:
                    for index in range(3):
                        hdfs.kill_datanode(index)
                    restarted += [restarting.submit(hdfs.restart_datanode, index) for index in range(3)]

            shards = open_shards(uri)
            monkeypatch.setattr(loading, "row_blocks", read_and_lose)
            try:
                rows = load_worker(shards, 0)
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
