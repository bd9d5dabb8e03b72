"""A PCA fitted to a sample of the rows: the same rows and bits for any partitioning, those of an exact fit of them."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import SparkSession

from pipeline.clustering import gram
from pipeline.clustering.gram import rows_to_fit
from pipeline.clustering.pca import BlockPCAModel
from pipeline.errors import UsageError
from pipeline.hashing import keyed_hash
from pipeline.input import dataset as dataset_module
from pipeline.input.dataset import Block, Dataset, discover, ranges, serial
from pipeline.seeds import Purpose, word
from pipeline.spark import images as images_module
from pipeline.storage.store import Store
from tests.conftest import make_rows, write_binary
from tests.sharding_runs import digests, make, run

ROWS, WANTED = 2600, 700
Source = tuple[Path, np.ndarray]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    labels, images = make_rows(ROWS, seed=5, pixels=192)
    return write_binary(tmp_path_factory.mktemp("src") / "cifar", labels, images, files=3), images


@pytest.mark.parametrize("name", ["distribution_aware", "class_cluster"])
def test_the_components_are_those_of_the_drawn_rows_for_any_partitioning(
    spark: SparkSession, source: Source, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, images = source
    sets = []
    for pieces in (1, 3, 16):
        monkeypatch.setattr(
            images_module.Images, "pieces", lambda self, n=pieces: ranges(0, self.dataset.rows, n)[::-1]
        )
        manifest = run(spark, folder, tmp_path / str(pieces), make(name, fit_rows=WANTED, seed=3), 5)
        sets.append(digests(manifest))
    assert sets[0] == sets[1] == sets[2]
    assert manifest["params"]["fit_rows"] == WANTED
    chosen = keyed_hash(np.arange(ROWS), word(3, Purpose.FIT_ROWS)) < np.uint64((WANTED << 64) // ROWS)
    assert abs(chosen.sum() - WANTED) < 5 * np.sqrt(WANTED)
    assert manifest["params"]["rows_fitted"] == chosen.sum()
    model = BlockPCAModel.load(f"file://{tmp_path}/16/_model/{manifest['generation']}/pca")
    expected = gram.top_components(gram.covariance(gram.local([images[chosen]], 192)), make(name).components)
    assert np.array_equal(model.spectrum.components, expected.components)
    assert np.array_equal(model.spectrum.variances, expected.variances)


def test_as_many_rows_as_there_are_give_the_bits_of_all(spark: SparkSession, source: Source, tmp_path: Path) -> None:
    every = run(spark, source[0], tmp_path / "all", make("distribution_aware", fit_rows="all"), 3)
    asked = run(spark, source[0], tmp_path / "asked", make("distribution_aware", fit_rows=ROWS), 3)
    some = run(spark, source[0], tmp_path / "some", make("distribution_aware", fit_rows=WANTED), 3)
    assert digests(asked) == digests(every)
    assert digests(some) != digests(every)
    assert digests(run(spark, source[0], tmp_path / "default", make("distribution_aware"), 3)) == digests(every)


@pytest.mark.parametrize(
    ("asked", "rows", "pixels", "expected"),
    [
        ("auto", 50_000, 3072, 10_000),
        ("auto", 20_000, 3072, 20_000),
        ("auto", 20_001, 192, 10_000),
        ("auto", 10**9, 12_288, 36_864),
        ("all", 10**9, 192, 10**9),
        (5_000, 50_000, 3072, 5_000),
        (5_000, 3_000, 3072, 3_000),
    ],
)
def test_the_default_draws_rows_where_that_saves_more_than_half(
    asked: int | str, rows: int, pixels: int, expected: int
) -> None:
    assert rows_to_fit(asked, rows, pixels) == expected


def test_no_number_of_rows_to_fit_is_all_of_them_as_it_was() -> None:
    assert make("distribution_aware", fit_rows=None) == make("distribution_aware", fit_rows="all")


def test_a_read_of_few_rows_of_many_files_looks_at_their_files_alone(tmp_path: Path) -> None:
    labels, images = make_rows(300, seed=6, pixels=192)
    folder = write_binary(tmp_path / "many", labels, images, files=100)
    dataset = discover(Store(), str(folder), run=serial, shape=(3, 8, 8), format="cifar10-binary")
    whole = np.concatenate([block.images for block in dataset.read(0, 300)])
    for start, stop in ((0, 300), (1, 2), (2, 3), (2, 4), (150, 156), (299, 300), (7, 7)):
        found = [block for block in dataset.read(start, stop)]
        assert [int(i) for block in found for i in block.ids] == list(range(start, stop))
        assert all(np.array_equal(block.images, whole[block.ids]) for block in found)


def test_what_lies_far_from_drawn_rows_is_not_read(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, images = source
    dataset = discover(Store(), str(folder), run=serial, shape=(3, 8, 8), format="cifar10-binary")
    asked, original = [], Dataset.read

    def read(self: Dataset, start: int, stop: int, **more: bool) -> Iterator[Block]:
        asked.append(stop - start)
        return original(self, start, stop, **more)

    monkeypatch.setattr(Dataset, "read", read)
    monkeypatch.setattr(dataset_module, "NEAR_BYTES", 192 * 20)
    chosen = np.sort(np.random.default_rng(0).choice(ROWS, 40, replace=False))
    for ids in (1 << 20, 300):
        monkeypatch.setattr(dataset_module, "IDS_AT_ONCE", ids)
        asked.clear()
        found = list(dataset.read_some(100, ROWS - 100, lambda ids: np.isin(ids, chosen)))
        inside = chosen[(chosen >= 100) & (chosen < ROWS - 100)]
        assert np.array_equal(np.concatenate(found), images[inside])
        assert sum(asked) < ROWS / 4
        assert len(asked) > 10


def test_too_few_rows_to_fit_are_refused() -> None:
    for wrong in (5, "some", -3, 2.5):
        expected = f"--fit-rows must be all, auto or a whole number of at least 100, got {wrong!r}"
        with pytest.raises(UsageError, match=re.escape(expected)):
            make("distribution_aware", fit_rows=wrong)
