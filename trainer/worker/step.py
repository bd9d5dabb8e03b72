"""A training step of a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pipeline.core.arrays import Ints
from pipeline.core.seeds import Purpose, word
from trainer.config import Config
from trainer.data.batches import Batch, make_batch
from trainer.data.network import TABLE
from trainer.data.sampling import Draw, ValidationRows
from trainer.exchange.neighbours import NeighbourExchange
from trainer.models.build import NetworkAndTask
from trainer.models.devices import compute_reproducibly
from trainer.models.flat_vector import ALIGNMENT, FlatModel
from trainer.models.tasks import hits
from trainer.watchdog import kick
from trainer.worker.regression import regression_gradient

VALIDATION_BATCH = 500  # rows whose losses are computed at once


class DeviceCopies:
    """A model's vectors on a device, with gaps that align its tensors, and the copies from and to the host's.

    Args:
        flat: the aligned layout of the model.
        device: where the vectors are.
    """

    def __init__(self, flat: FlatModel, device: torch.device) -> None:
        places = flat.positions()
        self.values = torch.zeros(flat.length, device=device)
        self.gradients = torch.zeros(flat.length, device=device)
        self._packed = torch.zeros(len(places), device=device)
        self._places = places.to(device)
        sources = torch.zeros(flat.length, dtype=torch.int64)  # gaps get the first element, which nobody reads
        sources[places] = torch.arange(len(places))
        self._sources = sources.to(device)

    def load(self, pulled: torch.Tensor) -> None:
        """Copy the host's vector, float32 [P + Q], into ``values``: one transfer and one kernel."""
        self._packed.copy_(pulled)
        torch.index_select(self._packed, 0, self._sources, out=self.values)

    def store(self, pushed: torch.Tensor) -> None:
        """Copy ``gradients`` into the host's vector, float32 [P + Q]; returns when it is there."""
        torch.index_select(self.gradients, 0, self._places, out=self._packed)
        pushed.copy_(self._packed)


class Step:
    """Computes the gradient of a mini-batch, from the parameters in ``pulled`` into ``pushed``.

    On a CPU the model computes in these vectors without a copy. A GPU has vectors with gaps, so that every tensor is
    aligned; each step copies the parameters there and the gradient back.

    Args:
        config: the run.
        network: the network and its task.
        pulled, pushed: vectors of the host, float32 [P + Q]: parameters or their gradient, then BatchNorm's statistics.
            The pushed statistics have the form that ParameterSlice expects for ``num_workers`` workers.
        device: where the model computes.
        num_workers: workers of the run.

    Attributes:
        outcomes: loss and hit of each example of the last mini-batch, float32 [B] and bool [B]; None if nobody needs
            them.
        row_outcomes: the same, if the run keeps them in its example ledger.
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
        compute_reproducibly(device)
        on_host = device.type == "cpu"
        # Where tensors begin at any element, cuDNN's kernels fail with a misaligned address.
        self.flat = FlatModel(network.model, alignment=1 if on_host else ALIGNMENT)
        self.pushes_changes = config.pushed_statistics(num_workers) == "changes"
        self.pulled = torch.from_numpy(pulled)
        self.pushed = torch.from_numpy(pushed)
        self.copies = None if on_host else DeviceCopies(self.flat, device)
        self.values = self.copies.values if self.copies else self.pulled
        self.gradients = self.copies.gradients if self.copies else self.pushed
        self.flat.attach(self.values, self.gradients[: self.flat.buffers_begin])
        self.outcomes: tuple[np.ndarray, np.ndarray] | None = None
        self.row_outcomes: tuple[np.ndarray, np.ndarray] | None = None
        self._outcomes: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the micro-batches so far
        self._table = self.flat.slot(TABLE)  # of the sampler
        self._regression = regression_gradient(config, network, device)
        self._keeps_outcomes = config.run.example_ledger or config.reads_losses or self._table is not None
        # Servers divide the sum of pushed changes by the number of workers. Neighbours merge no statistics.
        has_servers = not isinstance(config.exchange, NeighbourExchange)
        self._merged_shares = num_workers if self.pushes_changes and has_servers else 1

    @property
    def owned_entries(self) -> tuple[slice, int] | None:
        """The range of the loss table whose changes are pushed as multiples, and the multiple; None for none."""
        sampler = self.config.table_sampler
        is_multiple = self._table is not None and sampler is not None and sampler.pushes_multiples
        return (self.flat.packed_range(TABLE), self._merged_shares) if is_multiple else None

    def read_table(self) -> np.ndarray | None:
        """Return a copy of the sampler's loss table in ``pulled``, float32; None without a table."""
        return self.pulled[self.flat.packed_range(TABLE)].numpy().copy() if self._table else None

    def __call__(
        self,
        batch: Batch,
        dropout_seed: int,
        poll_cancelled: Callable[[], bool] = lambda: False,
        draw: Draw | None = None,
    ) -> tuple[float, int] | None:
        """Compute a gradient and return (mean loss with the L2 term, correct predictions), or None if it was cancelled.

        Gradient and statistics are left in ``pushed``. For an empty mini-batch, which Bernoulli sampling can draw, both
        results and the gradient are 0, and the statistics do not change. If the protocol divides a step into
        micro-batches, their gradients are summed, and poll_cancelled is called between them.

        Args:
            batch: the mini-batch.
            dropout_seed: seeds the dropout.
            poll_cancelled: whether the gradient would be refused.
            draw: the rows of the mini-batch, for the factors of their losses and their entries in the loss table
                (default: no factors, no entries).
        """
        self._seed(dropout_seed)
        if self.copies:
            self.copies.load(self.pulled)
        self.gradients.zero_()
        running = self.values[self.flat.buffers_begin :]
        statistics = self.gradients[self.flat.buffers_begin :]
        # BatchNorm updates ``running`` in the forward pass; "changes" pushes the new statistics minus the old ones.
        if self.pushes_changes:
            statistics -= running
        self._outcomes = []
        weights = torch.from_numpy(draw.weights) if draw and draw.weights is not None else None
        outcome = self._backward(batch, poll_cancelled, weights) if len(batch.labels) else (0.0, 0)
        outcomes = self.outcomes = _joined(self._outcomes) if self._keeps_outcomes else None
        self.row_outcomes = outcomes if self.config.run.example_ledger else None
        if outcome and outcomes and draw and draw.keys is not None:
            self._learn_table(draw.keys, *outcomes)
        if outcome and draw and draw.validation and len(draw.validation.keys):
            self._learn_table(draw.validation.keys, *self._validate(draw.validation), draw.validation.parts)
        statistics += running
        if self.copies:
            self.copies.store(self.pushed)
        return outcome

    @torch.no_grad()
    def _validate(self, validation: ValidationRows) -> tuple[np.ndarray, np.ndarray]:
        """Return loss and hit of each evaluation row at the parameters of the step, by the network in eval mode."""
        self.model.eval()
        outcomes = []
        for begin in range(0, len(validation.rows), VALIDATION_BATCH):
            places = np.arange(begin, min(begin + VALIDATION_BATCH, len(validation.rows)))
            draw = Draw(validation.rows, places)
            images, labels = make_batch(draw, validation.mean)
            kick()
            outputs = self._forward(images.to(self.values.device))
            labels = labels.to(self.values.device)
            outcomes.append((self.task.losses(outputs, labels), hits(self.task, outputs, labels)))
        self.model.train()
        return _joined(outcomes)

    def _learn_table(
        self, keys: Ints, losses: np.ndarray, are_correct: np.ndarray, parts: np.ndarray | None = None
    ) -> None:
        """Update the loss table by measured examples, where BatchNorm's statistics have their new values.

        parts: see ``TableSampler.updated``."""
        sampler = self.config.table_sampler
        assert self._table
        assert sampler
        table = self._table.view(self.values)
        updated = sampler.updated(table.cpu().numpy(), keys, losses, are_correct, self._merged_shares, parts)
        table.copy_(torch.from_numpy(updated))

    def _backward(
        self, batch: Batch, poll_cancelled: Callable[[], bool], weights: torch.Tensor | None
    ) -> tuple[float, int] | None:
        """Add the gradient of a mini-batch with at least one example to ``gradients``, micro-batch by micro-batch.

        Returns (mean loss with the L2 term, correct predictions), or None if the step was cancelled.

        Args:
            batch: the mini-batch.
            poll_cancelled: whether the gradient would be refused.
            weights: factors of the losses, float32 [B]; None for the factor 1.
        """
        images = batch.images_BCHW.to(self.values.device)
        labels = batch.labels.to(self.values.device)
        weights = None if weights is None else weights.to(self.values.device)
        parts = min(self.config.protocol.parts_of_a_step(), len(labels))
        loss, correct = self._gradient(images, labels, weights) if parts == 1 else (torch.zeros(()), torch.zeros(()))
        # Between two micro-batches the worker can give up a step whose gradient would be refused.
        for part in range(parts if parts > 1 else 0):
            if part and poll_cancelled():
                return None
            span = slice(len(labels) * part // parts, len(labels) * (part + 1) // parts)
            # Weighted by examples, because parts may differ by one: the sum is the gradient of the whole mini-batch.
            part_weights = None if weights is None else weights[span]
            share = self._gradient(images[span], labels[span], part_weights, (span.stop - span.start) / len(labels))
            loss = loss + share[0]
            correct = correct + share[1]
        total = loss + self.flat.weight_decay_(self.config.optimiser.weight_decay)
        return float(total), int(correct)

    def _gradient(
        self, images: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None, share: float = 1.0
    ) -> tuple[Any, Any]:
        """Add the gradient of ``share`` times the mean weighted loss; return that loss and the correct predictions."""
        kick()
        losses = None
        if self._regression and weights is None and share == 1.0:
            loss, outputs, losses = self._regression.add(images, labels, by_example=self._keeps_outcomes)
        else:
            loss, outputs = self._differentiate(images, labels, weights, share)
        if not self._keeps_outcomes:
            return loss, self.task.correct(outputs, labels)
        # Beside the loss, whose gradient has the same bits whether the losses of examples are kept or not.
        are_correct = hits(self.task, outputs, labels)
        losses = self.task.losses(outputs, labels) if losses is None else losses
        self._outcomes.append((losses, are_correct))
        return loss, are_correct.sum()

    def _differentiate(
        self, images: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None, share: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the gradient as ``_gradient`` by autograd; return the loss and the outputs."""
        outputs = self._forward(images)
        loss = self.task.loss(outputs, labels) if weights is None else self._weighted_loss(outputs, labels, weights)
        if share != 1.0:
            loss = loss * share
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), outputs.detach()

    def _forward(self, images: torch.Tensor) -> Any:
        """Return the outputs. The numbers of the forward pass decide which ones the backward pass uses."""
        if self.config.run.precision == "fp32":
            return self.model(images)
        with torch.autocast(self.values.device.type, torch.bfloat16):
            outputs = self.model(images)
        return outputs.float()  # a loss of bfloat16 outputs would have two significant digits

    def _weighted_loss(self, outputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (self.task.losses(outputs, labels) * weights).mean()

    def _seed(self, seed: int) -> None:
        """Seed the devices in use as torch.manual_seed does.

        For unused devices torch.manual_seed records a stack trace, which takes more than half of a small step."""
        torch.default_generator.manual_seed(seed)
        if self.values.is_cuda:
            torch.cuda.manual_seed_all(seed)


def _joined(outcomes: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses and hits of a mini-batch. outcomes: of its micro-batches."""
    if not outcomes:
        return np.empty(0, np.float32), np.empty(0, np.bool_)
    columns = zip(*outcomes, strict=True)
    losses, are_correct = (torch.cat(column) if len(column) > 1 else column[0] for column in columns)
    return losses.cpu().numpy(), are_correct.cpu().numpy()


def step_seed(seed: int, worker: int, clock: int) -> int:
    """Return the seed of dropout in a step, the same whenever the step is repeated."""
    return word(seed, Purpose.DROPOUT, worker, clock)
