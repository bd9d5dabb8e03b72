"""Shard quality against independent oracles: brute-force kernels, simulation, scipy and plain counting."""

import json
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.spatial.distance import cdist, jensenshannon, pdist
from scipy.stats import chi2_contingency, entropy
from scipy.stats.contingency import association
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.cluster import contingency_matrix
from sklearn.metrics.pairwise import rbf_kernel

from pipeline.core.errors import DataError
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.storage.store import Store
from pipeline.quality import metrics as quality
from pipeline.quality import moments
from pipeline.quality.measure import measure
from pipeline.quality.scatter_plot import INSIDE_95, comparable_centres, principal_axes

Images = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


def make_images(rows: int, shape: tuple[int, int, int] = (3, 9, 7), seed: int = 0) -> tuple[Images, Ints]:
    """Noise around one mean image a class: uint8 [rows, C, H, W] and labels of 4 classes."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 4, rows)
    means = random.integers(40, 215, (4, *shape))
    noise = random.normal(0, 30, (rows, *shape))
    return np.clip(means[labels] + noise, 0, 255).astype(np.uint8), labels


def commit(
    folder: Path,
    images: Images,
    labels: Ints,
    worker: Ints,
    num_workers: int,
    neighbourhoods: Ints | None = None,
    copied: Ints | None = None,
    files_per_worker: int = 2,
) -> dict[str, Any]:
    """Write a committed set as the jobs do and return its manifest; `copied` ids go to every worker."""
    workers = []
    sizes = None if neighbourhoods is None else np.bincount(neighbourhoods)
    for index in range(num_workers):
        owned = np.flatnonzero(worker == index)
        extra = np.array([i for i in ([] if copied is None else copied) if worker[i] != index], np.int64)
        ids = np.concatenate([owned, extra]).astype(np.int64)
        copy = np.repeat([0, 1], [len(owned), len(extra)])
        files = []
        for number, part in enumerate(np.array_split(np.arange(len(ids)), files_per_worker)):
            columns = {
                "id": pa.array(ids[part], pa.int64()),
                "label": pa.array(labels[ids[part]], pa.int32()),
                "image": pa.array([images[i].tobytes() for i in ids[part]], pa.binary()),
                "copy": pa.array(copy[part], pa.int32()),
            }
            if neighbourhoods is not None:
                columns["neighbourhood"] = pa.array(neighbourhoods[ids[part]], pa.int32())
            path = f"worker={index:03d}/part-{number:05d}.parquet"
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(columns), folder / path, row_group_size=37)
            size = (folder / path).stat().st_size
            files.append({"path": path, "rows": len(part), "bytes": size, "sha256": "0" * 64})
        histogram = np.bincount(labels[ids], minlength=int(labels.max()) + 1).tolist()
        workers.append(
            {
                "index": index,
                "rows": len(ids),
                "copies": len(extra),
                "files": files,
                "label_histogram": histogram,
            }
        )
    groups = None
    if sizes is not None:
        groups = [{"size": int(size), "sparse": bool(size <= num_workers)} for size in sizes]
    manifest: dict[str, Any] = {
        "format_version": 1,
        "strategy": "distribution_aware",
        "params": {"clusters": 20, "whiten": True},
        "seed": 0,
        "num_workers": num_workers,
        "rows": len(images),
        "copies": sum(entry["copies"] for entry in workers),
        "input": {
            "format": "cifar10-binary",
            "uri": "hdfs://name/data",
            "files": 5,
            "bytes": 1,
            "fingerprint": "1-0123456789abcdef",
        },
        "image": {"shape": list(images.shape[1:]), "dtype": "uint8", "layout": "CHW", "mean": []},
        "labels": {"columns": ["label"], "num_classes": int(labels.max()) + 1},
        "workers": workers,
        "neighbourhoods": groups,
        "eval": None,
        "model": None,
        "seconds": {"scan": 0.5, "write": 1.5},
        "versions": {"python": "3.11"},
        "interval": None,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return manifest


def shard_set(folder: Path, manifest: dict[str, Any]) -> ShardSet:
    return ShardSet(Store(), str(folder), Manifest.from_json(manifest))


def measured(folder: Path, manifest: dict[str, Any], **options: Any) -> quality.Quality:
    return measure(shard_set(folder, manifest), **options)[0]


def test_thumbnails_of_divisible_images_are_block_means() -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)
    blocks = images.reshape(5, 3, 4, 8, 4, 8).mean(axis=(3, 5)).reshape(5, -1) / 255
    np.testing.assert_allclose(moments.thumbnails(images), blocks, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 9, 7), (3, 2, 3), (1, 1, 1), (4, 5, 33)])
def test_thumbnails_of_any_size_keep_the_mean_of_each_channel(shape: tuple[int, int, int]) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, *shape), dtype=np.uint8)
    cells = moments.thumbnails(images).reshape(6, shape[0], -1)
    np.testing.assert_allclose(cells.mean(axis=2), images.mean(axis=(2, 3)) / 255, rtol=1e-5)


def test_steps_over_rows_change_no_bit_of_a_row() -> None:
    """Compare with all rows in one step, for numbers of rows that no step divides."""
    images, _ = make_images(2 * moments.WAVE_ROWS + 5)
    across = moments.pooling_matrix(7, 4) / np.float32(255)
    pooled = moments.pooling_matrix(9, 4).T @ (images.astype(np.float32) @ across)
    features = moments.thumbnails(images)
    np.testing.assert_array_equal(features, pooled.reshape(len(images), -1))
    directions = np.random.default_rng(0).standard_normal((features.shape[1], moments.FREQUENCIES)) / 0.7
    phase = features @ directions.astype(np.float32)
    waves = np.concatenate([np.cos(phase), np.sin(phase)], axis=1) * np.float32(1 / np.sqrt(moments.FREQUENCIES))
    np.testing.assert_array_equal(moments.fourier_features(features, 0.7), waves)


def test_mmd_equals_the_brute_force_kernel_distance(tmp_path: Path) -> None:
    images, labels = make_images(400)
    worker = (labels + np.arange(400) // 200) % 3
    manifest = commit(tmp_path, images, labels, worker, 3)
    result = measured(tmp_path, manifest)
    features = moments.thumbnails(images).astype(np.float64)
    kernel = np.exp(-(cdist(features, features) ** 2) / (2 * result.bandwidth**2))
    for shard in result.shards:
        mine = worker == shard.worker
        exact = kernel[np.ix_(mine, mine)].mean() - 2 * kernel[mine].mean() + kernel.mean()
        assert shard.mmd2 == pytest.approx(exact, rel=0.1)


def test_mmd_inside_classes_equals_the_brute_force_kernel_ratio(tmp_path: Path) -> None:
    """Bright images of a class are on other workers than dark ones, and class 3 is on a single worker."""
    images, labels = make_images(400)
    bright = images.mean(axis=(1, 2, 3))
    worker = 2 * (bright > np.array([bright[labels == label].mean() for label in range(4)])[labels])
    worker[::5] = 1
    worker[labels == 3] = 2
    result = measured(tmp_path, commit(tmp_path, images, labels, worker, 3))
    kernel = rbf_kernel(moments.thumbnails(images).astype(np.float64), gamma=1 / (2 * result.bandwidth**2))
    ratios = []
    for label in range(3):
        alike = labels == label
        among = kernel[np.ix_(alike, alike)]
        for mine in (worker[alike] == number for number in range(3)):
            mmd2 = among[np.ix_(mine, mine)].mean() - 2 * among[mine].mean() + among.mean()
            ratios.append(mmd2 / ((1 - among.mean()) / mine.sum() * (len(mine) - mine.sum()) / (len(mine) - 1)))
    assert result.class_mmd_ratio == pytest.approx(np.mean(ratios), rel=0.05)
    assert np.mean(ratios) > 1.5


@pytest.mark.full
def test_random_splits_have_a_mean_ratio_of_one(tmp_path: Path) -> None:
    images, labels = make_images(300, seed=1)
    mmd, mean, shard_mmd, class_mmd = [], [], [], []
    for seed in range(60):
        worker = np.random.default_rng(seed).permutation(300) % 5
        folder = tmp_path / str(seed)
        result = measured(folder, commit(folder, images, labels, worker, 5, files_per_worker=1))
        mmd.append(result.mmd_ratio)
        mean.append(result.mean_ratio)
        class_mmd.append(result.class_mmd_ratio)
        shard_mmd += [shard.mmd_ratio for shard in result.shards]
    assert np.mean(mmd) == pytest.approx(1, abs=4 * np.std(mmd) / np.sqrt(60))
    assert np.mean(mean) == pytest.approx(1, abs=4 * np.std(mean) / np.sqrt(60))
    assert np.mean(class_mmd) == pytest.approx(1, abs=4 * np.std(class_mmd) / np.sqrt(60))
    assert np.std(mmd) == pytest.approx(result.mmd_ratio_sd, rel=0.35)
    assert np.std(mean) == pytest.approx(result.mean_ratio_sd, rel=0.35)
    assert np.std(shard_mmd) == pytest.approx(result.shard_mmd_ratio_sd, rel=0.35)


def test_a_split_by_label_is_worse_than_random_an_even_one_better(tmp_path: Path) -> None:
    images, labels = make_images(600)
    by_label = np.argsort(np.argsort(labels, kind="stable")) * 4 // 600
    even = np.empty(600, np.int64)
    even[np.argsort(labels, kind="stable")] = np.arange(600) % 4
    bad = measured(tmp_path / "bad", commit(tmp_path / "bad", images, labels, by_label, 4))
    good = measured(tmp_path / "good", commit(tmp_path / "good", images, labels, even, 4))
    assert bad.mmd_ratio is not None
    assert good.mmd_ratio is not None
    assert bad.mmd_ratio > 20
    assert good.mmd_ratio < 0.7
    assert bad.classes is not None
    assert good.classes is not None
    assert bad.classes.cramers_v > 0.8
    assert good.classes.statistic / good.classes.dof < 0.1


def test_agreement_with_fine_and_coarse_labels_is_scikit_learns(tmp_path: Path) -> None:
    images, labels = make_images(500)
    rng = np.random.default_rng(7)
    near = np.where(rng.random(500) < 0.7, labels, rng.integers(0, 4, 500)).astype(np.int64)
    coarse = labels // 2
    manifest = commit(tmp_path, images, labels, rng.integers(0, 3, 500), 3, near, copied=np.array([3, 9]))
    manifest["labels"]["columns"] = ["label", "coarse_label"]
    for path in tmp_path.rglob("*.parquet"):
        table = pq.read_table(path)
        column = pa.array(coarse[table.column("id").to_numpy()], pa.int32())
        pq.write_table(table.append_column("coarse_label", column), path)
    found = measured(tmp_path, manifest).to_dict()["label_agreement"]
    for name, truth in (("label", labels), ("coarse_label", coarse)):
        table = contingency_matrix(truth, near)
        assert found[name]["adjusted_rand"] == pytest.approx(adjusted_rand_score(truth, near))
        assert found[name]["purity"] == pytest.approx(table.max(axis=0).sum() / 500)
        assert found[name]["largest_label"] == pytest.approx(np.bincount(truth).max() / 500)
    assert found["label"]["adjusted_rand"] > found["coarse_label"]["adjusted_rand"]


def test_kept_columns_of_classes_are_compared_as_labels(tmp_path: Path) -> None:
    """A set of coarse labels keeps the fine ones; columns with nulls or with other numbers than classes are left out."""
    images, fine = make_images(300)
    near = (np.arange(300) % 3).astype(np.int64)
    manifest = commit(tmp_path, images, fine // 2, np.arange(300) % 2, 2, near)
    types = {"fine": "int64", "age": "int64", "patient": "int64", "site": "string"}
    manifest["columns"] = [{"name": name, "type": kind} for name, kind in types.items()]
    for path in tmp_path.rglob("*.parquet"):
        table = pq.read_table(path)
        ids = table.column("id").to_numpy()
        values = {
            "fine": fine[ids].astype(np.int64), "age": [None if row == 7 else 3 for row in ids],
            "patient": ids + (1 << 40), "site": ["a"] * len(ids),
        }  # fmt: skip
        for name, kind in types.items():
            table = table.append_column(name, pa.array(values[name], pa.type_for_alias(kind)))
        pq.write_table(table, path)
    found = measured(tmp_path, manifest).to_dict()["label_agreement"]
    assert list(found) == ["label", "fine"]
    assert found["fine"]["adjusted_rand"] == pytest.approx(adjusted_rand_score(fine, near))


def test_chi_square_equals_scipys_on_the_table_counted_by_hand(tmp_path: Path) -> None:
    images, labels = make_images(500)
    worker = np.random.default_rng(5).integers(0, 4, 500)
    table = np.zeros((4, 4), int)
    np.add.at(table, (worker, labels), 1)
    result = measured(tmp_path, commit(tmp_path, images, labels, worker, 4))
    assert result.classes is not None
    test = chi2_contingency(table)
    assert (result.classes.statistic, result.classes.dof) == (pytest.approx(test.statistic), test.dof)
    assert result.classes.p_value == pytest.approx(test.pvalue)
    assert result.classes.cramers_v == pytest.approx(association(table, method="cramer"))


def test_counts_of_billions_are_tested_as_small_ones_are() -> None:
    small = np.array([[3, 5, 2], [4, 4, 4]])
    one, other = quality.chi_square(small), quality.chi_square(small * 2_000_000_000)
    assert one is not None
    assert other is not None
    assert other.statistic == pytest.approx(one.statistic * 2e9)
    assert other.cramers_v == pytest.approx(one.cramers_v)


def test_the_mean_distance_is_scipys_and_1_of_equal_images() -> None:
    rng = np.random.default_rng(7)
    features = rng.random((300, 48)).astype(np.float32) + 5
    assert moments.mean_distance(features) == pytest.approx(float(pdist(features).mean()), rel=1e-6)
    for seed in range(20):
        image = np.random.default_rng(seed).integers(0, 256, (1, 3, 32, 32)).astype(np.uint8)
        assert moments.mean_distance(moments.thumbnails(np.repeat(image, 600, axis=0))) == 1.0


@pytest.mark.parametrize("shape", [(300, 12), (12, 300), (20, 2000), (2, 5)])
def test_axes_and_spread_of_long_vectors_are_exact_and_small(shape: tuple[int, int]) -> None:
    """The axes are the SVD's, the spread is the eigenvalues', and no square matrix of the longer side is built."""
    features = np.random.default_rng(3).normal(size=shape) * np.linspace(1, 2, shape[1])
    _, scales, directions = np.linalg.svd(features - features.mean(axis=0), full_matrices=False)
    tracemalloc.start()
    axes = principal_axes(features)
    spread = quality.random_spread(features)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * (min(shape) * max(shape) * 6 + 8 * min(shape) ** 2) + 200_000
    is_axis = scales[:2] > 1e-9
    assert np.abs((directions[:2] * axes.T).sum(axis=1)) == pytest.approx(is_axis.astype(float))
    assert np.linalg.norm(axes, axis=0) == pytest.approx(is_axis.astype(float))
    if shape[0] > 2:
        assert spread == pytest.approx(np.sqrt(2 * (scales**4).sum()) / (scales**2).sum())


def test_duplicates_count_for_the_sizes_only(tmp_path: Path) -> None:
    images, labels = make_images(120)
    worker = np.arange(120) % 3
    neighbourhoods = np.where(np.arange(120) < 2, 2, np.arange(120) % 2)
    alone = measured(tmp_path / "a", commit(tmp_path / "a", images, labels, worker, 3, neighbourhoods))
    copied = np.array([0, 1])
    both = measured(tmp_path / "b", commit(tmp_path / "b", images, labels, worker, 3, neighbourhoods, copied))
    assert both.copies == 4
    assert both.duplicate_share == pytest.approx(4 / 120)
    assert [shard.rows - shard.owners for shard in both.shards] == [1, 1, 2]
    assert (both.max_rows, both.min_rows) == (42, 41)
    assert both.classes == alone.classes
    assert both.mmd_ratio == pytest.approx(alone.mmd_ratio)


def test_sparse_neighbourhoods_are_left_out_of_the_test(tmp_path: Path) -> None:
    images, labels = make_images(120)
    neighbourhoods = np.where(np.arange(120) < 2, 2, np.arange(120) // 2 % 2)
    worker = np.where(np.arange(120) < 2, 0, np.arange(120) % 3)
    result = measured(tmp_path, commit(tmp_path, images, labels, worker, 3, neighbourhoods))
    assert result.neighbourhoods is not None
    assert result.neighbourhoods.dof == 2  # 3 workers, 2 dense neighbourhoods
    assert result.neighbourhood_table is not None
    assert result.neighbourhood_table[0, 2] == 2


def test_the_order_of_files_and_their_rows_does_not_matter(tmp_path: Path) -> None:
    images, labels = make_images(200)
    worker = np.random.default_rng(2).permutation(200) % 3
    one = measured(tmp_path / "1", commit(tmp_path / "1", images, labels, worker, 3, files_per_worker=1))
    manifest = commit(tmp_path / "7", images, labels, worker, 3, files_per_worker=7)
    for entry in manifest["workers"]:
        entry["files"].reverse()
    seven = measured(tmp_path / "7", manifest)
    assert seven.classes == one.classes
    assert [s.mmd2 for s in seven.shards] == pytest.approx([s.mmd2 for s in one.shards], rel=1e-5)
    assert [s.mean_ratio for s in seven.shards] == pytest.approx([s.mean_ratio for s in one.shards], rel=1e-5)


@pytest.mark.parametrize(("most", "parts"), [(21, 21), (20, 12), (4, 6), (1, 3)])
def test_many_files_of_a_worker_are_measured_as_one(
    most: int, parts: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compare with the figures of one part for each file. most: limit of parts, of 21 files of three workers."""
    images, labels = make_images(200)
    shards = shard_set(tmp_path, commit(tmp_path, images, labels, np.arange(200) % 3, 3, files_per_worker=7))
    figures, sample, _ = measure(shards)
    items = []

    def run(fn: Callable[[Any], Any], some: Any, /) -> list[Any]:
        items.append(len(some))
        return [fn(item) for item in some]

    monkeypatch.setattr("pipeline.quality.measure.MOST_PARTS", most)
    folded = measure(shards, run)
    assert items == [parts, parts]
    np.testing.assert_array_equal(folded[1].features, sample.features)
    assert folded[0].classes == figures.classes
    assert [s.mmd2 for s in folded[0].shards] == pytest.approx([s.mmd2 for s in figures.shards], rel=1e-5)


def test_merging_moments_gives_those_of_all_rows_in_any_order() -> None:
    images, labels = make_images(90)
    features, groups = moments.thumbnails(images), labels % 2

    def sums(rows: slice) -> moments.Moments:
        return moments.moments(features[rows], labels[rows], groups[rows], 4, 2, 1.0, by_class=True)

    whole, (a, b, c) = sums(slice(None)), (sums(slice(at, at + 30)) for at in (0, 30, 60))
    for merged in (moments.merge(moments.merge(a, b), c), moments.merge(c, moments.merge(b, a))):
        assert merged.rows == 90
        for found, expected in zip(merged, whole, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)  # float32 inside


def through_pickle(fn: Callable[[Any], Any], items: Any, /) -> list[Any]:
    """What crosses to an executor and back: the function, each item and each result."""
    return [pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(fn))(item))) for item in items]


def test_local_steps_and_their_results_survive_the_way_to_an_executor(tmp_path: Path) -> None:
    images, labels = make_images(100)
    manifest = commit(tmp_path, images, labels, np.arange(100) % 2, 2)
    here, there = measured(tmp_path, manifest), measured(tmp_path, manifest, run=through_pickle)
    assert here.to_dict() == there.to_dict()


def test_the_sample_is_the_same_whatever_the_sharding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.quality.measure.SAMPLE_ROWS", 50)
    images, labels = make_images(500)
    samples = []
    for number, worker in enumerate([np.arange(500) % 3, np.arange(500) // 167]):
        folder = tmp_path / str(number)
        samples.append(measure(shard_set(folder, commit(folder, images, labels, worker, 3)))[1])
    assert samples[0].ids.tolist() == list(range(0, 500, 10)) == samples[1].ids.tolist()
    np.testing.assert_array_equal(samples[0].features, samples[1].features)
    np.testing.assert_array_equal(samples[0].groups, labels[::10])


@pytest.mark.parametrize("scale", [1e30, 1e15, 1.0, 1e-4, 1e-10])
def test_features_of_any_scale_have_a_mean_ratio(scale: float) -> None:
    rows = np.random.default_rng(4).random((40, 1, 1, 6)).astype(np.float32) * np.float32(scale)
    features = moments.thumbnails(rows)
    none = np.zeros(0, np.int64)
    parts = [moments.moments(half, np.zeros(20, np.int64), none, 1, 0, 1.0) for half in np.split(features, 2)]
    result = quality.assess([20, 20], parts, [], features, 1.0)
    assert result.mean_ratio == pytest.approx(0.8, abs=0.75)
    assert result.mean_ratio_sd == pytest.approx(0.7495, abs=1e-3)
    json.dumps(result.to_dict(), allow_nan=False)


def test_figures_without_a_comparison_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = make_images(20)
    one = measured(tmp_path / "1", commit(tmp_path / "1", images, labels * 0, np.zeros(20, int), 1))
    assert (one.classes, one.mmd_ratio, one.mmd_ratio_sd, one.size_ratio) == (None, None, None, 1)
    assert one.class_mmd_ratio is None
    empty = measured(tmp_path / "2", commit(tmp_path / "2", images, labels, np.zeros(20, int), 2))
    assert (empty.size_ratio, empty.min_rows, empty.shards[1].mmd_ratio) == (None, 0, None)
    same = np.broadcast_to(images[:1], images.shape)
    equal = measured(tmp_path / "3", commit(tmp_path / "3", same, labels, np.arange(20) % 2, 2))
    assert (equal.mmd_ratio, equal.mean_ratio, equal.class_mmd_ratio) == (None, None, None)
    monkeypatch.setattr("pipeline.quality.measure.MOST_CLASS_SUMS", 15)
    many = measured(tmp_path / "4", commit(tmp_path / "4", images, labels, np.arange(20) % 2, 2))
    assert many.mmd_ratio is not None
    assert many.class_mmd_ratio is None  # 4 classes in each of 4 files
    json.dumps([one.to_dict(), empty.to_dict(), equal.to_dict()], allow_nan=False)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda t: t.slice(1), "has 29 rows of .*, the manifest says 30"),
        (
            lambda t: t.drop_columns(["copy"]),
            "30 rows of id, label, image, the manifest says 30 of id, copy, label, image",
        ),
        (lambda t: t.set_column(1, "label", pa.array([9] * 30)), r"label that is null or not in \[0, 4\)"),
        (lambda t: t.set_column(2, "image", pa.array([b"x"] * 30)), "row 0: the image has 1 bytes, not 189"),
        (lambda t: t.set_column(3, "copy", pa.array([1] * 30)), "own 30 examples, the manifest says 60"),
        (lambda t: t.set_column(0, "id", pa.array([None] * 30, pa.int64())), r"id that is null or not in \[0, 60\)"),
    ],
)
def test_a_file_that_disagrees_with_the_manifest_is_named(
    tmp_path: Path, harm: Callable[[pa.Table], pa.Table], message: str
) -> None:
    images, labels = make_images(60)
    manifest = commit(tmp_path, images, labels, np.arange(60) % 2, 2, files_per_worker=1)
    path = tmp_path / "worker=001/part-00000.parquet"
    # ParquetFile, not read_table: the latter would add a column from the folder's name.
    pq.write_table(harm(pq.ParquetFile(path).read()), path)
    with pytest.raises(DataError, match=message):
        measured(tmp_path, manifest)


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    images, labels = make_images(60)
    manifest = commit(tmp_path, images, labels, np.arange(60) % 2, 2, files_per_worker=1)
    (tmp_path / "worker=001/part-00000.parquet").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"worker=001/part-00000.parquet is not a whole Parquet file"):
        measured(tmp_path, manifest)


def test_class_skew_equals_scipys_figures() -> None:
    """Jensen-Shannon by scipy, total variation by its definition, effective classes by the entropy."""
    table = np.random.default_rng(4).multinomial(300, [0.7, 0.2, 0.1, 0.0], 6)
    table[2] = [0, 0, 40, 0]
    table[3] = 0  # a worker without rows has no shares
    skew = quality.class_skew(table)
    assert skew is not None
    whole = table.sum(axis=0) / table.sum()
    shares = [row / row.sum() for row in table if row.any()]
    assert skew.total_variation == pytest.approx(np.mean([abs(share - whole).sum() / 2 for share in shares]))
    assert skew.jensen_shannon == pytest.approx(np.mean([jensenshannon(share, whole, 2) ** 2 for share in shares]))
    assert skew.effective_classes == pytest.approx(np.mean([np.exp(entropy(share)) for share in shares]))
    assert skew.whole_effective_classes == pytest.approx(np.exp(entropy(whole)))


def test_class_skew_of_a_random_split_is_the_expected_one() -> None:
    """The mean over 200 shuffles of the same labels."""
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], [500, 300, 100])
    found = []
    for _ in range(200):
        shards = np.split(rng.permutation(labels), [300, 500, 700])
        found.append(quality.class_skew(np.array([np.bincount(shard, minlength=3) for shard in shards])))
    measured = np.mean([skew.total_variation for skew in found if skew])
    assert found[0] is not None
    assert measured == pytest.approx(found[0].random_total_variation, rel=0.05)


def test_disjoint_classes_have_the_largest_skew() -> None:
    skew = quality.class_skew(np.eye(50, dtype=np.int64) * 7)
    assert skew is not None
    assert (skew.total_variation, skew.effective_classes) == pytest.approx((0.98, 1))
    assert 0.9 < skew.jensen_shannon < 1
    assert quality.class_skew(np.array([[3], [4]])) is None


def test_shards_of_any_size_lie_in_the_ellipse_alike() -> None:
    """Draw random shards of unequal sizes: 95 % of each size are inside."""
    rng = np.random.default_rng(0)
    rows, sizes = 400, np.array([320, 40, 40])
    points = rng.standard_normal((rows, 2)) * [3, 1]
    inside = np.zeros(3)
    for _ in range(1000):
        parts = np.split(points[rng.permutation(rows)], np.cumsum(sizes)[:-1])
        centres = np.stack([part.mean(axis=0) for part in parts]) - points.mean(axis=0)
        scaled, sd = comparable_centres(centres, sizes, rows, points.var(axis=0))
        inside += ((scaled / sd) ** 2).sum(axis=1) < INSIDE_95**2
    assert inside / 1000 == pytest.approx(np.full(3, 0.95), abs=0.025)
