"""A training step of a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pipeline.core.seeds import Purpose, word
from trainer.config import Config
from trainer.data.batches import Batch
from trainer.models.build import NetworkAndTask
from trainer.models.flat_vector import FlatModel
from trainer.watchdog import kick


class Step:
    """Computes the gradient of a mini-batch, from the parameters in ``pulled`` into ``pushed``.

    On a CPU the model computes in these vectors without a copy; on a GPU each is copied once per step.

    Args:
        config: the run.
        built: the network and its task.
        pulled, pushed: vectors of the host, float32 [P + Q]: parameters or their gradient, then BatchNorm's statistics.
            The pushed statistics have the form that ParameterSlice expects for ``num_workers`` workers.
        device: where the model computes.
        num_workers: workers of the run.
    """

    def __init__(
        self,
        config: Config,
        network: NetworkAndTask,
        pulled: np.ndarray,
        pushed: np.ndarray,
        device: torch.device,
        num_workers: int,
    ) -> None:
        self.config = config
        self.model = network.model
        self.task = network.task
        self.flat = FlatModel(network.model)
        self.pushes_changes = config.pushed_statistics(num_workers) == "changes"
        self.pulled = torch.from_numpy(pulled)
        self.pushed = torch.from_numpy(pushed)
        on_host = device.type == "cpu"
        self.values = self.pulled if on_host else torch.zeros_like(self.pulled, device=device)
        self.gradients = self.pushed if on_host else torch.zeros_like(self.pushed, device=device)
        self.flat.attach(self.values, self.gradients[: self.flat.num_parameters])

    def __call__(
        self, batch: Batch, dropout_seed: int, is_cancelled: Callable[[], bool] = lambda: False
    ) -> tuple[float, int] | None:
        """Compute a gradient and return (mean loss with the L2 term, correct predictions), or None if it was cancelled.

        Gradient and statistics are left in ``pushed``. For an empty mini-batch, which Bernoulli sampling can draw, both
        results and the gradient are 0, and the statistics do not change. If the protocol divides a step into
        micro-batches, their gradients are summed, and is_cancelled is called between them."""
        self._seed(dropout_seed)
        self._copy(self.values, self.pulled)
        self.gradients.zero_()
        running = self.values[self.flat.num_parameters :]
        statistics = self.gradients[self.flat.num_parameters :]
        # BatchNorm updates ``running`` in the forward pass; "changes" pushes the new statistics minus the old ones.
        if self.pushes_changes:
            statistics -= running
        outcome = self._backward(batch, is_cancelled) if len(batch.labels) else (0.0, 0)
        statistics += running
        self._copy(self.pushed, self.gradients)
        return outcome

    def _backward(self, batch: Batch, is_cancelled: Callable[[], bool]) -> tuple[float, int] | None:
        """Add the gradient of a mini-batch with at least one example to ``gradients``, micro-batch by micro-batch.

        Returns (mean loss with the L2 term, correct predictions), or None if the step was cancelled."""
        images = batch.images_BCHW.to(self.values.device)
        labels = batch.labels.to(self.values.device)
        parts = min(self.config.protocol.parts_of_a_step(), len(labels))
        loss, correct = self._gradient(images, labels) if parts == 1 else (torch.zeros(()), torch.zeros(()))
        # Between two micro-batches the worker can give up a step whose gradient would be refused.
        for part in range(parts if parts > 1 else 0):
            if part and is_cancelled():
                return None
            span = slice(len(labels) * part // parts, len(labels) * (part + 1) // parts)
            # Weighted by examples, because parts may differ by one: the sum is the gradient of the whole mini-batch.
            share = self._gradient(images[span], labels[span], (span.stop - span.start) / len(labels))
            loss = loss + share[0]
            correct = correct + share[1]
        total = loss + self.flat.weight_decay_(self.config.optimiser.weight_decay)
        return float(total), int(correct)

    def _gradient(self, images: torch.Tensor, labels: torch.Tensor, share: float = 1.0) -> tuple[Any, Any]:
        """Add the gradient of ``share`` times the mean loss; return that loss and the correct predictions."""
        kick()
        outputs = self.model(images)
        loss = self.task.loss(outputs, labels)
        if share != 1.0:
            loss = loss * share
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), self.task.correct(outputs.detach(), labels)

    def _seed(self, seed: int) -> None:
        """Seed the devices in use as torch.manual_seed does.

        For unused devices torch.manual_seed records a stack trace, which takes more than half of a small step."""
        torch.default_generator.manual_seed(seed)
        if self.values.is_cuda:
            torch.cuda.manual_seed_all(seed)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target is not source:
            target.copy_(source)


def step_seed(seed: int, worker: int, clock: int) -> int:
    """Return the seed of dropout in a step, the same whenever the step is repeated."""
    return word(seed, Purpose.DROPOUT, worker, clock)
