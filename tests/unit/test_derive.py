"""Data sets derived from others: smaller images, other orders, and that sharding reads them like any other."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import stats

from pipeline.core.errors import UsageError
from pipeline.datasets import derive as derive_module
from pipeline.datasets.derive import (
    RECORD,
    Derivation,
    class_blocks,
    derive,
    dirichlet_blocks,
    long_tail_rows,
    order_of_rows,
    shrink_images,
    train_and_test,
)
from tests.conftest import make_rows
from tests.support.exit_codes import ended


@pytest.fixture
def source(tmp_path: Path) -> Path:
    labels, images = make_rows(90, seed=3, pixels=3072)
    records = np.hstack([labels[:, None], images]).astype(np.uint8)
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes(records[:70].tobytes())
    (folder / "test_batch.bin").write_bytes(records[70:].tobytes())
    return folder


def test_pixels_are_means_of_squares_rounded_half_up() -> None:
    images = np.random.default_rng(1).integers(0, 256, (3, 2 * 6 * 4), np.uint8)
    found = shrink_images(images, (2, 6, 4), 2).reshape(3, 2, 3, 2)
    planes = images.reshape(3, 2, 6, 4)
    for row, channel, y, x in np.ndindex(3, 2, 3, 2):
        square = planes[row, channel, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].astype(int)
        assert found[row, channel, y, x] == int(square.sum() / 4 + 0.5)
    assert np.array_equal(shrink_images(images, (2, 6, 4), 1), images)


def test_squares_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="--shrink 3 must divide the images' height and width, 32 and 32"):
        shrink_images(np.zeros((1, 3072), np.uint8), (3, 32, 32), 3)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 7))
def test_round_robin_deals_class_blocks_as_runs_of_sorted_rows(classes: list[int], workers: int) -> None:
    """Round robin over class blocks gives each worker one run of the sorted rows."""
    labels = np.array(classes, np.int32)
    order = class_blocks(labels, workers)
    assert sorted(order) == list(range(len(labels)))
    blocks = [order[worker::workers] for worker in range(workers)]
    expected = [row for _, row in sorted(zip(classes, range(len(classes)), strict=True))]
    assert np.concatenate(blocks).tolist() == expected


@given(st.lists(st.integers(0, 6), min_size=1, max_size=80), st.floats(1, 200))
def test_a_long_tail_keeps_the_first_rows_of_every_class(classes: list[int], ratio: float) -> None:
    """Against a loop over the formula of the paper, by hand for the worked example of ten classes below."""
    rows = long_tail_rows(np.array(classes, np.int32), ratio).tolist()
    names = sorted(set(classes))
    largest = max(map(classes.count, names))
    expected = []
    for number, name in enumerate(names):
        target = max(1, math.floor(largest / ratio ** (number / max(1, len(names) - 1)) + 1e-9))
        expected += [at for at, label in enumerate(classes) if label == name][:target]
    assert rows == sorted(expected)


def test_a_long_tail_of_cifar10_has_the_published_sizes() -> None:
    """Cao et al. (2019), CIFAR-10-LT with ratio 100: 5,000 rows of the first class, 50 of the last."""
    labels = np.repeat(np.arange(10, dtype=np.int32), 5000)
    sizes = np.bincount(labels[long_tail_rows(labels, 100)])
    assert sizes.tolist() == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 7), st.floats(0.01, 50))
def test_dirichlet_blocks_hold_every_row_once(classes: list[int], workers: int, alpha: float) -> None:
    labels = np.array(classes, np.int32)
    order = dirichlet_blocks(labels, workers, alpha, seed=1)
    assert sorted(order) == list(range(len(labels)))
    assert np.array_equal(order, dirichlet_blocks(labels, workers, alpha, seed=1))


def test_a_small_alpha_is_less_even() -> None:
    """Cramer's V of classes and workers, averaged over ten seeds, is about 0 for a large alpha."""
    labels = np.random.default_rng(0).integers(0, 10, 3000).astype(np.int32)

    def unevenness(alpha: float) -> float:
        values = []
        for seed in range(10):
            order = dirichlet_blocks(labels, 10, alpha, seed)
            counts = np.array([np.bincount(labels[order[worker::10]], minlength=10) for worker in range(10)])
            assert set(counts.sum(axis=1)) == {300}
            values.append(stats.contingency.association(counts, method="cramer"))
        return float(np.mean(values))

    assert unevenness(0.1) > 0.6 > 0.4 > unevenness(1) > 0.2 > 0.1 > unevenness(100)


def test_a_long_tail_in_dirichlet_order_is_written(source: Path, tmp_path: Path) -> None:
    derivation = Derivation(long_tail=5, dirichlet=0.2, workers=3)
    assert derive(str(source), tmp_path / "d", derivation)
    train, test = train_and_test(str(tmp_path / "d"))
    block = next(iter(train.read(0, train.rows)))
    original = next(iter(train_and_test(str(source))[0].read(0, 70)))
    order = order_of_rows(original.labels, derivation)
    assert train.rows == len(order) < 70
    assert np.array_equal(block.labels, original.labels[order])
    assert np.array_equal(block.images, original.images[order])
    assert test is not None
    assert test.rows == 20


def test_a_folder_of_an_earlier_version_is_the_same_derivation(source: Path, tmp_path: Path) -> None:
    derive(str(source), tmp_path / "d", Derivation(shrink=2))
    record = json.loads((tmp_path / "d" / RECORD).read_text())
    for key in ("long_tail", "dirichlet", "seed"):
        del record[key]
    (tmp_path / "d" / RECORD).write_text(json.dumps(record))
    assert not derive(str(source), tmp_path / "d", Derivation(shrink=2))
    with pytest.raises(UsageError, match=r"was derived with long_tail None, not 10\.0"):
        derive(str(source), tmp_path / "d", Derivation(shrink=2, long_tail=10.0))


@pytest.mark.parametrize(
    "values", [{"dirichlet": 0.3}, {"workers": 3}, {"dirichlet": 1, "order": "class-blocks", "workers": 3}]
)
def test_an_order_without_workers_or_with_another_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"need each other|are two orders"):
        Derivation(**values)


def test_a_derived_set_has_the_rows_of_both_sides(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "small"
    assert derive(str(source), target, Derivation(shrink=2, rows=50))
    train, test = train_and_test(str(target))
    assert test is not None
    assert (train.rows, test.rows, train.layout.shape) == (50, 20, (3, 16, 16))
    whole, _ = train_and_test(str(source))
    block, original = next(iter(train.read(0, 50))), next(iter(whole.read(0, 50)))
    assert np.array_equal(block.labels, original.labels)
    assert np.array_equal(block.images, shrink_images(original.images, (3, 32, 32), 2))


def test_evaluation_rows_may_lie_elsewhere(source: Path, tmp_path: Path) -> None:
    only = source / "data_batch_1.bin"
    assert train_and_test(str(only))[1] is None
    derive(str(only), tmp_path / "d", Derivation(), str(source))
    _, test = train_and_test(str(tmp_path / "d"))
    assert test is not None
    assert test.rows == 20


@pytest.mark.parametrize("separate", [False, True])
def test_evaluation_rows_have_the_numbers_of_training_classes(separate: bool, tmp_path: Path) -> None:
    """No evaluation row is a cat, so that the first class of the evaluation files is the second one of training."""
    train, test = tmp_path / "photos" / "train", (tmp_path / "other" if separate else tmp_path / "photos") / "test"
    for folder, names in ((train, ("cat", "dog", "emu")), (test, ("dog", "emu"))):
        for name in names:
            (folder / name).mkdir(parents=True)
            image = np.full((4, 4, 3), 80 * ("cat", "dog", "emu").index(name), np.uint8)
            Image.fromarray(image).save(folder / name / "1.png")
    evaluation = str(tmp_path / "other") if separate else None
    assert derive(str(tmp_path / "photos"), tmp_path / "d", Derivation(), evaluation)
    for side in train_and_test(str(tmp_path / "d")):
        assert side is not None
        (block,) = side.read(0, side.rows)
        assert (block.images[:, 0] // 80).tolist() == block.labels.tolist()
        assert side.layout.class_names in ((), ("cat", "dog", "emu"))


def test_evaluation_files_that_are_the_training_files_are_refused(source: Path, tmp_path: Path) -> None:
    only = str(source / "data_batch_1.bin")
    with pytest.raises(UsageError, match="read the same files; name the evaluation files"):
        derive(only, tmp_path / "d", Derivation(), only)
    assert not (tmp_path / "d").exists()


def test_class_blocks_reorder_training_rows_alone(source: Path, tmp_path: Path) -> None:
    derive(str(source), tmp_path / "d", Derivation(order="class-blocks", workers=4))
    train, test = train_and_test(str(tmp_path / "d"))
    labels = next(iter(train.read(0, 70, images=False))).labels
    assert np.concatenate([labels[worker::4] for worker in range(4)]).tolist() == sorted(labels.tolist())
    assert test is not None
    original = train_and_test(str(source))[1]
    assert original is not None
    assert np.array_equal(next(iter(test.read(0, 20))).labels, next(iter(original.read(0, 20))).labels)


def test_coarse_labels_can_take_the_place_of_fine_ones(tmp_path: Path) -> None:
    folder = tmp_path / "cifar100"
    folder.mkdir()
    rng = np.random.default_rng(4)
    coarse, fine = rng.integers(0, 20, 30, np.uint8), rng.integers(0, 100, 30, np.uint8)
    pixels = rng.integers(0, 256, (30, 3072), np.uint8)
    (folder / "train.bin").write_bytes(np.hstack([coarse[:, None], fine[:, None], pixels]).tobytes())
    derive(str(folder / "train.bin"), tmp_path / "d", Derivation(labels="coarse"))
    train, _ = train_and_test(str(tmp_path / "d"))
    assert next(iter(train.read(0, 30))).labels.tolist() == coarse.tolist()
    assert train.layout.coarse is None


def test_coarse_labels_that_there_are_not_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--labels coarse: .* without coarse labels"):
        derive(str(source), tmp_path / "d", Derivation(labels="coarse"))
    assert not (tmp_path / "d").exists()


def test_a_second_time_finds_it_there_and_another_one_is_refused(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "d"
    assert derive(str(source), target, Derivation(shrink=2))
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    assert not derive(str(source), target, Derivation(shrink=2))
    with pytest.raises(UsageError, match="was derived with shrink 2, not 4; choose another folder"):
        derive(str(source), target, Derivation(shrink=4))
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


@pytest.mark.parametrize("shrink", [2, 4])
def test_of_two_derivations_at_once_the_second_looks_again(
    shrink: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """shrink: of the derivation that is done first."""
    target = tmp_path / "d"
    write = derive_module._write

    def write_later(*arguments: Any) -> None:
        monkeypatch.setattr(derive_module, "_write", write)
        assert derive(str(source), target, Derivation(shrink=shrink))
        write(*arguments)

    monkeypatch.setattr(derive_module, "_write", write_later)
    expected: Any = (
        nullcontext() if shrink == 2 else pytest.raises(UsageError, match="was derived with shrink 4, not 2")
    )
    with expected:
        assert not derive(str(source), target, Derivation(shrink=2))


@pytest.mark.parametrize("record", [None, "{", "[]", "3"])
def test_a_folder_with_something_else_is_refused(record: str | None, source: Path, tmp_path: Path) -> None:
    if record is not None:
        (tmp_path / RECORD).write_text(record)
    with pytest.raises(UsageError, match="contains other files"):
        derive(str(source), source if record is None else tmp_path, Derivation())


def test_blocks_need_workers_and_workers_blocks() -> None:
    for values in ({"order": "class-blocks"}, {"workers": 3}):
        with pytest.raises(UsageError, match="need each other"):
            Derivation(**values)


def test_the_command_says_what_it_did(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--input", str(source), "--to", str(tmp_path / "d"), "--shrink", "2"]
    for said in ("written", "already written, nothing to do"):
        assert ended("derive", *command) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'd'}: {said}\n"
    assert pq.read_metadata(tmp_path / "d" / "train.parquet").num_rows == 70


def test_an_input_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("derive", "--input", str(tmp_path / "no"), "--to", str(tmp_path / "d")) == 3
    assert "does not exist; check --input" in capsys.readouterr().err


def test_a_sample_without_evaluation_rows_is_one_side(tmp_path: Path) -> None:
    assert ended("sample", "--to", str(tmp_path / "s"), "--rows", "400", "--test-rows", "0") == 0
    train, test = train_and_test(str(tmp_path / "s"))
    assert (train.rows, test) == (400, None)
