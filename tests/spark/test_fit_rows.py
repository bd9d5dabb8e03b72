"""A PCA fitted to a sample of the rows: the same rows and bits for any partitioning, those of an exact fit of them."""

from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import SparkSession

from pipeline.clustering import gram
from pipeline.clustering.pca import BlockPCAModel
from pipeline.core.hashing import keyed_hash
from pipeline.core.seeds import Purpose, word
from pipeline.input.dataset import ranges
from pipeline.spark import images as images_module
from tests.conftest import make_rows, write_binary
from tests.support.sharding_runs import digests, make, run
from tests.support.tiers import only
from tests.unit.test_fit_rows import ROWS, WANTED, Source


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    labels, images = make_rows(ROWS, seed=5, pixels=192)
    return write_binary(tmp_path_factory.mktemp("src") / "cifar", labels, images, files=3), images


@pytest.mark.parametrize("name", only(["distribution_aware"], ["distribution_aware", "class_cluster"]))
def test_components_fit_the_drawn_rows_for_any_partitioning(
    spark: SparkSession, source: Source, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The components are those of the drawn rows for any partitioning."""
    folder, images = source
    sets = []
    for pieces in (1, 16):
        monkeypatch.setattr(
            images_module.Images, "pieces", lambda self, n=pieces: ranges(0, self.dataset.rows, n)[::-1]
        )
        manifest = run(spark, folder, tmp_path / str(pieces), make(name, fit_rows=WANTED, seed=3), 5)
        sets.append(digests(manifest))
    assert sets[0] == sets[1]
    assert manifest["params"]["fit_rows"] == WANTED
    chosen = keyed_hash(np.arange(ROWS), word(3, Purpose.FIT_ROWS)) < np.uint64((WANTED << 64) // ROWS)
    assert abs(chosen.sum() - WANTED) < 5 * np.sqrt(WANTED)
    assert manifest["params"]["rows_fitted"] == chosen.sum()
    model = BlockPCAModel.load(f"file://{tmp_path}/16/_model/{manifest['generation']}/pca")
    expected = gram.top_components(gram.covariance(gram.gram_of_blocks([images[chosen]], 192)), make(name).components)
    assert np.array_equal(model.spectrum.components, expected.components)
    assert np.array_equal(model.spectrum.variances, expected.variances)


@pytest.mark.full
def test_as_many_rows_as_there_are_give_the_bits_of_all(spark: SparkSession, source: Source, tmp_path: Path) -> None:
    every = run(spark, source[0], tmp_path / "all", make("distribution_aware", fit_rows="all"), 3)
    asked = run(spark, source[0], tmp_path / "asked", make("distribution_aware", fit_rows=ROWS), 3)
    some = run(spark, source[0], tmp_path / "some", make("distribution_aware", fit_rows=WANTED), 3)
    assert digests(asked) == digests(every)
    assert digests(some) != digests(every)
    assert digests(run(spark, source[0], tmp_path / "default", make("distribution_aware"), 3)) == digests(every)
