"""A PCA fitted to a sample of the rows: the same rows and bits for any partitioning, those of an exact fit of them."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.clustering.gram import rows_to_fit
from pipeline.core.errors import UsageError
from pipeline.core.storage.store import Store
from pipeline.input import dataset as dataset_module
from pipeline.input.dataset import Block, Dataset, discover, serial
from pipeline.input.read_options import ReadOptions
from tests.conftest import make_rows, write_binary
from tests.support.sharding_runs import make

ROWS, WANTED = 2600, 700
Source = tuple[Path, np.ndarray]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    labels, images = make_rows(ROWS, seed=5, pixels=192)
    return write_binary(tmp_path_factory.mktemp("src") / "cifar", labels, images, files=3), images


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
    dataset = discover(Store(), str(folder), run=serial, read_options=ReadOptions("cifar10-binary", (3, 8, 8)))
    whole = np.concatenate([block.images for block in dataset.read(0, 300)])
    for start, stop in ((0, 300), (1, 2), (2, 3), (2, 4), (150, 156), (299, 300), (7, 7)):
        found = [block for block in dataset.read(start, stop)]
        assert [int(i) for block in found for i in block.ids] == list(range(start, stop))
        assert all(np.array_equal(block.images, whole[block.ids]) for block in found)


def test_what_lies_far_from_drawn_rows_is_not_read(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, images = source
    dataset = discover(Store(), str(folder), run=serial, read_options=ReadOptions("cifar10-binary", (3, 8, 8)))
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
