"""The engines of neighbourhoods beside scikit-learn, beside each other, and as resharded and reported sets."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession
from sklearn.cluster import DBSCAN, KMeans
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score

from pipeline.clustering.kmeans import BlockKMeansModel
from pipeline.clustering.pca import BlockPCAModel
from pipeline.core.errors import UsageError
from pipeline.core.shardset.manifest import open_committed
from pipeline.core.storage.store import Store
from pipeline.input.read_options import ReadOptions
from pipeline.runs.request import Request
from pipeline.runs.reshard import reshard
from pipeline.runs.shard import shard
from pipeline.strategies.distribution_aware import DistributionAware
from pipeline.strategies.engines import ENGINES, load_engine
from pipeline.strategies.engines.scikit_learn import Balls, describe_model, fit_pipeline
from tests.conftest import write_binary
from tests.support.sharding_runs import QUIET, make, read, run, shas, vectors_in_parquet
from tests.support.tiers import only

ROWS = 600
OTHERS = [name for name in ENGINES if name != "block"]
FEW = {"clusters": 6, "components": 8, "whiten": False}
Source = tuple[Path, np.ndarray[Any, Any], np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Images around six patterns that nobody can miss, and the pattern of each row, two of every class."""
    rng = np.random.default_rng(3)
    patterns = rng.integers(40, 215, (6, 192))
    truth = rng.integers(0, 6, ROWS)
    images = np.clip(patterns[truth] + rng.normal(0, 5, (ROWS, 192)), 0, 255).astype(np.uint8)
    labels = (truth // 2).astype(np.uint8)
    return write_binary(tmp_path_factory.mktemp("engines") / "in", labels, images, files=2), truth, images


def neighbourhoods(output: Path, manifest: Any) -> np.ndarray[Any, Any]:
    rows = read(output, manifest)
    numbers: np.ndarray[Any, Any] = rows[rows["copy"] == 0].sort_values("id").neighbourhood.to_numpy()
    return numbers


@pytest.fixture(scope="module")
def make_set(spark: SparkSession, source: Source, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that shards over three workers with an engine, each configuration once, and returns the folder."""

    @cache
    def shard_once(engine: str, whiten: bool) -> Path:
        output = tmp_path_factory.mktemp("three") / "o"
        run(spark, source[0], output, make("distribution_aware", engine=engine, **FEW | {"whiten": whiten}), 3)
        return output

    return shard_once


# spark.ml fits each class in jobs of its own, several seconds long: the definitions below do that once, for mixtures.
PAIRS = [(name, engine) for name in ("distribution_aware", "class_cluster") for engine in ENGINES]
FAST = [pair for pair in PAIRS if pair != ("class_cluster", "spark-ml")]


@pytest.mark.parametrize(("name", "engine"), only([], FAST))
def test_every_engine_finds_the_patterns(
    spark: SparkSession, source: Source, tmp_path: Path, name: str, engine: str
) -> None:
    """A share of the variance, whitened components and several starts, over all rows or inside each class."""
    folder, truth, _ = source
    options = {"clusters": 6, "components": 0.97, "whiten": True, "n_init": 2}
    manifest = run(spark, folder, tmp_path / "o", make(name, engine=engine, **options), 3)
    found = neighbourhoods(tmp_path / "o", manifest)
    assert adjusted_rand_score(truth, found) == 1
    params = manifest["params"]
    assert (params["engine"], params["n_init"], params["rows_fitted"]) == (engine, 2, ROWS)
    assert (params["components_fitted"], 0.97 <= params["explained_variance"] < 1) == (5, True)
    # The centres of spark.ml depend on the number of partitions, which no cluster may change.
    assert params.get("partitions") == (16 if engine == "spark-ml" else None)
    sizes = [each["size"] for each in manifest["neighbourhoods"]]
    assert name == "class_cluster" or sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("engine", "whiten"),
    only([("scikit-learn", True)], [("scikit-learn", False), *((name, True) for name in OTHERS)]),
)
def test_inertia_and_variance_are_scikit_learns(
    spark: SparkSession, source: Source, make_set: Callable[..., Path], engine: str, whiten: bool
) -> None:
    images, output = source[2], make_set(engine, whiten)
    shards = open_committed(Store(), str(output))
    manifest = shards.manifest.to_json()
    reference = PCA(8, whiten=whiten, svd_solver="full").fit(images.astype(np.float64))
    points = reference.transform(images.astype(np.float64))
    best = KMeans(6, n_init=5, random_state=1).fit(points)
    params = manifest["params"]
    assert params["explained_variance"] == pytest.approx(reference.explained_variance_ratio_.sum(), abs=1e-5)
    assert 0.999 * best.inertia_ <= params["inertia"] <= (1.05 if engine == "scikit-learn" else 1.6) * best.inertia_
    # The saved models, on a grid of integers, agree with what the engine itself has assigned.
    folders = {path.split("/")[2]: f"{shards.uri}/{path}" for path in shards.manifest.model or () if "arrays" in path}
    pca = BlockPCAModel.load(str(Path(folders["pca"]).parent))
    kmeans = BlockKMeansModel.load(str(Path(folders["kmeans"]).parent))
    rows = read(output, manifest)
    table = spark.createDataFrame(rows[rows["copy"] == 0][["id", "image", "neighbourhood"]])
    model = kmeans.setFeaturesCol("point").setPredictionCol("predicted")
    assert model.transform(pca.transform(table)).where("predicted != neighbourhood").count() == 0


# The default tier's run of spark.ml: without principal components it is the shortest.
@pytest.mark.parametrize("engine", only(["spark-ml"], OTHERS))
def test_vectors_are_clustered_as_they_are(spark: SparkSession, tmp_path: Path, engine: str) -> None:
    rng = np.random.default_rng(5)
    truth = rng.integers(0, 4, ROWS)
    vectors = rng.normal(0, 0.3, (ROWS, 5)) + 10 * rng.normal(size=(4, 5))[truth]
    folder = vectors_in_parquet(tmp_path / "in", vectors, np.arange(ROWS) % 2)
    request = {"clusters": 4, "embedding": "v", "engine": engine, "n_init": 1 if engine == "spark-ml" else 3}
    for name, found_in in (("distribution_aware", 1), ("class_cluster", 2))[: 1 if engine == "spark-ml" else 2]:
        where = tmp_path / name
        strategy = make(name, **request | {"clusters": 4 * found_in})
        options = Request(
            input=str(folder), output=str(where), num_workers=3, read_options=ReadOptions(shape=(3, 2, 2))
        )
        manifest = shard(spark.sparkContext, options, strategy, QUIET).shards.manifest.to_json()
        found = neighbourhoods(where, manifest)
        for part in range(found_in):
            mine = np.arange(ROWS) % found_in == part
            assert adjusted_rand_score(truth[mine], found[mine]) == 1
        assert manifest["params"]["components_fitted"] == 5


def test_scikit_learn_fits_to_a_sample_and_assigns_every_row(
    spark: SparkSession, source: Source, tmp_path: Path
) -> None:
    folder, truth, _ = source
    strategy = make("distribution_aware", engine="scikit-learn", fit_rows=200, n_init=3, **FEW)
    manifest = run(spark, folder, tmp_path / "o", strategy, 3)
    assert adjusted_rand_score(truth, neighbourhoods(tmp_path / "o", manifest)) == 1
    assert 140 < manifest["params"]["rows_fitted"] < 260


DEFINITIONS = [
    ("class_cluster", "scikit-learn", "dbscan"),
    ("distribution_aware", "scikit-learn", "gaussian-mixture"),
]


@pytest.mark.parametrize(("name", "engine", "clustering"), only(DEFINITIONS[:1], DEFINITIONS))
def test_other_definitions_find_the_patterns(
    spark: SparkSession, source: Source, tmp_path: Path, name: str, engine: str, clustering: str
) -> None:
    folder, truth, _ = source
    options: dict[str, Any] = {"components": 5, "whiten": False, "engine": engine, "clustering": clustering}
    number = {"clusters": 6, "n_init": 1 if engine == "spark-ml" else 3}
    options |= {"clusters": None, "radius": 120.0} if clustering == "dbscan" else number
    manifest = run(spark, folder, tmp_path / "o", make(name, **options), 3)
    # spark.ml starts a mixture at random rows, which leaves some patterns in one component: 0.69 here.
    least = 0.6 if engine == "spark-ml" else 0.99
    assert adjusted_rand_score(truth, neighbourhoods(tmp_path / "o", manifest)) > least
    assert manifest["params"]["clustering"] == clustering
    assert "kmeans" not in {path["path"].split("/")[2] for path in manifest["model"]["files"]}


def test_balls_of_dbscan_are_scikit_learns() -> None:
    """Equal on core rows and noise; other rows may be in another ball. A distant row is noise."""
    points = np.random.default_rng(2).normal(size=(300, 2))
    balls = Balls(0.25, 4).fit(points)
    reference = DBSCAN(eps=0.25, min_samples=4).fit(points)
    cores = reference.core_sample_indices_
    assert balls.labels_[cores].tolist() == reference.labels_[cores].tolist()
    assert (balls.labels_ == balls.clusters).tolist() == (reference.labels_ == -1).tolist()
    assert balls.predict(np.array([[90.0, 90.0]])).tolist() == [balls.clusters]
    assert Balls(1e-9, 4).fit(points).labels_.tolist() == [0] * 300
    assert describe_model(Balls(99.0, 4).fit(points), 0.0).sizes.tolist() == [300, 0]


@pytest.mark.parametrize("clustering", ["kmeans", "gaussian-mixture", "dbscan"])
def test_a_class_of_a_single_row_is_its_own_neighbourhood(clustering: str) -> None:
    """The seed is larger than those that scikit-learn takes."""
    clusters = None if clustering == "dbscan" else 4
    strategy = make(
        "class_cluster", engine="scikit-learn", clustering=clustering, seed=(1 << 63) - 1, clusters=clusters
    )
    rows = np.random.default_rng(2).normal(size=(21, 3))
    parts = np.repeat([0, 1], [20, 1])
    pipeline = fit_pipeline(strategy, 2, rows, parts, pixels=False)
    fits = {label: describe_model(model, 0.0) for label, model in pipeline.models.items()}
    assert fits[1].sizes[0] == 1
    groups = pipeline.groups({0: np.arange(9), 1: np.arange(9) + 9}, rows, parts)
    assert groups[20] == 9


def test_a_class_of_a_single_row_is_too_small_for_spark_ml() -> None:
    counts = np.array([[9, 0, 1], [8, 0, 0]])
    context: Any = SimpleNamespace(scan=SimpleNamespace(label_counts=counts))
    line = "^--engine spark-ml cannot cluster class 2, which has a single row: use --engine block or scikit-learn, or"
    with pytest.raises(UsageError, match=line):
        load_engine("spark-ml").cluster(context, make("class_cluster", engine="spark-ml"), 2, by_class=True)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"clustering": "dbscan"}, "--engine block has no --clustering dbscan; use --engine scikit-learn"),
        (
            {"clustering": "gaussian-mixture"},
            "--engine block has no --clustering gaussian-mixture; use --engine scikit",
        ),
        ({"radius": 2.0}, "--clustering kmeans has no radius; leave out --radius 2"),
        ({"min_neighbours": 20}, "--clustering kmeans has no cores; leave out --min-neighbours 20"),
        (
            {"clustering": "dbscan", "engine": "scikit-learn", "clusters": 5},
            "--clustering dbscan finds the number of clusters by itself; leave out --clusters 5",
        ),
    ],
)
def test_options_that_a_clustering_lacks_are_one_line(options: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=f"^{line}"):
        DistributionAware(**options)


@pytest.mark.parametrize("engine", only(["scikit-learn"], OTHERS))
def test_resharding_fits_nothing_again(
    spark: SparkSession, source: Source, make_set: Callable[..., Path], tmp_path: Path, engine: str
) -> None:
    strategy = make("distribution_aware", engine=engine, **FEW | {"whiten": True})
    direct = run(spark, source[0], tmp_path / "m", strategy, 5)
    request = Request(input=str(make_set(engine, True)), output=str(tmp_path / "r"), num_workers=5)
    assert shas(reshard(spark.sparkContext, request, QUIET).shards.manifest.to_json()) == shas(direct)


def test_rows_that_do_not_fit_one_machine_are_one_line(spark: SparkSession, source: Source, tmp_path: Path) -> None:
    strategy = make("distribution_aware", engine="scikit-learn", task_memory_gb=0.0015, **FEW)
    line = (
        r"^--engine scikit-learn holds 600 rows in one task, 0\.00 GB, more than --task-memory-gb 0\.0015: fit to a sample"
        r" by --fit-rows 400, raise --task-memory-gb, or use --engine block$"
    )
    with pytest.raises(UsageError, match=line):
        run(spark, source[0], tmp_path / "o", strategy, 3)
    assert not (tmp_path / "o").exists()


def test_one_cluster_of_spark_ml_is_one_line(spark: SparkSession, source: Source, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"^--engine spark-ml finds at least 2 neighbourhoods, got 1: give more --clust"
    ):
        run(spark, source[0], tmp_path / "o", make("distribution_aware", engine="spark-ml", **FEW | {"clusters": 1}), 3)
    assert not (tmp_path / "o").exists()


def test_sets_of_an_older_class_cluster_are_still_current() -> None:
    now = make("class_cluster")
    assert {"engine", "n_init"} <= set(now.params())
    assert not {"engine", "n_init", "clustering"} & set(now.identity())
    assert make("class_cluster", engine="spark-ml").identity()["engine"] == "spark-ml"
    assert make("distribution_aware").identity()["engine"] == "block"
