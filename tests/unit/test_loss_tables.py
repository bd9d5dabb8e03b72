"""Entries of loss tables: how mini-batches change them, and the weights of rows and groups by them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy

from tests.support.configs import make_config
from tests.support.samplers import TABLE, population_of
from tests.support.trainer_sets import CLASSES, SHAPE, rows_of
from trainer.data.batches import make_batch
from trainer.data.sampling import Draw
from trainer.models.base import ModelInput
from trainer.models.build import build
from trainer.models.flat_vector import FlatModel
from trainer.sampling.base import LossTable, Population
from trainer.sampling.data_aware import DataAwareSampler, ShardGroups
from trainer.sampling.recency import RecencySampler
from trainer.sampling.sliding_window import SlidingWindowSampler
from trainer.worker.step import Step


def groups_of(population: Population) -> ShardGroups:
    keys, sizes = np.unique(population.labels, return_counts=True)
    return ShardGroups(keys.astype(np.int64), [], sizes / sizes.sum())


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    uniform_share=st.floats(0.05, 1.0),
    scale=st.floats(0.01, 100),
)
def test_a_group_keeps_its_part_of_the_uniform_draws(sizes: list[int], uniform_share: float, scale: float) -> None:
    """Probabilities sum to 1, each is at least e n / N, and equal weakness means uniform draws."""
    groups = groups_of(population_of(sizes))
    sampler = DataAwareSampler(uniform_share=uniform_share)
    probabilities = sampler.probabilities(groups, TABLE)
    assert probabilities.sum() == pytest.approx(1)
    assert (probabilities >= uniform_share * groups.shares * (1 - 1e-9)).all()
    for table in (np.full(100, scale, np.float32), np.zeros(100, np.float32)):
        np.testing.assert_allclose(sampler.probabilities(groups, table), groups.shares, rtol=1e-6)


def test_unbiased_draws_have_the_mean_of_all_rows() -> None:
    """Monte Carlo: the weighted mean of any number of a row is its mean over the shard; without weights it is not."""
    population = population_of([40, 25, 3, 1], batch=20)
    values = np.where(population.labels == 0, 5.0, 1.0)
    means: dict[bool, list[float]] = {True: [], False: []}
    for unbiased, found in means.items():
        stream = DataAwareSampler(unbiased=unbiased).table_stream(population)
        for clock in range(5, 3005):
            selection = stream(clock, TABLE)
            weights = selection.weights if selection.weights is not None else np.ones(20)
            found.append(float((weights * values[selection.places]).mean()))
    error = np.std(means[True]) / 3000**0.5
    assert abs(np.mean(means[True]) - values.mean()) < 4 * error
    assert abs(np.mean(means[False]) - values.mean()) > 10 * error


@pytest.mark.parametrize("protocol", ["bsp", "k-batch-bsp"])
def test_weights_multiply_losses_in_the_gradient(protocol: str) -> None:
    """In one piece and in micro-batches, beside torch's gradient of the weighted mean."""
    config = make_config(model="logistic", protocol=protocol, weight_decay=0.0)
    network, other = (build(config.model, ModelInput(SHAPE, CLASSES), 0) for _ in range(2))
    pulled = FlatModel(network.model).read()
    pushed = np.zeros_like(pulled)
    step = Step(config, network, pulled, pushed, torch.device("cpu"), 1)
    rows = rows_of(7, 5)
    weights = np.linspace(0.25, 2, 7, dtype=np.float32)
    batch = make_batch(Draw(rows, np.arange(7)), np.zeros(3, np.float32))
    outcome = step(batch, 0, draw=Draw(rows, np.arange(7), weights=weights))
    losses = torch.nn.functional.cross_entropy(other.model(batch.images_BCHW), batch.labels, reduction="none")
    loss = (losses * torch.from_numpy(weights)).mean()
    expected = torch.cat([each.reshape(-1) for each in torch.autograd.grad(loss, list(other.model.parameters()))])
    np.testing.assert_allclose(pushed, expected.numpy(), rtol=1e-4, atol=1e-7)
    assert outcome
    assert outcome[0] == pytest.approx(float(loss.detach()), rel=1e-5)


def test_an_entry_is_a_running_mean_of_its_groups_losses() -> None:
    table = np.array([1.0, 2.0, 3.0], np.float32)
    keys, losses = np.array([2, 0, 2]), np.array([1.0, 0.5, 2.0], np.float32)
    hits = np.array([True, True, False])
    loss = DataAwareSampler().updated(table, keys, losses, hits, 4)
    np.testing.assert_allclose(loss, [0.95, 2.0, 2.7 + 0.15], rtol=1e-6)
    error = DataAwareSampler(weakness="error").updated(table, keys, losses, hits, 4)
    np.testing.assert_allclose(error, [0.9, 2.0, 2.7 + 0.05], rtol=1e-6)


def test_an_entry_of_one_owner_is_its_last_loss_after_the_merge() -> None:
    """Servers add a fourth of the change, if there are four workers."""
    table = np.array([-1.0, 2.0, 3.0], np.float32)
    updated = RecencySampler().updated(
        table, np.array([0, 2, 0]), np.array([9, 8, 7], np.float32), np.zeros(3, bool), 4
    )
    np.testing.assert_allclose(table + (updated - table) / 4, [7, 2, 8], rtol=1e-6)


def test_rows_that_were_never_drawn_come_first() -> None:
    population = replace(population_of([9]), numbers=np.arange(9))
    losses: LossTable = np.array([5, 4, 3, -1, 2, -1, 1, 0.5, 0.25], np.float32)
    order = np.argsort(-RecencySampler(pressure=10).logits(losses)).tolist()
    assert order == [3, 5, 0, 1, 2, 4, 6, 7, 8]
    assert len(population) == 9


def test_entropies_are_those_of_the_last_predictions() -> None:
    """Four rows, one prediction after the other, beside windows that Python keeps; servers divide by three workers."""
    sampler = SlidingWindowSampler(window=3, pressure=100)
    rng = np.random.default_rng(1)
    table = np.ones(4, np.float32)
    windows: list[list[bool]] = [[] for _ in range(4)]
    for _ in range(30):
        keys = rng.choice(4, 2, replace=False)
        hits = rng.random(2) < 0.5
        updated = sampler.updated(table, keys, np.zeros(2, np.float32), hits, 3)
        table = table + (updated - table) * np.float32(1 / 3)
        for key, hit in zip(keys.tolist(), hits.tolist(), strict=True):
            windows[key] = [*windows[key], hit][-3:]
        shares = [np.mean(window) if window else 0.5 for window in windows]
        entropies = [entropy([share, 1 - share], base=2) for share in shares]
        np.testing.assert_allclose(sampler.logits(table), np.log(100) * np.array(entropies), atol=1e-12)
