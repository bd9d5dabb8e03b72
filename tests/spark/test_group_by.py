"""Rows that share a value of a column stay together under every strategy, and what each strategy then promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import pipeline
from pipeline.core.errors import DataError, UsageError
from pipeline.input.dataset import ranges
from pipeline.spark import images as images_module
from pipeline.strategies import STRATEGIES
from pipeline.strategies.hash import Hash
from tests.support.sharding_runs import kept_table, ledger_of, parquet_with_columns, read
from tests.support.tiers import only

ROWS = 900
QUIET: dict[str, Any] = {"image_shape": (3, 2, 2), "report": False, "quiet": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "distribution_aware": {"clusters": 9, "components": 5},
    "class_cluster": {"clusters": 10, "components": 5},
    "submodular": {"embedding": "pca:5"},
    "by_attribute": {"column": "patient"},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parquet_with_columns(tmp_path_factory.mktemp("src") / "p", ROWS)


def shard(spark: SparkSession, source: Path, output: Path, name: str, workers: int = 4, **options: Any) -> Any:
    options_of_name = {"example_ledger": ledger_of(ROWS)} if name == "importance" else OPTIONS.get(name, {})
    strategy = STRATEGIES[name](**options_of_name)
    settings = {"group_by": None if name == "by_attribute" else "patient", "allow_empty": True, **QUIET, **options}
    return pipeline.shard(
        spark, input=str(source), output=str(output), strategy=strategy, num_workers=workers, **settings
    ).shards


@pytest.fixture(scope="module")
def stratified(spark: SparkSession, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Make the set with which the tests of stratified compare."""
    return shard(spark, source, tmp_path_factory.mktemp("stratified") / "o", "stratified")


def digests(shards: Any) -> list[str]:
    return [file.sha256 for file in shards.files()]


@pytest.mark.parametrize("name", ["random", "stratified", "distribution_aware", "dirichlet", "by_attribute"])
def test_rows_of_a_patient_never_part(
    spark: SparkSession, source: Path, stratified: Any, tmp_path: Path, name: str
) -> None:
    shards = stratified if name == "stratified" else shard(spark, source, tmp_path / "o", name)
    rows = read(Path(shards.uri), shards.manifest.to_json())
    assert sorted(rows.id) == list(range(ROWS)), "every row once: nothing is copied"
    assert (rows.groupby("patient").worker.nunique() == 1).all()
    assert rows.sort_values("id").patient.tolist() == kept_table(source).column("patient").to_pylist()
    assert_promises(name, rows)
    # The manifest says what is there.
    manifest = shards.manifest
    largest = rows.groupby("patient").size().max()
    assert (manifest.params["bundles"], manifest.params["largest_bundle"]) == (rows.patient.nunique(), largest)
    for worker in manifest.workers:
        mine = rows[rows.worker == worker.index]
        assert (worker.rows, worker.label_histogram) == (len(mine), np.bincount(mine.label, minlength=5).tolist())
        if worker.neighbourhood_histogram:
            groups = len(manifest.neighbourhoods or ())
            assert worker.neighbourhood_histogram == np.bincount(mine.neighbourhood, minlength=groups).tolist()


def assert_promises(name: str, rows: pd.DataFrame) -> None:
    """The bounds of strategies/README.md, computed from the rows alone."""
    sizes = np.bincount(rows.worker, minlength=4)
    column = "neighbourhood" if "neighbourhood" in rows else "label"
    if name in ("random", "round_robin", "by_attribute"):
        assert np.ptp(sizes) <= rows.groupby("patient").size().max() + 1
    elif name in ("stratified", "distribution_aware", "class_cluster", "hash"):
        cells = rows.groupby(["patient", column]).size().to_numpy()
        table = rows.groupby([column, "worker"]).size().unstack(fill_value=0).reindex(columns=range(4), fill_value=0)
        share = table.sum(axis=1).to_numpy()[:, None] / 4
        # Targets are whole rows, within one of a share.
        assert ((table.to_numpy() - share) ** 2).sum() <= (cells**2).sum() + 2 * (
            2 * abs(table - share) + 1
        ).sum().sum()


@pytest.mark.parametrize("name", only(["stratified"], ["random", "stratified", "distribution_aware", "submodular"]))
def test_bundles_are_the_same_however_work_is_cut(
    spark: SparkSession, source: Path, stratified: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also dealt again from a set for another number of workers, which holds the column."""
    sets = [digests(stratified)] if name == "stratified" else []
    for pieces in (1, 5)[len(sets) :]:
        monkeypatch.setattr(
            images_module.Images, "pieces", lambda self, n=pieces: ranges(0, self.dataset.rows, n)[::-1]
        )
        sets.append(digests(shard(spark, source, tmp_path / str(pieces), name)))
    assert sets[0] == sets[1]
    three = shard(spark, source, tmp_path / "three", name, 3)
    moved = pipeline.reshard(
        spark,
        input=three.uri,
        output=str(tmp_path / "moved"),
        num_workers=4,
        allow_empty=True,
        report=False,
        quiet=True,
    ).shards
    assert digests(moved) == sets[0]
    assert moved.manifest.group_by == "patient"


def test_a_label_is_a_column_too(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    """Every class has one worker; the shards need no further column for it."""
    shards = shard(spark, source, tmp_path / "o", "round_robin", 3, group_by="label")
    table = np.array([worker.label_histogram for worker in shards.manifest.workers])
    assert ((table > 0).sum(axis=0) == 1).all()
    assert not shards.manifest.columns


def test_tiny_buckets_do_not_matter_where_nothing_is_copied(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    """Copies of these buckets would multiply the rows, but groups of a column have no copies."""
    strategy = Hash(family="lsh", width=1.0)
    settings = {"input": str(source), "strategy": strategy, "num_workers": 4, "allow_empty": True, **QUIET}
    shards = pipeline.shard(spark, output=str(tmp_path / "o"), group_by="patient", **settings).shards
    assert (shards.manifest.rows, shards.manifest.copies) == (ROWS, 0)
    with pytest.raises(UsageError, match="their copies add"):
        pipeline.shard(spark, output=str(tmp_path / "copies"), **settings)


def test_an_assignment_keeps_patients_together(
    spark: SparkSession, source: Path, stratified: Any, tmp_path: Path
) -> None:
    """In a notebook, and as a set of its own that is made into shards."""
    lines: Any = pipeline.assign(str(source), "stratified", 4, image_shape=(3, 2, 2), group_by="patient").toPandas()
    rows = read(Path(stratified.uri), stratified.manifest.to_json()).sort_values("id")
    assert lines.sort_values("id").worker.tolist() == rows.worker.tolist()
    alone = shard(spark, source, tmp_path / "alone", "stratified", assignment_only=True)
    settings = {**QUIET, "allow_empty": True}
    output = str(tmp_path / "made")
    made = pipeline.materialize(spark, assignment=alone.uri, input=str(source), output=output, **settings).shards
    assert digests(made) == digests(stratified)
    (tmp_path / "corrected").mkdir()
    for path in source.glob("*.parquet"):
        patients = pq.read_table(path, columns=["patient"])["patient"].to_pylist()
        table = pq.read_table(path).drop_columns("patient").append_column("patient", [patients[::-1]])
        pq.write_table(table, tmp_path / "corrected" / path.name, row_group_size=170)
    with pytest.raises(
        DataError, match=r"keeps the rows of a patient together, and the kept columns of .* have changed"
    ):
        pipeline.materialize(
            spark, assignment=alone.uri, input=str(tmp_path / "corrected"), output=str(tmp_path / "no"), **settings
        )
    # Other kept columns do not take the place of the column that resharding needs.
    settings |= {"input": str(source), "output": str(tmp_path / "seen"), "keep_columns": ["seen"]}
    kept = pipeline.materialize(spark, assignment=alone.uri, **settings).shards
    assert [column.name for column in kept.manifest.columns] == ["seen", "patient"]
    fewer = pipeline.reshard(spark, input=kept.uri, output=str(tmp_path / "r"), num_workers=2, report=False, quiet=True)
    found = read(tmp_path / "r", fewer.shards.manifest.to_json())
    assert (found.groupby("patient").worker.nunique() == 1).all()


def test_a_row_without_a_value_names_its_place(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"part-0\.parquet, row 3: site is null; give every row a value"):
        shard(spark, source, tmp_path / "o", "stratified", group_by="site")
    assert not (tmp_path / "o").exists()


def test_fewer_values_than_workers_are_refused(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="1 of 3 workers would get no rows"):
        shard(spark, source, tmp_path / "o", "stratified", 3, group_by="is_male", allow_empty=False)
