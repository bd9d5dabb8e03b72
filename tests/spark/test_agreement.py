"""How groups of two sets agree: beside scikit-learn, and through jobs/compare.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from sklearn.metrics import adjusted_rand_score

import pipeline
from pipeline.core.errors import DataError
from pipeline.core.shardset.manifest import ShardSet, open_committed
from pipeline.core.storage.store import Store
from pipeline.quality.agreement import Cells, PairSums
from pipeline.quality.metrics import chi_square
from pipeline.runs.agreement import agreement, cells_of_chunk
from pipeline.strategies.class_cluster import ClassCluster
from pipeline.strategies.distribution_aware import DistributionAware
from pipeline.strategies.hash import Hash
from pipeline.strategies.round_robin import RoundRobin
from tests.conftest import make_rows, write_binary
from tests.spark.test_hash import SMALL, Source, owners
from tests.support.application import run_job
from tests.support.sharding_runs import run


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    labels, images = make_rows(1500, seed=8, pixels=192)
    return write_binary(tmp_path_factory.mktemp("agreement") / "in", labels, images, files=3), labels, images


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=60), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_the_adjusted_rand_index_is_that_of_scikit_learn(rows: list[tuple[int, int]], slices: int) -> None:
    left, right = np.array(rows, np.int64).T
    whole = Cells.total([Cells.from_groups(left[part::2], right[part::2], 4) for part in range(min(2, len(rows)))])
    parts = [whole.select(np.flatnonzero(whole.keys // 4 % slices == part)) for part in range(slices)]
    sums = [PairSums.from_cells(part, 4) for part in parts]
    total = sums[0]
    for part in sums[1:]:
        total = total + part
    assert total.adjusted_rand() == pytest.approx(adjusted_rand_score(right, left), abs=1e-12)


def shard_set(output: Path) -> ShardSet:
    return open_committed(Store(), str(output))


def test_agreement_is_that_of_all_rows(spark: SparkSession, source: Source, tmp_path: Path) -> None:
    """Two sets of the same rows: groups beside groups, workers beside the neighbourhoods of k-means.

    The cells of a set of other rows are refused."""
    exact = run(spark, source[0], tmp_path / "k", DistributionAware(clusters=9, components=8, whiten=False), 5)
    hashed = run(spark, source[0], tmp_path / "h", Hash(family="sign", functions=5), 5)
    found = agreement(spark.sparkContext, shard_set(tmp_path / "h"), shard_set(tmp_path / "k"))
    one, other = owners(tmp_path / "h", hashed), owners(tmp_path / "k", exact)
    assert found is not None
    assert found.adjusted_rand == pytest.approx(adjusted_rand_score(other.neighbourhood, one.neighbourhood))
    test = chi_square(pd.crosstab(one.worker, other.neighbourhood).to_numpy())
    assert test is not None
    assert found.chi_square_per_dof == pytest.approx(test.per_dof)
    itself = agreement(spark.sparkContext, shard_set(tmp_path / "k"), shard_set(tmp_path / "k"))
    assert itself is not None
    assert itself.adjusted_rand == 1
    plain = run(spark, source[0], tmp_path / "p", RoundRobin(), 5)
    assert plain["neighbourhoods"] is None
    assert agreement(spark.sparkContext, shard_set(tmp_path / "h"), shard_set(tmp_path / "p")) is None
    run(spark, source[0] / "data_batch_1.bin", tmp_path / "other", RoundRobin(), 5)
    sets = shard_set(tmp_path / "other"), shard_set(tmp_path / "k")
    one, other = ((shards.uri, shards.assignment_files()[0]) for shards in sets)
    with pytest.raises(DataError, match="hold other rows; make one again with --overwrite"):
        list(cells_of_chunk(Store(), 4, 1, (one, other)))


@pytest.mark.full
def test_cifar100_reports_neighbourhoods_beside_fine_labels(spark: SparkSession, tmp_path: Path) -> None:
    """A job on CIFAR-100 by coarse labels, whose neighbourhoods inside each class are compared with the fine labels."""
    fine, images = make_rows(600, seed=4, pixels=3072, classes=8)
    records = np.concatenate([fine[:, None] // 4, fine[:, None], images], axis=1).astype(np.uint8)
    (tmp_path / "train.bin").write_bytes(records.tobytes())
    strategy = ClassCluster(clusters=40, components=8)
    shards = pipeline.shard(
        spark, input=str(tmp_path / "train.bin"), output=str(tmp_path / "o"), strategy=strategy, num_workers=3,
        format="cifar100-binary", label_column="coarse_label", keep_columns=["fine_label"], quiet=True,
    ).shards  # fmt: skip
    rows = pd.concat([pq.read_table(f"{shards.uri}/{file.path}").to_pandas() for file in shards.files()])
    rows = rows.sort_values("id")
    assert np.array_equal(rows.label, fine // 4)
    assert np.array_equal(rows.fine_label, fine)
    page = (tmp_path / "o" / "report.html").read_text()
    most = np.bincount(fine).max() / 600
    purity = pd.crosstab(rows.neighbourhood, fine).max(axis=1).sum() / 600
    figures = [adjusted_rand_score(fine, rows.neighbourhood), purity, most]
    cells = "".join(f'<td class="number">{figure:.3f}</td>' for figure in figures)
    assert f"<tr><td>fine_label</td>{cells}</tr>" in page
    assert rows.neighbourhood.nunique() > 2  # more than coarse classes


@pytest.mark.full
def test_compare_tells_bytes_and_agreement(spark: SparkSession, source: Source, tmp_path: Path) -> None:
    flags = ["--input", source[0], "--output", tmp_path / "c", "--workers", 3, *SMALL[:-1]]
    flags += ["--strategies", "hash,stratified", "--components", 8, "--functions", 5]
    done = run_job("compare.py", *flags, "--variants", "exact=distribution_aware")
    assert done.code == 0, done.err
    rows = {row["name"]: row for row in json.loads((tmp_path / "c" / "compare.json").read_text())}
    assert rows["exact"]["adjusted_rand"] == 1
    assert 0 < rows["hash"]["adjusted_rand"] < 1
    for name, row in rows.items():
        files = (tmp_path / "c" / name).glob("worker=*/*.parquet")
        assert row["bytes"] == sum(file.stat().st_size for file in files)
    for word in ("ARI", "bytes", "k-means chi2/dof"):
        assert word in done.out
    alone = run_job("compare.py", *flags, "--strategies", "random", "--overwrite")
    assert alone.code == 0, alone.err
    assert json.loads((tmp_path / "c" / "compare.json").read_text())[0]["adjusted_rand"] is None
