"""Shards as the trainer reads them: made by the pipeline, held against the input; broken in every way; HDFS failing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.manifest import missing_file
from pipeline.core.storage.retries import unreadable_is_data_error
from tests.support.draws import ids_in_steps
from tests.support.trainer_sets import rows_of, write_shards
from tests.support.virtual_runs import virtual
from trainer.data import opening
from trainer.data.loading import load_worker
from trainer.data.opening import open_shards, store_of
from trainer.data.rows import join_rows
from trainer.data.shards import Shards
from trainer.runlog.read import read_pushes


def test_a_folder_without_a_set_names_a_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"has no manifest\.json: .* sharding shard --strategy stratified .*--workers N"
    ):
        open_shards(str(tmp_path))


@pytest.mark.parametrize("uri", ["webhdfs:///shards", "webhdfs://host:port/shards", "ftp://host/shards"])
def test_an_address_that_names_no_place_is_a_usage_error(uri: str) -> None:
    with pytest.raises(UsageError, match=uri):
        open_shards(uri)


def test_a_gateway_that_does_not_answer_is_named_at_once() -> None:
    with pytest.raises(OSError, match=r"webhdfs://127\.0\.0\.1:9/shards: .*refused; check that http://127\.0\.0\.1:9"):
        open_shards("webhdfs://127.0.0.1:9/shards")


def test_a_uri_without_host_uses_hadoops_default_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    with pytest.raises(UsageError, match=r"no fs\.defaultFS is configured"):
        open_shards("hdfs:///shards")
    property = "<property><name>fs.defaultFS</name><value>hdfs://names:8020</value></property>"
    (tmp_path / "core-site.xml").write_text(f"<configuration>{property}</configuration>")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    assert store_of("hdfs:///shards").resolve("hdfs:///shards") == "hdfs://names:8020/shards"


def test_a_set_that_is_replaced_while_it_is_opened_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_shards(tmp_path / "set", [rows_of(10, 1)], None)

    def replace_and_check(shards: Shards) -> str | None:
        monkeypatch.setattr(opening, "missing_file", missing_file)
        write_shards(folder, [rows_of(20, 1)], None)
        return f"{folder}/worker=000/part.parquet is missing"

    monkeypatch.setattr(opening, "missing_file", replace_and_check)
    assert open_shards(str(folder)).rows == 20


@contextmanager
def another_user(folder: Path) -> Iterator[None]:
    """Be a user who may enter a folder and owns nothing in it; only root can become one."""
    if os.geteuid():
        yield
        return
    for closed in takewhile(lambda path: not path.stat().st_mode & 0o001, (folder, *folder.parents)):
        closed.chmod(0o755)  # pytest's own folders
    os.seteuid(12345)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("closed", ["manifest.json", "worker=000", "worker=000/part.parquet"])
def test_a_file_without_a_right_to_it_is_a_data_error(tmp_path: Path, closed: str) -> None:
    folder = write_shards(tmp_path / "set", [rows_of(10, 1)], None)
    (folder / closed).chmod(0)
    try:
        with another_user(folder.parent), pytest.raises(DataError, match="cannot be read by user") as caught:
            load_worker(open_shards(str(folder)), 0)
        assert closed in str(caught.value)
        assert "Permission denied" in str(caught.value)
    finally:
        (folder / closed).chmod(0o755)


@pytest.mark.parametrize("kind", ["folder", "loop"])
def test_a_path_that_is_no_file_any_more_is_a_data_error(tmp_path: Path, kind: str) -> None:
    folder = write_shards(tmp_path / "set", [rows_of(10, 1)], None)
    shards, file = open_shards(str(folder)), folder / "worker=000" / "part.parquet"
    file.unlink()
    if kind == "folder":
        file.mkdir()
    else:
        file.symlink_to(file)
    with pytest.raises(DataError, match=r"part\.parquet cannot be read: .*; correct it"):
        load_worker(shards, 0)


def test_a_failure_that_may_pass_is_no_data_error() -> None:
    with pytest.raises(OSError, match="stale"), unreadable_is_data_error("hdfs://names/set"):
        raise OSError(errno.ESTALE, "stale file handle", "hdfs://names/set")


def test_rows_on_every_worker_are_drawn_once_per_worker(tmp_path: Path) -> None:
    """An epoch has floor(distinct rows / batch size) steps; copies lengthen the pass over a shard, not the epoch."""
    shared = rows_of(12, 9, first_id=900)
    parts = [join_rows([rows_of(36, worker, first_id=36 * worker), shared]) for worker in range(3)]
    folder = write_shards(tmp_path / "set", parts, None)
    settings: dict[str, Any] = {"model": "logistic", "batch_size": 37, "threads": 1, "example_ledger": True}
    virtual(tmp_path / "run", "bsp", shards=folder, compute="real", workers=3, steps=None, epochs=4, **settings)
    steps = 4 * (120 // 37)
    pushes = read_pushes(tmp_path / "run" / "pushes.csv")
    assert np.bincount(pushes["worker"]).tolist() == [steps] * 3
    # 12 steps of 12 rows are 3 passes over the 48 rows of a shard.
    ids, times = np.unique(ids_in_steps(tmp_path / "run"), return_counts=True)
    assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == {
        **dict.fromkeys(range(108), 3), **dict.fromkeys(range(900, 912), 3 * 3)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("label", "step"),
    [(4, "shard again with a larger --num-classes"), (-1, "shard again with labels of 0 or more")],
)
def test_a_label_outside_the_classes_is_refused(label: int, step: str, tmp_path: Path) -> None:
    rows = rows_of(6, 2)
    labels = rows.labels.copy()
    labels[3] = label
    shards = open_shards(str(write_shards(tmp_path, [replace(rows, labels=labels)], None)))
    with pytest.raises(DataError) as refused:
        load_worker(shards, 0)
    assert str(refused.value).endswith(f"row 3: label {label} is not in 0..3; {step}")
