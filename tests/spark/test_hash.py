"""Shards by the buckets of hash functions: through the job, beside what plain numpy makes of the same rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pipeline.clustering.hash_model import HashModel
from pipeline.clustering.hashes import Family, fit
from pipeline.core.errors import UsageError
from pipeline.core.hashing import is_drawn
from pipeline.core.seeds import Purpose, word
from pipeline.input.dataset import ranges
from pipeline.quality import measure as measuring
from pipeline.quality.metrics import chi_square
from pipeline.runs.request import Request
from pipeline.runs.reshard import reshard
from pipeline.spark.images import Images
from pipeline.strategies import hash as hash_strategy
from pipeline.strategies.hash import BucketSizes, Hash, rows_to_sample
from tests.conftest import make_rows, write_binary
from tests.support.application import run_job
from tests.support.processors import assert_same_bits
from tests.support.sharding_runs import QUIET, digests, read, run, shas
from tests.support.tiers import only

FAMILIES: tuple[Family, ...] = ("lsh", "sign", "dsh", "kmeans")
SMALL = ["--image-shape", "3x8x8", "--format", "cifar10-binary", "--no-report"]
Source = tuple[Path, np.ndarray, np.ndarray]  # folder, labels, images


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    labels, images = make_rows(1500, seed=8, pixels=192)
    return write_binary(tmp_path_factory.mktemp("hash") / "in", labels, images, files=3), labels, images


def owners(output: Path, manifest: Any) -> pd.DataFrame:
    rows = read(output, manifest)
    return rows[rows["copy"] == 0].sort_values("id").reset_index(drop=True)


def numbered(keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Buckets by size, the largest first, then by key."""
    found, sizes = np.unique(keys, return_counts=True)
    order = sorted(range(len(found)), key=lambda at: (-sizes[at], found[at]))
    numbers = {found[at]: number for number, at in enumerate(order)}
    return np.array([numbers[key] for key in keys])


@pytest.mark.parametrize("family", only(("lsh", "kmeans"), FAMILIES))
def test_neighbourhoods_are_buckets_of_functions_of_a_keyed_sample(
    spark: SparkSession, source: Source, tmp_path: Path, family: Family
) -> None:
    """Neighbourhoods are the buckets of functions fitted to a keyed sample."""
    folder, _, images = source
    strategy = Hash(family=family, functions=5, fit_rows=300, seed=4)
    manifest = run(spark, folder, tmp_path / "o", strategy, 4)
    hashes = fit(images[is_drawn(np.arange(1500), 1500, 300, word(4, Purpose.FIT_ROWS))], family, 5, 4)
    expected = numbered(hashes.buckets(images))
    rows = owners(tmp_path / "o", manifest)
    assert rows.neighbourhood.tolist() == expected.tolist()
    assert [near["size"] for near in manifest["neighbourhoods"]] == np.bincount(expected).tolist()
    params = manifest["params"]
    assert (params["functions"], params["buckets"], params["rows_fitted"]) == (5, expected.max() + 1, hashes.rows)
    assert 200 < hashes.rows < 400
    assert params.get("width") == (hashes.width if family == "lsh" else None)


@pytest.mark.parametrize("family", only(["lsh"], ["lsh", "sign"]))
def test_the_shards_are_the_same_bits_however_the_work_is_cut(
    spark: SparkSession, source: Source, tmp_path: Path, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dsh, the default, is in the suite of all strategies."""
    sets = []
    for pieces in (1, 13):
        monkeypatch.setattr(Images, "pieces", lambda self, n=pieces: ranges(0, self.dataset.rows, n)[::-1])
        strategy = Hash(family=family, functions=4, fit_rows=300, seed=2)
        sets.append(digests(run(spark, source[0], tmp_path / str(pieces), strategy, 5)))
    assert sets[0] == sets[1]


def test_equal_images_are_one_bucket_dealt_in_turns(spark: SparkSession, tmp_path: Path) -> None:
    images = np.full((64, 192), 9, np.uint8)
    for family in FAMILIES:
        assert len(set(fit(images, family, 3, 0).buckets(images).tolist())) == 1
    folder = write_binary(tmp_path / "in", np.arange(64).astype(np.uint8) % 10, images)
    manifest = run(spark, folder, tmp_path / "o", Hash(functions=3), 6)
    assert manifest["neighbourhoods"] == [{"size": 64, "sparse": False}]
    assert owners(tmp_path / "o", manifest).worker.tolist() == [row % 6 for row in range(64)]


def test_one_worker_has_every_row_once(spark: SparkSession, source: Source, tmp_path: Path) -> None:
    manifest = run(spark, source[0], tmp_path / "o", Hash(family="lsh", width=100.0, functions=6), 1)
    assert (manifest["workers"][0]["rows"], manifest["copies"]) == (1500, 0)
    assert len(manifest["neighbourhoods"]) > 100


def test_tiny_buckets_go_to_every_worker_or_none(spark: SparkSession, source: Source, tmp_path: Path) -> None:
    sets = {}
    for rule in ("le", "lt", "never"):
        strategy = Hash(family="sign", functions=5, sparse_if=rule, seed=1)
        sets[rule] = run(spark, source[0], tmp_path / rule, strategy, 12)
    sizes = np.array([near["size"] for near in sets["le"]["neighbourhoods"]])
    assert {12} < set(sizes[sizes <= 13].tolist()), "there is a bucket of exactly as many rows as workers"
    assert sets["le"]["copies"] == 11 * sizes[sizes <= 12].sum()
    assert sets["lt"]["copies"] == 11 * sizes[sizes < 12].sum()
    assert sets["never"]["copies"] == 0
    for rule, manifest in sets.items():
        rows = owners(tmp_path / rule, manifest)
        held = rows.groupby("worker").size()
        assert held.max() - held.min() <= 2  # dense rows within one, and the owners of sparse ones
        spread = rows.groupby(["neighbourhood", "worker"]).size().unstack(fill_value=0)
        assert (spread.max(axis=1) - spread.min(axis=1)).max() <= 1


def test_another_number_of_workers_keeps_the_buckets(spark: SparkSession, source: Source, tmp_path: Path) -> None:
    strategy = Hash(family="lsh", functions=3, seed=5)
    run(spark, source[0], tmp_path / "n", strategy, 4)
    direct = run(spark, source[0], tmp_path / "m", strategy, 6, ratios=(3, 1, 1, 1, 2, 1))
    request = Request(input=str(tmp_path / "n"), output=str(tmp_path / "r"), num_workers=6, ratios=(3, 1, 1, 1, 2, 1))
    moved = reshard(spark.sparkContext, request, QUIET).shards.manifest.to_json()
    assert shas(moved) == shas(direct)
    assert moved["params"] == direct["params"]


def write_vectors(folder: Path, vectors: np.ndarray[Any, Any], images: np.ndarray[Any, Any]) -> Path:
    folder.mkdir()
    table = pa.table(
        {
            "label": pa.array(np.arange(len(images)) % 3, pa.int32()),
            "image": pa.array([image.tobytes() for image in images], pa.binary()),
            "v": pa.array(list(vectors), pa.list_(pa.float32())),
        }
    )
    pq.write_table(table, folder / "part-0.parquet", row_group_size=100)
    return folder


@pytest.mark.parametrize("family", only(FAMILIES[:1], FAMILIES))
def test_the_vectors_of_a_column_are_hashed_in_the_place_of_images(
    spark: SparkSession, tmp_path: Path, family: Family
) -> None:
    draw = np.random.default_rng(0)
    vectors = (draw.standard_normal((400, 6)) + 5 * (np.arange(400) % 2)[:, None]).astype(np.float32)
    folder = write_vectors(tmp_path / "in", vectors, make_rows(400, pixels=192)[1])
    width = ["--width", 40] if family == "lsh" else []  # in the unit of the vectors, of which two heaps lie 12 apart
    flags = ["--input", folder, "--output", tmp_path / "o", "--workers", 3, "--image-shape", "3x8x8", "--no-report"]
    done = run_job("hash.py", *flags, "--embedding", "v", "--family", family, "--functions", 3, *width, "--seed", 3)
    assert done.code == 0, done.err
    manifest = json.loads((tmp_path / "o" / "manifest.json").read_text())
    rows = owners(tmp_path / "o", manifest)
    if family == "lsh":
        assert manifest["params"]["width"] == 40
        assert len(manifest["neighbourhoods"]) < 10
    else:
        by_heap = rows.groupby("neighbourhood").id.agg(lambda ids: len(set(ids % 2)))
        assert (by_heap == 1).mean() > 0.5, "the first principal direction tells the heaps apart"
    assert "image" in pq.read_schema(next((tmp_path / "o" / "worker=000").glob("*.parquet"))).names


def test_the_saved_functions_give_every_row_its_neighbourhood(
    spark: SparkSession, source: Source, tmp_path: Path
) -> None:
    run(spark, source[0], tmp_path / "o", Hash(family="sign", functions=6), 3)
    model = HashModel.load(str(next((tmp_path / "o" / "_model").rglob("hashes"))))
    table = spark.read.option("pathGlobFilter", "*.parquet").parquet(str(tmp_path / "o"))
    table = table.withColumnRenamed("neighbourhood", "written")
    assert model.transform(table).where(F.col("neighbourhood") != F.col("written")).count() == 0
    few = HashModel(model.hashes, None, model.keys[:2])
    assert few.transform(table).where(F.col("written") > 1).select("neighbourhood").distinct().collect() == [(-1,)]
    none = HashModel(model.hashes, None, model.keys[:0])  # as a stream saves it
    assert none.transform(table).select("neighbourhood").distinct().collect() == [(-1,)]


@given(st.lists(st.lists(st.integers(-3, 3), max_size=30), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_sizes_of_buckets_add_up_whatever_is_merged_first(parts: list[list[int]]) -> None:
    found = [BucketSizes.from_keys([np.array(part, np.int64)]) for part in parts]
    total = found[0]
    for part in found[1:]:
        total = part + total
    whole = BucketSizes.from_keys(np.array(part, np.int64) for part in parts)
    assert (total.keys.tolist(), total.sizes.tolist()) == (whole.keys.tolist(), whole.sizes.tolist())
    keys = np.array([key for part in parts for key in part], np.int64)
    if len(keys):
        assert whole.numbers()[np.searchsorted(whole.keys, keys)].tolist() == numbered(keys).tolist()


PROGRAM = """
import hashlib, json
import numpy as np
from threadpoolctl import threadpool_info
from pipeline.clustering.hashes import fit
draw = np.random.default_rng(0)
pixels = draw.integers(0, 256, (700, 300), dtype=np.uint8)
points = draw.integers(-1 << 19, 1 << 19, (700, 300)).astype(np.int32)
digests = []
for rows in (pixels, points):
    for family in ("lsh", "sign"):
        hashes = fit(rows, family, 8, 1)
        digests += [array.tobytes() for array in hashes.arrays().values()] + [hashes.buckets(rows).tobytes()]
plain = (pixels / 3) @ (points[:300] / 7)
print(json.dumps([hashlib.sha256(b"".join(digests)).hexdigest(), hashlib.sha256(plain.tobytes()).hexdigest(),
                  [pool.get("architecture") for pool in threadpool_info()]]))
"""


@pytest.mark.full
def test_functions_and_buckets_do_not_depend_on_the_processor() -> None:
    """Another blas kernel other vector units and more threads give the same functions and buckets."""
    assert_same_bits(PROGRAM)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--family", "md5"], "argument --family: invalid choice: 'md5'"),
        (["--functions", "0"], "--functions must be at least 1 and at most 64, got 0"),
        (["--functions", "65"], "--functions must be at least 1 and at most 64, got 65"),
        (["--functions", "few"], "argument --functions: invalid int value: 'few'"),
        (["--family", "lsh", "--width", "0"], "--width must be a positive number of at most 1e12, got 0"),
        (["--family", "lsh", "--width", "nan"], "--width must be a positive number of at most 1e12, got nan"),
        (["--family", "sign", "--width", "9"], "--family sign has no width; leave out --width 9"),
        (["--fit-rows", "5"], "--fit-rows must be all, auto or a whole number of at least 100, got 5"),
        (["--sparse-if", "ge"], "argument --sparse-if: invalid choice: 'ge'"),
        (["--embedding", "v"], "--embedding v is a column of Parquet, and"),
        (
            ["--family", "lsh", "--width", "1"],
            "too many groups of similar rows have at most as many rows as there are workers: their copies add",
        ),
    ],
)
def test_what_cannot_be_asked_for_is_told_in_one_line(
    spark: SparkSession, source: Source, tmp_path: Path, flags: list[str], line: str
) -> None:
    done = run_job(
        "hash.py", "--input", source[0], "--output", tmp_path / "o", "--workers", 3, "--quiet", *SMALL, *flags
    )
    assert done.code == 2
    assert line in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.full
def test_too_many_buckets_are_refused_in_one_line(
    spark: SparkSession, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hash_strategy, "MOST_CELLS", 40 * 3)  # which the driver checks
    flags = ["--input", source[0], "--output", tmp_path / "o", "--workers", 3, *SMALL, "--sparse-if", "never"]
    done = run_job("hash.py", *flags, "--family", "lsh", "--functions", 8)
    assert done.code == 2
    assert done.err.strip().splitlines()[-1].endswith("buckets; use fewer --functions or a larger --width")
    assert not (tmp_path / "o").exists()


def test_counting_ends_once_there_are_too_many_buckets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hash_strategy, "MOST_BUCKETS", 10)
    many = BucketSizes.from_keys([np.arange(100)]) + BucketSizes.from_keys([np.arange(50, 200)])
    assert len(many.keys) == 11


def test_no_more_rows_are_fitted_to_than_one_task_holds() -> None:
    assert rows_to_sample("auto", 50_000, 3072) == 10_000
    assert rows_to_sample("auto", 500, 3072) == 500
    assert rows_to_sample("all", 50_000, 3072) == 50_000
    assert rows_to_sample("auto", 50_000, 150_528) == 2000
    with pytest.raises(UsageError, match=r"at most 174,762 rows of 3,072 bytes; leave out --fit-rows all"):
        rows_to_sample("all", 10**7, 3072)
    with pytest.raises(UsageError, match=r"leave out --fit-rows 9000"):
        rows_to_sample(9000, 10**7, 150_528)


@pytest.mark.full
def test_a_report_counts_the_largest_of_very_many_neighbourhoods(
    spark: SparkSession, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "MOST_COUNTED", 90)
    flags = ["--input", source[0], "--output", tmp_path / "o", "--workers", 3, *SMALL[:-1], "--sparse-if", "never"]
    done = run_job("hash.py", *flags, "--family", "lsh", "--functions", 8, "--seed", 1)
    assert done.code == 0, done.err
    manifest = json.loads((tmp_path / "o" / "manifest.json").read_text())
    quality = json.loads((tmp_path / "o" / "quality.json").read_text())
    assert len(manifest["neighbourhoods"]) > 400
    rows = owners(tmp_path / "o", manifest)
    table = np.array([np.bincount(rows.neighbourhood[rows.worker == w], minlength=30)[:30] for w in range(3)])
    assert quality["neighbourhood_table"] == table.tolist()
    expected = chi_square(table)
    assert expected is not None
    assert quality["neighbourhoods"]["statistic"] == pytest.approx(expected.statistic)
    assert "Rows by worker are counted of the 30 largest." in (tmp_path / "o" / "report.html").read_text()
