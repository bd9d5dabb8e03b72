"""The stream of mini-batches: every row once a pass, the same at any clock however it is reached, augmented by the image."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.configs import make_config
from tests.support.draws import shuffled
from tests.support.trainer_sets import rows_of, write_shards
from trainer.coordination.passes import WORD, Passes
from trainer.data.augment import PAD, augment, crop_and_flip, normalise
from trainer.data.batches import Batches, build_batches, make_batch
from trainer.data.loading import load_worker
from trainer.data.opening import open_shards
from trainer.data.prefetch import Prefetch
from trainer.data.rows import Rows
from trainer.data.sampling import Draw
from trainer.sampling.bernoulli import bernoulli
from trainer.sampling.orders import indices

torch.set_num_threads(1)
SHAPE = (3, 8, 8)
MEAN = np.array([120.0, 125.5, 7.25], np.float32)


def make(count: int, shape: tuple[int, int, int] = SHAPE) -> Rows:
    rng = np.random.default_rng(count)
    images = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
    return Rows(images, rng.integers(0, 10, count), np.arange(count))


def batches(rows: Rows, batch_size: int = 16, *, seed: int = 1, worker: int = 2, augment: bool = True) -> Batches:
    sampler = shuffled(rows, batch_size, seed=seed, worker=worker)
    return Batches(sampler, MEAN, seed=seed, worker=worker, augment=augment)


@pytest.fixture
def opened() -> Iterator[list[Prefetch[Any]]]:
    ahead: list[Prefetch[Any]] = []
    yield ahead
    for each in ahead:
        each.close()


# Which rows, when


streams = {
    "rows": st.integers(1, 60),
    "batch": st.integers(1, 90),
    "seed": st.integers(0, 2**40),
    "worker": st.integers(0, 300),
}


@given(**streams, passes=st.integers(1, 4))
def test_every_row_is_drawn_exactly_once_a_pass(rows: int, batch: int, seed: int, worker: int, passes: int) -> None:
    clocks = -(-passes * rows // batch)
    stream = np.concatenate([indices(rows, batch, clock, seed, worker) for clock in range(clocks)])
    assert len(stream) == clocks * batch
    for drawn in stream[: passes * rows].reshape(passes, rows):
        assert sorted(drawn.tolist()) == list(range(rows))


@given(**streams, clock=st.integers(0, 10**9))
def test_any_clock_may_be_asked_for_first_or_again(rows: int, batch: int, seed: int, worker: int, clock: int) -> None:
    """Two half batches are the whole one, and what was asked in between changes nothing."""
    whole = indices(rows, 2 * batch, clock, seed, worker)
    halves = [indices(rows, batch, 2 * clock + half, seed, worker) for half in (0, 1)]
    indices(rows, batch, clock // 2, seed, worker)
    assert np.array_equal(whole, np.concatenate(halves))
    assert np.array_equal(whole, indices(rows, 2 * batch, clock, seed, worker))


def test_passes_workers_and_seeds_shuffle_each_in_their_own_way() -> None:
    orders = [
        indices(500, 500, clock, seed, worker) for clock, seed, worker in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    ]
    for at, one in enumerate(orders):
        assert not np.array_equal(one, np.arange(500))
        assert all((one == other).mean() < 0.05 for other in orders[:at])


@given(rows=st.integers(1, 40), batch=st.integers(1, 90), clock=st.integers(0, 50))
def test_a_draw_counts_its_rows_by_pass(rows: int, batch: int, clock: int) -> None:
    """Against a walk over the stream of all draws, row by row."""
    hashes = np.random.default_rng(rows).integers(1, WORD, rows, np.uint64)
    held = Rows(np.zeros((rows, 1, 1, 1), np.uint8), np.zeros(rows, np.int64), np.arange(rows), hashes)
    draw = shuffled(held, batch, seed=3, worker=1).draw(clock)
    begun: list[int] = []
    passes = 0
    for position, row in enumerate(indices(rows, batch, clock, 3, 1), clock * batch):
        begun.append(int(hashes[row]))
        if (position + 1) % rows == 0:
            passes += 1
            begun = []
    seen = draw.seen()
    assert seen
    assert seen.passes == passes
    assert seen.begun == (sum(begun) % WORD if passes else 0)
    assert seen.fingerprint == sum(int(hashes[row]) for row in np.asarray(draw.places)) % WORD


@given(rows=st.integers(1, 12), batch=st.integers(1, 9), missed=st.integers(0, 20), data=st.data())
def test_a_worker_that_returns_reports_the_passes_it_missed(rows: int, batch: int, missed: int, data: Any) -> None:
    """The sums of later passes are as if each missed mini-batch had been counted when it was due."""
    first = data.draw(st.integers(0, 15))
    hashes = np.random.default_rng(rows).integers(1, WORD, rows, np.uint64)
    stream = batches(dataclasses.replace(make(rows), hashes=hashes), batch, worker=0)
    at_once, late = (Passes(1, {}) for _ in range(2))
    whole: list[list[Any]] = [[], []]
    for clock in range(first + missed + 2 * rows):
        sums = stream.sampler.draw(clock).seen()
        assert sums
        is_missed = first <= clock < first + missed
        at_once.miss(0, sums) if is_missed else at_once.use(0, sums)
        if clock == first + missed:
            late.use(0, sums.with_missed(stream.ends_of_passes(first, clock)))
        elif not is_missed:
            late.use(0, sums)
        for ended, passes in zip(whole, (at_once, late), strict=True):
            ended += [(each.last, each.fingerprint) for each in passes.take()]
    later = [[each for each in ended if each[0] > (first + missed + 1) * batch // rows + 1] for ended in whole]
    assert later[0] == later[1]
    assert at_once.state["ended"] == late.state["ended"]


def test_draws_without_passes_or_hashes_count_nothing() -> None:
    assert Draw(make(50), bernoulli(50, 0.5, 3, seed=0, worker=0)).seen() is None
    assert shuffled(make(50), 5, seed=0, worker=0).draw(3).seen() is None, "these rows are not hashed"


@pytest.mark.parametrize(("count", "batch_size"), [(0, 16), (5, 0)])
def test_a_stream_of_nothing_is_refused(count: int, batch_size: int) -> None:
    with pytest.raises(ValueError, match=f"no mini-batches of {batch_size} out of {count} rows"):
        batches(make(count), batch_size)


# What happens to an image


def by_hand(image_CHW: np.ndarray, top: int, left: int, flip: bool) -> np.ndarray:
    """One image at a time, as the paper has it: pad, crop, flip."""
    _, height, width = image_CHW.shape
    padded = np.pad(image_CHW, ((0, 0), (PAD, PAD), (PAD, PAD)))
    cropped = padded[:, top : top + height, left : left + width]
    return np.flip(cropped, axis=2) if flip else cropped


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)),
    draws=st.lists(st.tuples(st.integers(0, 2 * PAD), st.integers(0, 2 * PAD), st.booleans()), min_size=1, max_size=9),
)
def test_a_batch_is_augmented_like_its_images_one_by_one(
    shape: tuple[int, int, int], draws: list[tuple[int, int, bool]]
) -> None:
    images = np.random.default_rng(len(draws)).normal(size=(len(draws), *shape)).astype(np.float32)
    top, left, flip = (np.array(column) for column in zip(*draws, strict=True))
    found = crop_and_flip(images, top, left, flip)
    assert np.array_equal(found, np.stack([by_hand(i, *draw) for i, draw in zip(images, draws, strict=True)]))
    assert found.dtype == np.float32
    assert found.flags.c_contiguous


def test_all_offsets_and_both_directions_are_equally_likely() -> None:
    """Every outcome of one image is told by its pixels; 50 outcomes, chi-square far in the tail at 120."""
    image = np.arange(1, 65, dtype=np.float32).reshape(1, 8, 8)
    outcomes = [by_hand(image, top, left, flip) for top in range(5) for left in range(5) for flip in (False, True)]
    number = {outcome.tobytes(): at for at, outcome in enumerate(outcomes)}
    drawn = augment(np.repeat(image[None], 5000, axis=0), np.random.default_rng(3))
    counts = np.bincount([number[one.tobytes()] for one in drawn], minlength=50)
    assert ((counts - 100) ** 2 / 100).sum() < 120


def test_normalised_images_are_pixels_less_the_mean_on_a_scale_of_one() -> None:
    images = np.asarray(make(20).images_NCHW)
    found = normalise(images, MEAN)
    expected = (images.astype(np.float64) - MEAN[None, :, None, None]) / 255
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert found.dtype == np.float32
    assert found.flags.c_contiguous


# The making of tensors


def test_batches_are_the_images_and_labels_of_the_chosen_rows() -> None:
    rows = make(50)
    made = batches(rows, augment=False)
    for clock in range(8):
        images, labels = made.make(clock).tensors
        chosen = indices(50, 16, clock, 1, 2)
        assert torch.equal(images, torch.from_numpy(normalise(rows.images_NCHW[chosen], MEAN)))
        assert torch.equal(labels, torch.from_numpy(rows.labels[chosen]))
        assert (images.dtype, labels.dtype, images.is_contiguous()) == (torch.float32, torch.int64, True)


def test_the_border_that_a_crop_brings_in_is_the_mean_colour() -> None:
    """Padding comes after mean subtraction: images of exactly the mean colour stay all zero."""
    colour = np.broadcast_to(np.array([120, 125, 7], np.uint8)[:, None, None], (64, *SHAPE))
    rows = Rows(np.ascontiguousarray(colour), np.zeros(64, np.int64), np.arange(64))
    mean = np.array([120, 125, 7], np.float32)
    assert not make_batch(Draw(rows, np.arange(64)), mean, np.random.default_rng(0)).images_BCHW.any()


@pytest.mark.parametrize("other", [{"worker": 3}, {"seed": 2}])
def test_workers_and_seeds_augment_differently(other: dict[str, Any]) -> None:
    """One row only, so that the order cannot tell them apart."""
    mine = batches(make(1), 64)
    one, two = (each.make(0).tensors.images_BCHW for each in (mine, batches(make(1), 64, **other)))
    assert not torch.equal(one, two)
    assert not torch.equal(one, mine.make(1).tensors.images_BCHW)


def test_real_features_pass_unaugmented() -> None:
    pixels = make(9, (1, 1, 28))
    rows = Rows(np.asarray(pixels.images_NCHW, np.float32), pixels.labels, pixels.ids)
    draw = shuffled(rows, 20, seed=0, worker=0).draw(3)
    images = make_batch(draw, np.array([100], np.float32), np.random.default_rng(0)).images_BCHW
    assert images.shape == (20, 1, 1, 28)
    np.testing.assert_array_equal(images.numpy(), rows.images_NCHW[draw.places])


@pytest.mark.parametrize("pixels", [np.uint8, np.float32])
def test_a_mini_batch_of_all_rows_is_a_copy_unless_it_may_share(pixels: type) -> None:
    """Change the tensors of a full mini-batch in place, as a model or an augmentation of the user's own may."""
    made = make(9, (1, 1, 28))
    rows = Rows(np.asarray(made.images_NCHW, pixels), made.labels, made.ids)
    draw = Draw(rows, bernoulli(9, 1.0, 3, seed=0, worker=0))
    mean = np.array([100], np.float32)
    rng = np.random.default_rng(0)
    shared = make_batch(draw, mean, may_share=True)
    assert np.shares_memory(shared.labels.numpy(), rows.labels)
    assert np.shares_memory(shared.images_BCHW.numpy(), rows.images_NCHW) == (pixels is np.float32)
    copied = make_batch(draw, mean)
    for tensor, other in zip(copied, shared, strict=True):
        assert torch.equal(tensor, other)
    for batch in (copied, make_batch(draw, mean, rng, lambda images, rng: images, may_share=True)):
        for tensor in batch:
            tensor.zero_()
    np.testing.assert_array_equal(rows.images_NCHW, made.images_NCHW)
    np.testing.assert_array_equal(rows.labels, made.labels)
    turned = make_batch(Draw(rows, draw.places[::-1]), mean, may_share=True)
    np.testing.assert_array_equal(turned.labels, rows.labels[::-1])


@pytest.mark.parametrize(("model", "may_share"), [("logistic", True), ("tests.support.slow_model:make", False)])
def test_mini_batches_for_an_own_model_are_copies(model: str, may_share: bool, tmp_path: Path) -> None:
    """It may change its input in place."""
    folder = write_shards(tmp_path, [rows_of(9, 1)], None)
    config = make_config(folder, model=model, sampling="bernoulli", batch_size=9)
    opened = open_shards(str(folder))
    made = build_batches(config, opened, load_worker(opened, 0), 0, 1).make(3)
    assert np.shares_memory(made.tensors.labels.numpy(), made.draw.rows.labels) == may_share


# What is made ahead


@pytest.mark.full
@given(clocks=st.lists(st.integers(0, 40), min_size=1, max_size=12), depth=st.integers(0, 3))
def test_a_mini_batch_depends_on_its_clock_alone(clocks: list[int], depth: int) -> None:
    fresh = batches(make(50))
    with Prefetch(batches(make(50)).make, depth=depth) as jumping:
        for clock in clocks:
            found, expected = jumping.get(clock).tensors, fresh.make(clock).tensors
            assert torch.equal(found.images_BCHW, expected.images_BCHW)
            assert torch.equal(found.labels, expected.labels)


def test_the_next_items_are_made_while_the_caller_computes(opened: list[Prefetch[Any]]) -> None:
    done = {clock: threading.Event() for clock in range(3)}
    opened.append(Prefetch(lambda clock: done[clock].set(), depth=2))
    opened[0].get(0)
    assert done[1].wait(30)  # nobody asked for it
    assert done[2].wait(30)


def test_after_a_jump_only_what_follows_is_made(opened: list[Prefetch[Any]]) -> None:
    made: list[int] = []
    opened.append(Prefetch(lambda clock: made.append(clock) or clock, depth=1))  # type: ignore[func-returns-value]
    assert [opened[0].get(clock) for clock in (5, 6, 2, 3, 3)] == [5, 6, 2, 3, 3]
    opened[0].close()
    assert set(made) - {7} <= {2, 3, 4, 5, 6}


def test_what_goes_wrong_in_the_background_is_raised_at_its_clock(opened: list[Prefetch[Any]]) -> None:
    sampler = shuffled(make(50), 16, seed=0, worker=0)
    two_means = np.array([1, 2], np.float32)  # and three channels
    opened.append(Prefetch(Batches(sampler, two_means, seed=0, worker=0, augment=True).make))
    for clock in (0, 1, 0):
        with pytest.raises(ValueError, match="broadcast"):
            opened[0].get(clock)


def test_closing_ends_the_thread_and_refuses_more() -> None:
    before = set(threading.enumerate())
    with Prefetch(batches(make(50)).make) as closing:
        closing.get(0)
        mine = set(threading.enumerate()) - before
        assert len(mine) == 1
    assert not any(thread.is_alive() for thread in mine)
    closing.close()
    with pytest.raises(RuntimeError):
        closing.get(1)
