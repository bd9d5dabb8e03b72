"""BlockPCA and BlockKMeans as spark.ml stages: against stock spark.ml and scikit-learn, and whatever the partitioning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pyspark.errors import PySparkException
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.clustering import KMeans
from pyspark.ml.evaluation import ClusteringEvaluator
from pyspark.ml.feature import PCA
from pyspark.ml.functions import array_to_vector
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sklearn.decomposition import PCA as ReferencePCA
from sklearn.metrics import adjusted_rand_score

from pipeline.clustering import fit as fit_module
from pipeline.clustering import kmeans as kmeans_module
from pipeline.clustering.columns import matrix_to_vector
from pipeline.clustering.fit import fit_in_process, refinement_limit
from pipeline.clustering.kmeans import BlockKMeans, BlockKMeansModel
from pipeline.clustering.kmeans_by_class import KMeansByClassModel
from pipeline.clustering.lloyd import KMeansSettings
from pipeline.clustering.pca import BlockPCA, BlockPCAModel
from pipeline.clustering.points import Points
from pipeline.core.errors import DataError, UsageError
from pipeline.spark.images import Images
from tests.conftest import make_rows, write_binary
from tests.support.sharding_runs import make, read, run
from tests.support.tiers import only
from tests.unit.test_dataset import discovered

PIXELS = 192
Rows = tuple[np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return make_rows(1500, classes=4, seed=2, pixels=PIXELS)


@pytest.fixture(scope="module")
def table(spark: SparkSession, rows: Rows, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    folder = write_binary(tmp_path_factory.mktemp("est") / "c", *rows)
    dataset = discovered(folder, format="cifar10-binary", shape=(3, 8, 8))
    return Images(spark.sparkContext, dataset).frame().cache()


@pytest.fixture(scope="module")
def pca(table: DataFrame) -> BlockPCAModel:
    """Fit eight components of the table."""
    return BlockPCA(components=8).fit(table)


def test_the_frame_has_ids_labels_and_images_with_their_shape(table: DataFrame, rows: Rows) -> None:
    taken = table.orderBy("id").toPandas()
    assert taken.id.tolist() == list(range(1500))
    assert np.array_equal(taken.label, rows[0])
    assert b"".join(taken.image) == rows[1].tobytes()
    assert table.schema["image"].metadata == {"shape": "[3, 8, 8]", "dtype": "uint8", "layout": "CHW"}


def test_components_span_what_stock_spark_and_scikit_learn_find(
    table: DataFrame, rows: Rows, pca: BlockPCAModel
) -> None:
    model = pca
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


def test_the_transform_is_the_projection_of_the_raw_pixels(table: DataFrame, rows: Rows, pca: BlockPCAModel) -> None:
    model = pca
    found_points = np.stack([r.point.toArray() for r in model.transform(table).orderBy("id").select("point").collect()])
    expected = rows[1].astype(float) @ model.spectrum.components.T
    np.testing.assert_allclose(found_points, expected, atol=2.0**-model.projection.exponent)


def test_whitening_gives_every_component_unit_variance(table: DataFrame) -> None:
    model = BlockPCA(components=6, whiten=True).fit(table)
    points = np.stack([r.point.toArray() for r in model.transform(table).select("point").collect()])
    np.testing.assert_allclose(points.std(axis=0, ddof=1), 1, rtol=1e-3)


@pytest.mark.full
def test_both_fits_give_the_same_bits_for_any_partitioning(
    spark: SparkSession, table: DataFrame, request: pytest.FixtureRequest
) -> None:
    """Both fits give the same bits for any partitioning planned ahead or adaptively."""
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


@pytest.mark.full
def test_one_task_and_one_job_an_iteration_give_the_same_bits(
    table: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = BlockPCA(components=6).fit(table).transform(table).cache()
    here = BlockKMeans(k=7, seed=1, nInit=2).fit(points)
    monkeypatch.setattr(kmeans_module, "ONE_TASK_BYTES", 0)
    spread = BlockKMeans(k=7, seed=1, nInit=2).fit(points.repartition(3))
    assert np.array_equal(here.fitted.centres, spread.fitted.centres)
    assert here.fitted.inertia == spread.fitted.inertia


@pytest.mark.full
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


@pytest.mark.full
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


def test_saving_and_loading_take_a_plain_path_as_local(spark: SparkSession, table: DataFrame, tmp_path: Path) -> None:
    """A path without a scheme is local for saving and loading whatever the default file system."""
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


def test_a_saved_model_is_replaced_only_by_overwrite(table: DataFrame, tmp_path: Path) -> None:
    first, second = (BlockPCA(components=number).fit(table) for number in (2, 3))
    first.save(str(tmp_path / "model"))
    with pytest.raises(UsageError, match=r"model holds files; .*overwrite\(\)"):
        second.save(str(tmp_path / "model"))
    assert BlockPCAModel.load(str(tmp_path / "model")).uid == first.uid
    second.write().overwrite().save(str(tmp_path / "model"))
    assert BlockPCAModel.load(str(tmp_path / "model")).uid == second.uid


def test_models_beside_the_shards_predict_the_written_groups(
    spark: SparkSession, rows: Rows, table: DataFrame, tmp_path: Path
) -> None:
    """The models beside the shards load and predict what was written."""
    folder = write_binary(tmp_path / "c", *rows)
    manifest = run(spark, folder, tmp_path / "o", make("distribution_aware"), 3)
    pca = BlockPCAModel.load(f"file://{tmp_path}/o/_model/{manifest['generation']}/pca")
    kmeans = BlockKMeansModel.load(f"file://{tmp_path}/o/_model/{manifest['generation']}/kmeans")
    written = read(tmp_path / "o", manifest)
    written = written[written["copy"] == 0].set_index("id").neighbourhood.sort_index()
    predicted = [r.neighbourhood for r in kmeans.transform(pca.transform(table)).orderBy("id").collect()]
    assert predicted == written.tolist()


def test_the_model_of_all_classes_predicts_the_written_groups(
    spark: SparkSession, rows: Rows, table: DataFrame, tmp_path: Path
) -> None:
    """The model of all classes beside the shards loads and predicts what was written."""
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


@pytest.fixture(scope="module")
def few(spark: SparkSession, rows: Rows) -> DataFrame:
    """The first rows as bytes, as an array and as a vector."""
    data = [(at, bytearray(image.tobytes()), image.tolist()) for at, image in enumerate(rows[1][:400])]
    frame = spark.createDataFrame(data, "id int, bytes binary, array array<int>")
    return frame.withColumn("vector", array_to_vector(F.col("array").cast("array<double>"))).cache()


@pytest.mark.parametrize("column", only(["array"], ["array", "vector"]))
def test_pixels_may_stand_in_arrays_and_vectors_too(few: DataFrame, column: str) -> None:
    as_bytes, other = (BlockPCA(components=5, inputCol=name).fit(few) for name in ("bytes", column))
    assert np.array_equal(other.spectrum.components, as_bytes.spectrum.components)
    both = [model.transform(few).orderBy("id").collect() for model in (as_bytes, other)]
    assert [row.point for row in both[0]] == [row.point for row in both[1]]
    fits = [BlockKMeans(k=4, featuresCol=name).fit(few) for name in ("bytes", column)]
    assert np.array_equal(fits[0].fitted.centres, fits[1].fitted.centres)
    both = [fits[0].transform(few).collect(), fits[1].transform(few).collect()]
    assert [row.neighbourhood for row in both[0]] == [row.neighbourhood for row in both[1]]


def test_numbers_that_are_no_pixels_are_refused(spark: SparkSession) -> None:
    table = spark.createDataFrame([([0.0, 255.0],), ([0.5, 3.0],)], "image array<double>")
    with pytest.raises(PySparkException, match=r"numbers that are not pixels, whole and in 0\.\.255"):
        BlockPCA(components=1).fit(table)


@pytest.mark.full
def test_without_ids_any_partitioning_gives_the_same_bits(few: DataFrame) -> None:
    """Without ids the rows themselves tell and the bits hold for any partitioning."""
    points = BlockPCA(components=6, inputCol="bytes").fit(few).transform(few).select("point").cache()
    doubled = points.union(points)
    here = BlockKMeans(k=7, seed=1).fit(doubled.coalesce(1))
    spread = BlockKMeans(k=7, seed=1).fit(doubled.repartition(5))
    assert np.array_equal(here.fitted.centres, spread.fitted.centres)
    assert here.fitted.sizes.sum() == 800
    assert (here.fitted.sizes % 2 == 0).all()


def test_a_column_of_text_that_happens_to_be_named_id_is_no_id(spark: SparkSession) -> None:
    data = [(f"row {i}", [float(i % 3), 1.0]) for i in range(30)]
    table = spark.createDataFrame(data, "id string, point array<double>")
    assert BlockKMeans(k=3).fit(table).fitted.sizes.tolist() == [10, 10, 10]


def test_a_first_image_that_is_null_is_one_line(spark: SparkSession) -> None:
    table = spark.createDataFrame([(None,), (bytearray(b"abc"),)], "image binary").coalesce(1)
    with pytest.raises(DataError, match="column image has a null"):
        BlockPCA().fit(table)


def test_setters_return_the_estimator_and_reach_the_model(few: DataFrame) -> None:
    pca = BlockPCA().setComponents(3).setWhiten(True).setInputCol("bytes").setOutputCol("p")
    kmeans = BlockKMeans().setK(3).setNInit(2).setMaxIter(9).setTol(0.1).setSeed(5).setIdCol("id")
    model = Pipeline(stages=[pca, kmeans.setFeaturesCol("p").setPredictionCol("c")]).fit(few)
    first, second = model.stages
    assert [first.getOrDefault(name) for name in ("components", "whiten", "outputCol")] == [3.0, True, "p"]
    assert [second.getOrDefault(name) for name in ("k", "nInit", "maxIter", "tol", "seed")] == [3, 2, 9, 0.1, 5]
    assert model.transform(few).select("c").distinct().count() <= 3


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: BlockKMeans(k=0), r"k must be in 1\.\.65536, got 0"),
        (lambda: BlockKMeans().setNInit(0), "nInit must be at least 1, got 0"),
        (lambda: BlockKMeans(maxIter=-1), "maxIter must be at least 1, got -1"),
        (lambda: BlockKMeans(tol=float("nan")), "tol must be a number of 0 or more, got nan"),
        (lambda: BlockPCA().setComponents(2.5), r"components must be a whole number or a share in \(0, 1\), got 2.5"),
    ],
)
def test_senseless_parameters_are_refused_where_they_are_set(make: Callable[[], object], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        make()


@pytest.mark.parametrize(
    ("estimator", "line"),
    [
        (
            BlockPCA(inputCol="pixels"),
            "inputCol 'pixels' is no column of the table; its columns are id, bytes, array, vector",
        ),
        (BlockPCA(inputCol="id"), "inputCol 'id' holds int, not vectors, arrays of numbers or bytes"),
        (BlockKMeans(featuresCol="id"), "featuresCol 'id' holds int"),
        (BlockKMeans(featuresCol="vector", idCol="row"), "idCol 'row' is no column"),
        (BlockKMeans(featuresCol="vector", idCol="bytes"), "idCol 'bytes' holds binary, not whole numbers"),
    ],
)
def test_a_table_without_what_is_needed_is_one_line(
    few: DataFrame, estimator: BlockPCA | BlockKMeans, line: str
) -> None:
    with pytest.raises(UsageError, match=line):
        estimator.fit(few)


@pytest.mark.full
def test_cross_validation_chooses_among_numbers_of_clusters(spark: SparkSession) -> None:
    rng = np.random.default_rng(0)
    data = [([float(v) for v in rng.normal(9 * (i % 3), 0.1, 2)],) for i in range(240)]
    points = spark.createDataFrame(data, "v array<double>").select(array_to_vector("v").alias("point"))
    estimator = BlockKMeans(seed=1)
    grid = ParamGridBuilder().addGrid(estimator.k, [2, 3, 8]).build()
    judge = ClusteringEvaluator(featuresCol="point", predictionCol="neighbourhood")
    found = CrossValidator(
        estimator=estimator, estimatorParamMaps=grid, evaluator=judge, numFolds=2, seed=1, parallelism=2
    ).fit(points)
    assert len(found.bestModel.fitted.sizes) == 3
    assert int(np.argmax(found.avgMetrics)) == 1


def test_arrays_of_numbers_cluster_too(spark: SparkSession) -> None:
    rng = np.random.default_rng(0)
    data = [(i, [float(v) for v in rng.normal(5 * (i % 3), 0.1, 2)]) for i in range(300)]
    points = spark.createDataFrame(data, "id long, v array<double>").withColumn("point", array_to_vector("v"))
    model = BlockKMeans(k=3).fit(points)
    assert model.fitted.sizes.tolist() == [100, 100, 100]
    assert sorted(round(c[0]) for c in model.clusterCenters()) == [0, 5, 10]


@pytest.mark.full
def test_tasks_and_one_process_refine_on_the_same_sample(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows settle on the same sample in tasks as in one process."""
    monkeypatch.setattr(fit_module, "MANY_ROWS", 20_000)
    monkeypatch.setattr(fit_module, "REFINEMENT_ROWS", 8_000)
    monkeypatch.setattr(kmeans_module, "ONE_TASK_BYTES", 0)
    points = (np.random.default_rng(8).normal(size=(24_000, 6)) * 30_000).astype(np.int32)
    ids = np.arange(len(points))
    settled: list[int] = []

    def limit(count: int) -> int:
        settled.append(count)
        return refinement_limit(count)

    monkeypatch.setattr(kmeans_module, "refinement_limit", limit)
    here = fit_in_process(ids, points, KMeansSettings(12, 20, 1e-4, 0))
    for parts in (1, 7):
        split = [Points(rows, points[rows]) for rows in np.array_split(ids, parts)[::-1]]
        spread = spark.sparkContext.parallelize(split, parts)
        model = BlockKMeans(k=12, maxIter=20).fit_points(spread, 0, values=points.size)
        assert np.array_equal(model.fitted.centres, here.centres)
    assert settled == [24_000, 24_000]
