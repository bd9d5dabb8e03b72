"""The resumable training of the auto-encoder: a step depends only on the seed, its number and the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors.torch import load, save

from pipeline.core.errors import JobError
from pipeline.core.seeds import Purpose, word
from trainer.data.augment import Floats, normalise
from trainer.embed.options import Embedding
from trainer.models.devices import compute_reproducibly, preserve_generator
from trainer.models.networks.autoencoder import AutoEncoder
from trainer.sampling.orders import indices, permutation
from trainer.tables.rows import Images

STEP = "step"
TOLD_ROWS = 2000  # most rows for the share of explained variance
ENCODED_NUMBERS = 500 * 3 * 32 * 32  # channel values per forward pass, which takes at least one image

Advanced = Callable[[int, float], None]  # (steps done, loss)


def build_network(shape: tuple[int, int, int], seed: int, device: torch.device) -> AutoEncoder:
    """Return the network, initialised from a seed. Does not change the state of torch's generator."""
    with preserve_generator():
        torch.default_generator.manual_seed(word(seed, Purpose.INITIALISATION))
        model = AutoEncoder(shape)
    return model.to(device)


class Fitting:
    """The training of an auto-encoder.

    Attributes:
        images: uint8 [rows, C, H, W].
        mean: float32 [C], the means of the channels of ``images``, which are subtracted.
        model: the network.
        steps: steps of the whole training.
        step: steps so far.
    """

    def __init__(self, embedding: Embedding, images: Images, device: torch.device) -> None:
        self.embedding = embedding
        self.images = images
        compute_reproducibly(device)
        self.device = device
        # Integer sums are the same on every machine.
        self.mean: Floats = (images.sum(axis=(0, 2, 3), dtype=np.int64) / images[:, 0].size).astype(np.float32)
        self.model = build_network((images.shape[1], images.shape[2], images.shape[3]), embedding.seed, device)
        self.optimiser = torch.optim.Adam(
            self.model.parameters(), lr=embedding.learning_rate, weight_decay=embedding.weight_decay, foreach=True
        )
        self.steps = max(1, math.ceil(embedding.epochs * len(images) / embedding.batch_size))
        self.step = 0

    def tensor(self, images: Images) -> torch.Tensor:
        """Return the network's input for images, float32 [rows, C, H, W] on the device."""
        return torch.from_numpy(normalise(images, self.mean)).to(self.device)

    def run(self, advanced: Advanced) -> None:
        """Run the remaining steps. Raises JobError if the loss is not finite.

        advanced: called after each step with the number of steps so far and the loss."""
        embedding = self.embedding
        # Two entries: a mini-batch can contain the end of one pass and the beginning of the next.
        order = lru_cache(maxsize=2)(partial(permutation, len(self.images), embedding.seed, 0))
        self.model.train()
        while self.step < self.steps:
            rows = indices(len(self.images), embedding.batch_size, self.step, embedding.seed, 0, order)
            batch = self.tensor(self.images[rows])
            self.optimiser.zero_grad()
            loss = F.mse_loss(self.model(batch), batch, reduction="sum") / len(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            value = loss.item()
            if not math.isfinite(value):
                raise JobError(
                    f"the loss is {value} at step {self.step}: use a lower --learning-rate than {embedding.learning_rate:g}"
                )
            self.optimiser.step()
            self.step += 1
            advanced(self.step, value)

    @torch.no_grad()
    def encode(self, images: Images) -> npt.NDArray[np.float32]:
        """Return the embeddings, float32 [rows, code_length], with the running statistics of BatchNorm."""
        self.model.eval()
        parts = [self.model.encode(self.tensor(part)).cpu().numpy() for part in _parts(images)]
        return np.concatenate(parts)

    @torch.no_grad()
    def explained_variance(self) -> float:
        """Return the share of the variance that the network reconstructs, over at most TOLD_ROWS rows.

        0 is as good as the mean image, 1 is perfect."""
        self.model.eval()
        images = self.images[:: max(1, len(self.images) // TOLD_ROWS)][:TOLD_ROWS]
        # The total variance is the sum of squares without the share of the mean image.
        squares = sum(int((part.astype(np.int64) ** 2).sum()) for part in _parts(images))
        means = (images.sum(axis=0, dtype=np.int64).astype(np.float64) ** 2).sum() / len(images)
        total = (squares - means) / 255**2
        residual = sum(
            float(((self.model(batch) - batch).double() ** 2).sum()) for batch in map(self.tensor, _parts(images))
        )
        # Equal images leave nothing to explain, but the network may not be able to reconstruct them yet.
        return float(1 - residual / total) if total else float(residual == 0)

    def checkpoint(self) -> bytes:
        """Return parameters, running statistics, Adam's averages and the number of steps as a safetensors file."""
        tensors = {STEP: torch.tensor(self.step)} | _add_prefix("model", self.model.state_dict())
        for number, state in self.optimiser.state_dict()["state"].items():
            tensors |= _add_prefix(f"adam.{number}", state)
        data: bytes = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        return data

    def restore(self, data: bytes) -> None:
        """Continue from the result of ``checkpoint``."""
        tensors = load(data)
        self.step = int(tensors[STEP])
        self.model.load_state_dict(_strip_prefix("model", tensors))
        whole = self.optimiser.state_dict()
        whole["state"] = {
            number: _strip_prefix(f"adam.{number}", tensors) for number in whole["param_groups"][0]["params"]
        }
        self.optimiser.load_state_dict(whole)


def _parts(images: Images) -> list[Images]:
    """Cut images into parts for a forward pass each."""
    rows = max(1, ENCODED_NUMBERS // images[0].size)
    return [images[low : low + rows] for low in range(0, len(images), rows)]


def _add_prefix(prefix: str, tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def _strip_prefix(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    start = f"{prefix}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
