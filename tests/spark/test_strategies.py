"""Invariants that every strategy inherits, each strategy's own promises, and independence of how the work is cut."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from scipy import stats
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA

from pipeline.assignment.groups import group_table
from pipeline.core.errors import DataError, UnsuitableError, UsageError
from pipeline.core.shardset.manifest import open_committed
from pipeline.core.storage.store import Store
from pipeline.input.dataset import ranges
from pipeline.quality.measure import measure
from pipeline.runs.request import Request, preflight
from pipeline.runs.reshard import reshard
from pipeline.runs.shard import shard
from pipeline.spark import images as images_module
from pipeline.strategies import STRATEGIES
from pipeline.strategies.distribution_aware import DistributionAware
from pipeline.strategies.random_iid import Independent
from pipeline.strategies.stratified import Stratified
from tests.conftest import make_rows, write_binary
from tests.support.sharding_runs import QUIET, assert_promises, digests, make, read, run, shas
from tests.support.tiers import only

Source = tuple[Path, np.ndarray, np.ndarray]  # folder, labels, images


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """2,600 rows with a few isolated images, so that a tiny neighbourhood exists."""
    labels, images = make_rows(2600, seed=5, pixels=192)
    rng = np.random.default_rng(5)
    for row in (17, 400, 2599):
        images[row] = rng.integers(0, 2, 192) * 255
    return write_binary(tmp_path_factory.mktemp("src") / "cifar", labels, images, files=3), labels, images


# 2,600 is no multiple of 7. One worker gets every row from any strategy: one without copies and one with them.
@pytest.mark.parametrize(
    ("name", "workers"), [*((name, 7) for name in STRATEGIES), ("submodular", 1), ("distribution_aware", 1)]
)
def test_every_row_is_owned_once_and_arrives_unchanged(
    spark: SparkSession, source: Source, tmp_path: Path, name: str, workers: int
) -> None:
    folder, labels, images = source
    skip_unless_values(name, workers)
    manifest = run(spark, folder, tmp_path / "out", make(name), workers)
    rows = read(tmp_path / "out", manifest)
    owners = rows[rows["copy"] == 0].sort_values("id")
    assert owners.id.tolist() == list(range(len(labels)))
    assert np.array_equal(owners.label, labels)
    assert np.array_equal(np.stack([np.frombuffer(i, np.uint8) for i in owners.image]), images)
    # copies: none, or one on every worker, numbered from the owner's 0
    copies = rows.groupby("id").agg(n=("copy", "size"), top=("copy", "max"), workers=("worker", "nunique"))
    assert set(copies.n) <= {1, workers}
    assert (copies.n == copies.workers).all()
    assert (copies.top == copies.n - 1).all()
    assert_promises(name, manifest)
    # the manifest says what is there
    assert manifest["rows"] == len(labels)
    assert manifest["copies"] == int((rows["copy"] > 0).sum())
    for worker in manifest["workers"]:
        mine = rows[rows.worker == worker["index"]]
        assert (worker["rows"], worker["copies"]) == (len(mine), int((mine["copy"] > 0).sum()))
        assert worker["label_histogram"] == np.bincount(mine.label, minlength=10).tolist()
        if "neighbourhood" in mine:
            groups = len(manifest["neighbourhoods"])
            assert worker["neighbourhood_histogram"] == np.bincount(mine.neighbourhood, minlength=groups).tolist()
        assert sum(file["rows"] for file in worker["files"]) == len(mine)
        assert mine.id.is_monotonic_increasing
    if "neighbourhood" in rows:
        near = owners.groupby("neighbourhood").size()
        assert [n["size"] for n in manifest["neighbourhoods"]] == near.reindex(
            range(len(manifest["neighbourhoods"])), fill_value=0
        ).tolist()
        sparse = {index for index, n in enumerate(manifest["neighbourhoods"]) if n["sparse"]}
        assert set(rows[rows["copy"] > 0].neighbourhood) == (sparse if workers > 1 else set())
        dense = owners[~owners.neighbourhood.isin(sparse)]
        spread = dense.groupby(["neighbourhood", "worker"]).size().unstack(fill_value=0)
        spread = spread.reindex(columns=range(workers), fill_value=0)
        assert (spread.max(axis=1) - spread.min(axis=1)).max() <= 1


# The others place rows by ids and labels alone, and tests/unit/test_assign.py cuts their work.
CUT = [
    name for name, kind in STRATEGIES.items() if kind.looks_at_pixels or kind.reads_table or make(name).bundle_column
]


@pytest.mark.parametrize("name", only(["distribution_aware"], CUT))
def test_the_shards_are_the_same_bits_however_the_work_is_cut(
    spark: SparkSession, source: Source, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = []
    for pieces in (1, 16):
        monkeypatch.setattr(
            images_module.Images, "pieces", lambda self, n=pieces: ranges(0, self.dataset.rows, n)[::-1]
        )
        sets.append(digests(run(spark, source[0], tmp_path / str(pieces), make(name, seed=3), 5)))
    assert sets[0] == sets[1]


def skip_unless_values(name: str, *workers: int) -> None:
    """Skip a run of by_attribute that has more workers than there are values, which it refuses."""
    if name == "by_attribute" and max(workers) > 10:
        pytest.skip("these rows have 10 classes, each of which goes to one worker")


RATIOS = (4, 2, 1, 1, 3)


@pytest.mark.parametrize("name", [name for name, kind in STRATEGIES.items() if kind.decides_sizes])
def test_a_strategy_that_decides_sizes_refuses_ratios(name: str) -> None:
    request = Request(input="i", output="o", num_workers=2, ratios=(1, 2))
    with pytest.raises(
        UsageError, match=rf"^{name} decides itself how many rows each worker gets: leave out --ratios$"
    ):
        preflight(request, make(name))


@pytest.mark.parametrize("name", only(["stratified"], ["random_iid", "stratified", "distribution_aware", "submodular"]))
def test_every_group_is_dealt_in_the_ratios_asked_for(
    spark: SparkSession, source: Source, tmp_path: Path, name: str
) -> None:
    """Every strategy's groups, whose sizes no ratio divides; also dealt again out of another set."""
    manifest = run(spark, source[0], tmp_path / "o", make(name), 5, ratios=RATIOS)
    assert manifest["ratios"] == list(RATIOS)
    rows = read(tmp_path / "o", manifest)
    owners = rows[rows["copy"] == 0].sort_values("id")
    assert owners.id.tolist() == list(range(2600))
    share = np.array(RATIOS) / sum(RATIOS)
    sizes = owners.groupby("worker").size().to_numpy()
    if name == "random_iid":
        assert stats.chisquare(sizes, share * 2600).pvalue > 1e-3
    else:
        kind = STRATEGIES[name]
        column = "neighbourhood" if "neighbourhood" in rows else "label" if kind.looks_at_labels else None
        groups = [owners] if column is None else [group for _, group in owners.groupby(column)]
        for group in groups:
            held = np.bincount(group.worker, minlength=5)
            assert (np.abs(held - len(group) * share) < 1).all()
        if kind.even_sizes:
            assert (np.abs(sizes - 2600 * share) <= 1).all()
    run(spark, source[0], tmp_path / "even", make(name), 3)
    request = Request(input=str(tmp_path / "even"), output=str(tmp_path / "r"), num_workers=5, ratios=(8, 4, 2, 2, 6))
    assert shas(reshard(spark.sparkContext, request, QUIET).shards.manifest.to_json()) == shas(manifest)


def test_equal_ratios_give_the_set_that_none_give(spark: SparkSession, source: Source, tmp_path: Path) -> None:
    plain = run(spark, source[0], tmp_path / "o", make("stratified"), 4)
    assert run(spark, source[0], tmp_path / "o", make("stratified"), 4, ratios=(2, 2, 2, 2)) == plain
    with pytest.raises(UsageError, match="already holds a committed set"):
        run(spark, source[0], tmp_path / "o", make("stratified"), 4, ratios=(2, 2, 2, 1))


@pytest.mark.parametrize("name", only(["random"], ["random", "random_iid"]))
def test_another_seed_gives_other_shards(spark: SparkSession, source: Source, tmp_path: Path, name: str) -> None:
    first, second = (run(spark, source[0], tmp_path / str(s), make(name, seed=s), 5) for s in (0, 1))
    assert digests(first) != digests(second)


# Resharding deals the stored rows again: that this works with fewer workers, too, is no property of a strategy.
RESHARDED: list[tuple[str, int, int]] = [("stratified", 13, 2), *((name, 4, 7) for name in STRATEGIES)]


@pytest.mark.parametrize(("name", "before", "after"), only([("distribution_aware", 4, 7)], RESHARDED))
def test_resharding_gives_what_the_job_itself_would_write(
    spark: SparkSession, source: Source, tmp_path: Path, name: str, before: int, after: int
) -> None:
    skip_unless_values(name, before, after)
    extra = tmp_path / "eval.bin"
    extra.write_bytes((source[0] / "data_batch_1.bin").read_bytes())
    run(spark, source[0], tmp_path / "n", make(name), before, eval_input=str(extra))
    direct = run(spark, source[0], tmp_path / "m", make(name), after)
    request = Request(input=str(tmp_path / "n"), output=str(tmp_path / "r"), num_workers=after)
    moved = reshard(spark.sparkContext, request, QUIET).shards.manifest.to_json()
    assert shas(moved) == shas(direct)
    assert (moved["strategy"], moved["copies"]) == (direct["strategy"], direct["copies"])
    assert moved["eval"]["rows"] == 867
    if moved["model"]:
        sources = [
            tmp_path / "n" / f["path"]
            for f in open_committed(Store(), str(tmp_path / "n")).manifest.to_json()["model"]["files"]
        ]
        copies = [tmp_path / "r" / f["path"] for f in moved["model"]["files"]]
        assert [p.read_bytes() for p in copies] == [p.read_bytes() for p in sources]


def test_resharding_takes_the_manifests_evaluation_rows(spark: SparkSession, source: Source, tmp_path: Path) -> None:
    options = {"eval_input": str(source[0] / "data_batch_1.bin"), "overwrite": True}
    run(spark, source[0] / "data_batch_2.bin", tmp_path / "n", make("round_robin"), 3, **options)
    (file,) = (tmp_path / "n" / "_eval").iterdir()
    (tmp_path / "n" / "_eval" / "part-00000-leftover.parquet").write_bytes(file.read_bytes())
    request = Request(input=str(tmp_path / "n"), output=str(tmp_path / "r"), num_workers=2)
    assert reshard(spark.sparkContext, request, QUIET).shards.manifest.to_json()["eval"]["rows"] == 867
    file.unlink()
    with pytest.raises(DataError, match="is missing; the set is damaged"):
        reshard(spark.sparkContext, replace(request, num_workers=4), QUIET)


def test_evaluation_rows_that_are_training_rows_are_refused(
    spark: SparkSession, source: Source, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="read the same files"):
        run(spark, source[0], tmp_path / "o", make("random"), 2, eval_input=str(source[0]))


def dealt(piles: list[list[int]], workers: int, *, carry: bool) -> list[list[int]]:
    """Rows by worker, dealt like cards: each pile from worker 0 on or, with carry, from where the last one ended."""
    hands: list[list[int]] = [[] for _ in range(workers)]
    seats = itertools.cycle(range(workers))
    for pile in piles:
        seats = seats if carry else itertools.cycle(range(workers))
        for row in pile:
            hands[next(seats)].append(row)
    return [sorted(hand) for hand in hands]


DEALT = [  # (strategy, its parameters, the column that makes the piles, whether dealing carries on)
    ("round_robin", {}, None, False),
    ("stratified", {}, "label", False),
    ("stratified", {"start": "carry"}, "label", True),
    ("distribution_aware", {"sparse_if": "lt", "components": 40}, "neighbourhood", False),
    ("distribution_aware", {"start": "carry", "components": 40}, "neighbourhood", True),
    ("class_cluster", {}, "neighbourhood", True),
]


@pytest.mark.parametrize(("name", "params", "column", "carry"), DEALT)
def test_rows_are_dealt_like_cards(
    spark: SparkSession, source: Source, tmp_path: Path, name: str, params: Any, column: Any, carry: Any
) -> None:
    manifest = run(spark, source[0], tmp_path / "o", make(name, **params), 7)
    rows = read(tmp_path / "o", manifest)
    owners = rows[rows["copy"] == 0].sort_values("id")
    dense = owners[~owners.id.isin(rows[rows["copy"] > 0].id)]  # what goes to everybody is not dealt
    piles = [dense.id.tolist()] if column is None else [pile.id.tolist() for _, pile in dense.groupby(column)]
    by_worker = [dense[dense.worker == worker].id.tolist() for worker in range(7)]
    assert by_worker == dealt(piles, 7, carry=carry)
    assert (len(dense) < len(owners)) == STRATEGIES[name].copies_rows, "these rows have sparse neighbourhoods"


@pytest.mark.parametrize("name", [name for name in STRATEGIES if STRATEGIES[name].copies_rows])
def test_copies_may_not_more_than_double_the_rows(
    spark: SparkSession, source: Source, tmp_path: Path, name: str
) -> None:
    strategy = make(name)
    remedies = f"fewer workers, {strategy.larger_groups}, or --sparse-if never"
    # With as many workers as rows each group is sparse, so that all rows would go to all workers.
    with pytest.raises(UnsuitableError, match=f"copies add 6,757,400 to 2,600 rows; use {remedies}$"):
        run(spark, source[0], tmp_path / "o", strategy, 2600)
    assert not (tmp_path / "o").exists()
    assert strategy.larger_groups
    # A set has its groups, which the options of reshard cannot change.
    run(spark, source[0], tmp_path / "three", strategy, 3)
    remedies = f"fewer workers, or shard the input again with {strategy.larger_groups} or --sparse-if never"
    with pytest.raises(UnsuitableError, match=f"to 2,600 rows; use {remedies}$"):
        reshard(spark.sparkContext, Request(str(tmp_path / "three"), str(tmp_path / "o"), 2600), QUIET)
    assert not (tmp_path / "o").exists()


def test_a_cell_of_class_cluster_holds_rows_of_one_class(spark: SparkSession, source: Source, tmp_path: Path) -> None:
    manifest = run(spark, source[0], tmp_path / "o", make("class_cluster"), 7)
    rows = read(tmp_path / "o", manifest)
    assert set(rows.groupby("neighbourhood").label.nunique()) == {1}
    assert set(rows.groupby("label").neighbourhood.nunique()) == {3}  # 30 clusters of 10 classes
    ratio = measure(open_committed(Store(), str(tmp_path / "o")))[0].class_mmd_ratio
    assert ratio is not None
    assert ratio < 0.95, "inside classes, too, shards are more even than random ones, whose ratio is 1"


def test_sizes_of_an_independent_draw_a_row_are_binomial() -> None:
    rows, workers, seeds = 600, 4, 400
    ids, zeros = np.arange(rows), np.zeros(rows, np.int64)
    table = group_table(np.array([rows]), workers)
    owners = [Independent(seed).workers(ids, zeros, ids, table) for seed in range(seeds)]
    sizes = np.array([np.bincount(each, minlength=workers) for each in owners])
    assert (sizes.sum(axis=1) == rows).all()
    drawn = stats.binom(rows, 1 / workers)
    edges = [-1, *(int(drawn.ppf(q)) for q in (0.1, 0.25, 0.5, 0.75, 0.9)), rows]
    for worker in range(workers):
        observed = np.histogram(sizes[:, worker], bins=np.array(edges) + 0.5)[0]
        assert stats.chisquare(observed, np.diff(drawn.cdf(edges)) * seeds).pvalue > 1e-3


def test_a_preset_fills_components_and_is_itself_not_recorded() -> None:
    assert DistributionAware().params() == DistributionAware(preset="paper-like").params()
    paper, plain = DistributionAware().params(), DistributionAware(preset="plain").params()
    assert (paper["components"], paper["whiten"]) == (160, True)
    assert (plain["components"], plain["whiten"]) == (0.95, False)
    assert "preset" not in paper
    mixed = DistributionAware(preset="plain", components=20, whiten=True).params()
    assert (mixed["components"], mixed["whiten"]) == (20, True)


@pytest.mark.parametrize("start", only(["carry"], ["zero", "carry"]))
def test_shuffled_class_counts_differ_by_at_most_one(
    spark: SparkSession, source: Source, tmp_path: Path, start: Any
) -> None:
    """In the order of ids the very rows of each worker are known: test_rows_are_dealt_like_cards has them."""
    strategy = Stratified(start=start, shuffle_within_class=True)
    manifest = run(spark, source[0], tmp_path / "o", strategy, 12)
    table = np.array([w["label_histogram"] for w in manifest["workers"]])
    assert (np.ptp(table, axis=0) <= 1).all()
    sizes = table.sum(axis=1)
    assert np.ptp(sizes) <= (1 if start == "carry" else 10)
    if start == "zero":
        assert (np.diff(table, axis=0) <= 0).all(), "low workers get the remainders"


def test_stratified_gives_a_rare_class_to_the_first_workers(spark: SparkSession, tmp_path: Path) -> None:
    labels, images = make_rows(400, classes=3, pixels=192)
    labels[:] = np.where(labels == 2, 1, labels)
    labels[[7, 70, 300]] = 2
    folder = write_binary(tmp_path / "c", labels, images)
    manifest = run(spark, folder, tmp_path / "o", Stratified(), 8)
    assert [w["label_histogram"][2] for w in manifest["workers"]] == [1, 1, 1, 0, 0, 0, 0, 0]


def test_one_cluster_is_round_robin(spark: SparkSession, source: Source, tmp_path: Path) -> None:
    aware = run(spark, source[0], tmp_path / "a", DistributionAware(clusters=1, components=5), 6)
    plain = run(spark, source[0], tmp_path / "b", make("round_robin"), 6)
    owner = [
        read(tmp_path / part, manifest).set_index("id").worker.sort_index()
        for part, manifest in (("a", aware), ("b", plain))
    ]
    assert owner[0].equals(owner[1])


def test_identical_images_make_one_neighbourhood(spark: SparkSession, tmp_path: Path) -> None:
    folder = write_binary(tmp_path / "c", np.arange(64).astype(np.uint8) % 10, np.full((64, 192), 9, np.uint8))
    manifest = run(spark, folder, tmp_path / "o", DistributionAware(components=5), 4)
    assert [n["size"] for n in manifest["neighbourhoods"]] == [64]
    assert manifest["copies"] == 0


def test_when_all_clusters_are_sparse_every_worker_holds_everything(spark: SparkSession, tmp_path: Path) -> None:
    folder = write_binary(tmp_path / "c", *make_rows(12, pixels=192), files=1)
    manifest = run(spark, folder, tmp_path / "o", DistributionAware(clusters=12, components=5, whiten=False), 2)
    assert [w["rows"] for w in manifest["workers"]] == [12, 12]
    assert manifest["copies"] == 12, "the most that is allowed"


def test_the_isolated_images_are_broadcast(spark: SparkSession, source: Source, tmp_path: Path) -> None:
    manifest = run(spark, source[0], tmp_path / "o", DistributionAware(clusters=40, components=40), 12)
    rows = read(tmp_path / "o", manifest)
    assert {17, 400, 2599} <= set(rows[rows["copy"] > 0].id)


def test_more_workers_than_rows_need_allowed_empty_shards(spark: SparkSession, tmp_path: Path) -> None:
    folder = write_binary(tmp_path / "c", *make_rows(5, pixels=192), files=1)
    with pytest.raises(UsageError, match="--workers 6 is more than the 5 rows"):
        run(spark, folder, tmp_path / "o", make("round_robin"), 6)
    assert not (tmp_path / "o").exists()
    manifest = run(spark, folder, tmp_path / "o", make("round_robin"), 6, allow_empty=True)
    assert [w["rows"] for w in manifest["workers"]] == [1] * 5 + [0]


def test_a_worker_without_rows_is_refused_without_leftovers(spark: SparkSession, tmp_path: Path) -> None:
    folder = write_binary(tmp_path / "c", *make_rows(60, pixels=192), files=1)
    with pytest.raises(UsageError, match="would get no rows"):
        run(spark, folder, tmp_path / "o", Stratified(), 40)
    assert not (tmp_path / "o").exists()


def test_files_are_plain_parquet_with_the_contracts_columns(
    spark: SparkSession, source: Source, tmp_path: Path
) -> None:
    from pyspark.sql import functions as F

    manifest = run(spark, source[0], tmp_path / "o", make("hash"), 1)
    path = tmp_path / "o" / manifest["workers"][0]["files"][0]["path"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == manifest["workers"][0]["files"][0]["sha256"]
    schema = pq.read_schema(path)
    assert [(f.name, str(f.type)) for f in schema] == [
        ("id", "int64"), ("label", "int32"), ("image", "binary"), ("copy", "int32"), ("neighbourhood", "int32"),
    ]  # fmt: skip
    assert schema.field("image").metadata[b"shape"] == b"[3, 8, 8]"
    metadata = pq.read_metadata(path)
    sizes = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
    assert len(sizes) > 1
    assert all(500 <= size <= 1500 for size in sizes)
    # Spark, with nothing of ours
    table = spark.read.option("pathGlobFilter", "*.parquet").parquet(str(tmp_path / "o"))
    assert json.loads(table.schema["image"].metadata["shape"]) == [3, 8, 8]
    assert table.filter(F.col("copy") == 0).count() == 2600
    assert {row.worker for row in table.select("worker").distinct().collect()} == {0}
    # pandas
    assert len(pd.read_parquet(tmp_path / "o" / "worker=000")) == manifest["workers"][0]["rows"]


def test_real_cifar10_comes_out_as_the_papers_say(spark: SparkSession, cifar10: Path, tmp_path: Path) -> None:
    """Stratified sizes of every class's remainder at low workers; scikit-learn's clusters; unwhitened, nothing is sparse."""

    def shards(name: str, strategy: Any) -> dict[str, Any]:
        request = Request(input=str(cifar10), output=str(tmp_path / name), num_workers=12)
        return shard(spark.sparkContext, request, strategy, QUIET).shards.manifest.to_json()

    stratified = shards("s", Stratified())
    assert [w["rows"] for w in stratified["workers"]] == [4170] * 8 + [4160] * 4
    aware = shards("d", DistributionAware(clusters=20, components=50, whiten=False))
    assert aware["copies"] == 0
    assert min(n["size"] for n in aware["neighbourhoods"]) > 1000
    records = [np.fromfile(path, np.uint8).reshape(-1, 3073) for path in sorted(cifar10.glob("data_batch_*.bin"))]
    images = np.concatenate(records)[:, 1:].astype(np.float64)
    points = PCA(50, svd_solver="covariance_eigh").fit_transform(images)
    reference = KMeans(20, n_init=2, max_iter=150, random_state=0).fit(points)
    assert aware["params"]["inertia"] <= 1.05 * reference.inertia_
