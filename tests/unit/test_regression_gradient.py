"""The written-out gradient of regressions against autograd, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.configs import make_config
from trainer.data.batches import Batch
from trainer.models.build import NetworkAndTask
from trainer.models.networks.linear import linear
from trainer.models.tasks import CLASSIFICATION, LEAST_SQUARES, Task
from trainer.worker.step import Step


def labels_of(kind: str, rows: int, outputs: int, generator: torch.Generator) -> torch.Tensor:
    if kind == "targets":
        return torch.randn(rows, outputs, generator=generator)
    return torch.randint(2 if kind == "one logit" else outputs, (rows,), generator=generator)


def gradient(
    task: Task,
    shape: tuple[int, int, int],
    outputs: int,
    batch: Batch,
    values: np.ndarray,
    *,
    written_out: bool,
    **flags: bool,
) -> tuple[object, ...]:
    """Return (loss, correct), the gradient's bytes and the losses of the examples of a step."""
    network = NetworkAndTask(linear(shape, outputs, intercept=flags.get("intercept", True)), task)
    config = make_config(Path("shards"), Path("run"), model="linear", example_ledger=flags.get("ledger", False))
    pushed = np.full(len(values), 7, np.float32)  # of an earlier step
    step = Step(config, network, values.copy(), pushed, torch.device("cpu"), 3)
    assert step._regression
    if not written_out:
        step._regression = None
    outcome = step(batch, 1)
    losses = step.row_outcomes
    return outcome, pushed.tobytes(), losses and tuple(column.tobytes() for column in losses)


@given(
    kind=st.sampled_from(["targets", "one-hot", "one logit", "logits"]),
    rows=st.integers(1, 300),
    side=st.integers(1, 9),
    outputs=st.integers(2, 11),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    intercept=st.booleans(),
    ledger=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_gradient_written_out_has_the_bits_of_autograd(
    kind: str, rows: int, side: int, outputs: int, scale: float, intercept: bool, ledger: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    outputs = 1 if kind == "one logit" else outputs
    task = LEAST_SQUARES if kind in ("targets", "one-hot") else CLASSIFICATION
    images = torch.randn(rows, 2, side, side, generator=generator)
    batch = Batch(images, labels_of(kind, rows, outputs, generator))
    size = outputs * (2 * side * side + intercept)
    values = (scale * torch.randn(size, generator=generator)).numpy()
    found, expected = (
        gradient(task, (2, side, side), outputs, batch, values, written_out=way, intercept=intercept, ledger=ledger)
        for way in (True, False)
    )
    assert found == expected
