"""The evaluation of a network in training mode, on augmented images, as some published results were measured.

In the code of importance-aware training (Sheikholeslami et al., DAIS 2023) evaluation images pass the augmentation of
training images, and the network stays in training mode: BatchNorm normalises each batch by its own statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from pipeline.core.seeds import Purpose, generator, word
from trainer.data.augment import augment
from trainer.data.batches import Batch


@contextmanager
def enter_training_mode(model: nn.Module, seed: int, version: int) -> Iterator[None]:
    """Put a model into training mode, with dropout seeded, and restore its statistics and torch's generator afterwards.

    Args:
        model: the model, on the CPU or a GPU.
        seed: of the run.
        version: of the parameters, so that each evaluation draws its own numbers.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.random.fork_rng():
        torch.manual_seed(word(seed, Purpose.EVALUATION, 1, version))
        model.train()
        try:
            yield
        finally:
            model.eval()
            with torch.no_grad():
                for buffer, before in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(before)


def augmented(batches: Iterator[Batch], seed: int, version: int) -> Iterator[Batch]:
    """Yield batches with their images cropped and flipped at random.

    Args:
        batches: normalised images float32 [B, C, H, W] with their labels.
        seed, version: as in ``enter_training_mode``.
    """
    rng: np.random.Generator = generator(seed, Purpose.EVALUATION, 0, version)
    for images, labels in batches:
        yield Batch(torch.from_numpy(augment(images.numpy(), rng)), labels)
