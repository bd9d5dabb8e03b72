"""An exchange of a user's own, with real processes: a spec, a client and a registry line are all that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pipeline.core.errors import UsageError
from tests.support.draws import shuffled
from tests.support.local_exchange import Local
from tests.support.trainer_runs import train_here
from trainer.data.batches import Batches
from trainer.data.loading import load_worker
from trainer.data.mean_image import subtracted_mean
from trainer.data.opening import open_shards
from trainer.exchange import EXCHANGES
from trainer.models.build import build
from trainer.models.flat_vector import FlatModel
from trainer.models.linear import Logistic
from trainer.simulation.replay import replay

RATE, STEPS, BATCH = 0.05, 12, 24
FLAGS: tuple[Any, ...] = (
    *("--model", "logistic", "--protocol", "bsp", "--batch-size", BATCH, "--steps", STEPS, "--servers", 2),
    *("--learning-rate", RATE, "--momentum", 0, "--weight-decay", 0, "--recipe", "constant", "--no-augment"),
    *("--threads", 1, "--device", "cpu", "--quiet", "--no-report"),
)


def trained_alone(shards: Path, worker: int, workers: int) -> npt.NDArray[np.float32]:
    """The oracle: torch's own loop on the rows of one worker."""
    found = open_shards(str(shards))
    model = build(Logistic(), found.inputs, seed=0).model
    optimiser = torch.optim.SGD(model.parameters(), RATE)
    sampler = shuffled(load_worker(found, worker), BATCH // workers, seed=0, worker=worker)
    batches = Batches(sampler, subtracted_mean(found), seed=0, worker=worker, augment=False)
    for clock in range(STEPS):
        images, labels = batches.make(clock).tensors
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimiser.step()
    return FlatModel(model).read()


@pytest.mark.full
def test_an_exchange_of_ones_own_trains_with_real_processes(
    sets: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers train alone, and the servers end with the mean of their models."""
    monkeypatch.setitem(EXCHANGES, Local.name, Local)
    run = train_here(sets[3], tmp_path / "local", *FLAGS, "--exchange", "local")
    alone = [trained_alone(sets[3], worker, 3) for worker in range(3)]
    np.testing.assert_allclose(run.vector(), np.mean(alone, axis=0), rtol=1e-4, atol=1e-5)
    assert run.result()["updates"] == STEPS
    (start,) = run.events("start")
    assert start["config"]["exchange"] == {"name": "local", "own_share": 1.0}

    # Without a share of its own model, a worker computes at the servers' parameters: the default exchange.
    shared = train_here(sets[3], tmp_path / "shared", *FLAGS, "--exchange", "local", "--own-share", 0)
    usual = train_here(sets[3], tmp_path / "usual", *FLAGS)
    np.testing.assert_array_equal(shared.vector(), usual.vector())
    assert not np.allclose(run.vector(), usual.vector(), rtol=1e-4, atol=1e-5)
    with pytest.raises(UsageError, match="exchanged gradients by local, which a replay cannot compute"):
        replay(tmp_path / "local")
    assert replay(tmp_path / "usual").is_equal
