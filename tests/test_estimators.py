"""BlockPCA and BlockKMeans as spark.ml stages: against stock spark.ml and scikit-learn, and whatever the partitioning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.clustering import KMeans
from pyspark.ml.evaluation import ClusteringEvaluator
from pyspark.ml.feature import PCA
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sklearn.decomposition import PCA as ReferencePCA
from sklearn.metrics import adjusted_rand_score

from pipeline.clustering import fit as fit_module
from pipeline.clustering import kmeans as kmeans_module
from pipeline.clustering.columns import matrix_to_vector
from pipeline.clustering.fit import fit_here, settling_limit
from pipeline.clustering.kmeans import BlockKMeans, BlockKMeansModel
from pipeline.clustering.kmeans_by_class import KMeansByClassModel
from pipeline.clustering.lloyd import KMeansSettings
from pipeline.clustering.pca import BlockPCA, BlockPCAModel
from pipeline.clustering.points import Points
from pipeline.errors import DataError, UsageError
from pipeline.spark.images import Images
from tests.conftest import make_rows, write_binary
from tests.test_dataset import discovered
from tests.test_strategies import make, read, run

PIXELS = 192
Rows = tuple[np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return make_rows(1500, classes=4, seed=2, pixels=PIXELS)


@pytest.fixture(scope="module")
def table(spark: SparkSession, rows: Rows, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    folder = write_binary(tmp_path_factory.mktemp("est") / "c", *rows)
    dataset = discovered(folder, shape=(3, 8, 8), format="cifar10-binary")
    return Images(spark.sparkContext, dataset).frame().cache()


def test_the_frame_has_ids_labels_and_images_with_their_shape(table: DataFrame, rows: Rows) -> None:
    taken = table.orderBy("id").toPandas()
    assert taken.id.tolist() == list(range(1500))
    assert np.array_equal(taken.label, rows[0])
    assert b"".join(taken.image) == rows[1].tobytes()
    assert table.schema["image"].metadata == {"shape": "[3, 8, 8]", "dtype": "uint8", "layout": "CHW"}


def test_components_span_what_stock_spark_and_scikit_learn_find(table: DataFrame, rows: Rows) -> None:
    model = BlockPCA(components=8).fit(table)
    reference = ReferencePCA(8, svd_solver="covariance_eigh").fit(rows[1].astype(float))
    stock = PCA(k=8, inputCol="pixels", outputCol="out").fit(_pixels(table))
    for theirs in (reference.components_, stock.pc.toArray().T):
        cosines = np.linalg.svd(model.spectrum.components @ theirs.T, compute_uv=False)
        np.testing.assert_allclose(cosines, 1, atol=1e-6)
    np.testing.assert_allclose(model.explained_variance_ratio, reference.explained_variance_ratio_, rtol=1e-8)
    np.testing.assert_allclose(model.explained_variance_ratio, stock.explainedVariance.toArray(), rtol=1e-6)
    np.testing.assert_allclose(model.mean, rows[1].mean(axis=0))


def _pixels(table: DataFrame) -> DataFrame:
    return table.select("id", matrix_to_vector(lambda images: images, F.col("image")).alias("pixels"))


def test_the_transform_is_the_projection_of_the_raw_pixels(table: DataFrame, rows: Rows) -> None:
    model = BlockPCA(components=8).fit(table)
    found_points = np.stack([r.point.toArray() for r in model.transform(table).orderBy("id").select("point").collect()])
    expected = rows[1].astype(float) @ model.spectrum.components.T
    np.testing.assert_allclose(found_points, expected, atol=2.0**-model.projection.exponent)


def test_whitening_gives_every_component_unit_variance(table: DataFrame) -> None:
    model = BlockPCA(components=6, whiten=True).fit(table)
    points = np.stack([r.point.toArray() for r in model.transform(table).select("point").collect()])
    np.testing.assert_allclose(points.std(axis=0, ddof=1), 1, rtol=1e-3)


def test_both_fits_give_the_same_bits_for_any_partitioning_planned_ahead_or_adaptively(
    spark: SparkSession, table: DataFrame, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: spark.conf.unset("spark.sql.adaptive.enabled"))
    models = []
    for parts, adaptive in ((1, "true"), (7, "false"), (31, "true")):
        spark.conf.set("spark.sql.adaptive.enabled", adaptive)
        pipeline = Pipeline(stages=[BlockPCA(components=6), BlockKMeans(k=7, seed=1)])
        models.append(pipeline.fit(table.repartition(parts)))
    first_pca, first_kmeans = models[0].stages
    for pca, kmeans in (model.stages for model in models[1:]):
        assert np.array_equal(pca.projection.weights, first_pca.projection.weights)
        assert np.array_equal(kmeans.fitted.centres, first_kmeans.fitted.centres)
        assert kmeans.fitted.inertia == first_kmeans.fitted.inertia


def test_one_task_and_one_job_an_iteration_give_the_same_bits(
    table: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = BlockPCA(components=6).fit(table).transform(table).cache()
    here = BlockKMeans(k=7, seed=1, nInit=2).fit(points)
    monkeypatch.setattr(kmeans_module, "ONE_TASK_BYTES", 0)
    spread = BlockKMeans(k=7, seed=1, nInit=2).fit(points.repartition(3))
    assert np.array_equal(here.fitted.centres, spread.fitted.centres)
    assert here.fitted.inertia == spread.fitted.inertia


def test_clusters_match_stock_spark(table: DataFrame) -> None:
    points = BlockPCA(components=6).fit(table).transform(table).cache()
    ours = BlockKMeans(k=12, seed=3, nInit=3).fit(points)
    fits = [KMeans(k=12, seed=s, maxIter=100, featuresCol="point", predictionCol="stock").fit(points) for s in range(4)]
    stock = min(fits, key=lambda fit: fit.summary.trainingCost)
    assert ours.trainingCost <= 1.05 * stock.summary.trainingCost
    both = stock.transform(ours.transform(points)).select("neighbourhood", "stock", "point").cache()
    pairs = both.toPandas()
    assert adjusted_rand_score(pairs.neighbourhood, pairs.stock) > 0.9
    centres = np.array(ours.clusterCenters())
    vectors = np.stack([v.toArray() for v in pairs.point])
    cost = ((vectors - centres[pairs.neighbourhood]) ** 2).sum()
    assert ours.trainingCost == pytest.approx(cost, rel=1e-4)
    score = ClusteringEvaluator(featuresCol="point", predictionCol="neighbourhood").evaluate(both)
    assert score > 0.5


def test_models_and_pipelines_survive_saving_and_loading(table: DataFrame, tmp_path: Path) -> None:
    model = Pipeline(stages=[BlockPCA(components=6, whiten=True), BlockKMeans(k=5)]).fit(table)
    model.write().overwrite().save(f"file://{tmp_path}/pipeline")
    loaded = PipelineModel.load(f"file://{tmp_path}/pipeline")
    expected = [r.neighbourhood for r in model.transform(table).orderBy("id").collect()]
    assert [r.neighbourhood for r in loaded.transform(table).orderBy("id").collect()] == expected
    assert loaded.stages[0].getOrDefault("whiten") is True
    assert loaded.stages[1].fitted.sizes.tolist() == np.bincount(expected).tolist()
    estimator = BlockKMeans(k=9, tol=0.5)
    estimator.save(f"file://{tmp_path}/estimator")
    assert BlockKMeans.load(f"file://{tmp_path}/estimator").getOrDefault("k") == 9


def test_a_path_without_a_scheme_is_local_for_saving_and_loading_whatever_the_default_file_system(
    spark: SparkSession, table: DataFrame, tmp_path: Path
) -> None:
    model = BlockPCA(components=3).fit(table)
    java = spark.sparkContext._jsc.hadoopConfiguration()  # type: ignore[attr-defined, unused-ignore]
    before = java.get("fs.defaultFS")
    java.set("fs.defaultFS", "hdfs://127.0.0.1:1")  # where nobody listens
    try:
        model.save(str(tmp_path / "model"))
        loaded = BlockPCAModel.load(str(tmp_path / "model"))
    finally:
        java.set("fs.defaultFS", before)
    assert np.array_equal(loaded.spectrum.components, model.spectrum.components)
    assert loaded.uid == model.uid
    with pytest.raises(DataError, match="holds no saved model"):
        BlockPCAModel.load(str(tmp_path / "nowhere"))


def test_the_models_beside_the_shards_load_and_predict_what_was_written(
    spark: SparkSession, rows: Rows, table: DataFrame, tmp_path: Path
) -> None:
    folder = write_binary(tmp_path / "c", *rows)
    manifest = run(spark, folder, tmp_path / "o", make("distribution_aware"), 3)
    pca = BlockPCAModel.load(f"file://{tmp_path}/o/_model/{manifest['generation']}/pca")
    kmeans = BlockKMeansModel.load(f"file://{tmp_path}/o/_model/{manifest['generation']}/kmeans")
    written = read(tmp_path / "o", manifest)
    written = written[written["copy"] == 0].set_index("id").neighbourhood.sort_index()
    predicted = [r.neighbourhood for r in kmeans.transform(pca.transform(table)).orderBy("id").collect()]
    assert predicted == written.tolist()


def test_the_model_of_all_classes_beside_the_shards_loads_and_predicts_what_was_written(
    spark: SparkSession, rows: Rows, table: DataFrame, tmp_path: Path
) -> None:
    folder = write_binary(tmp_path / "c", *rows)
    manifest = run(spark, folder, tmp_path / "o", make("class_cluster"), 3)
    assert len(manifest["model"]["files"]) == 6  # three of the PCA, three of all classes
    models = f"file://{tmp_path}/o/_model/{manifest['generation']}"
    kmeans = KMeansByClassModel.load(f"{models}/kmeans")
    written = read(tmp_path / "o", manifest).set_index("id").neighbourhood.sort_index()
    predicted = kmeans.transform(BlockPCAModel.load(f"{models}/pca").transform(table)).orderBy("id").collect()
    assert [r.neighbourhood for r in predicted] == written.tolist()
    assert sum(fit.sizes.sum() for fit in kmeans.fits.values()) == len(written)


@pytest.mark.parametrize("components", [0, -1, 2.5])
def test_senseless_numbers_of_components_are_refused(table: DataFrame, components: float) -> None:
    with pytest.raises(UsageError, match="components"):
        BlockPCA(components=components).fit(table)


def test_arrays_of_numbers_cluster_too(spark: SparkSession) -> None:
    rng = np.random.default_rng(0)
    data = [(i, [float(v) for v in rng.normal(5 * (i % 3), 0.1, 2)]) for i in range(300)]
    points = spark.createDataFrame(data, "id long, v array<double>").withColumn("point", array_to_vector("v"))
    model = BlockKMeans(k=3).fit(points)
    assert model.fitted.sizes.tolist() == [100, 100, 100]
    assert sorted(round(c[0]) for c in model.clusterCenters()) == [0, 5, 10]


def test_many_rows_settle_on_the_same_sample_in_tasks_as_in_one_process(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_module, "MANY_ROWS", 20_000)
    monkeypatch.setattr(fit_module, "SETTLING_ROWS", 8_000)
    monkeypatch.setattr(kmeans_module, "ONE_TASK_BYTES", 0)
    points = (np.random.default_rng(8).normal(size=(24_000, 6)) * 30_000).astype(np.int32)
    ids = np.arange(len(points))
    settled: list[int] = []

    def limit(count: int) -> int:
        settled.append(count)
        return settling_limit(count)

    monkeypatch.setattr(kmeans_module, "settling_limit", limit)
    here = fit_here(ids, points, KMeansSettings(12, 20, 1e-4, 0))
    for parts in (1, 7):
        split = [Points(rows, points[rows]) for rows in np.array_split(ids, parts)[::-1]]
        spread = spark.sparkContext.parallelize(split, parts)
        model = BlockKMeans(k=12, maxIter=20).fit_points(spread, 0, values=points.size)
        assert np.array_equal(model.fitted.centres, here.centres)
    assert settled == [24_000, 24_000]
