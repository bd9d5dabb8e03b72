"""The auto-encoder learns, resumably: a step is a function of the seed and its number, and a checkpoint holds the rest."""

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
from trainer.data.batches import indices, permutation
from trainer.embed.options import Embedding
from trainer.embed.rows import Images
from trainer.models.networks.autoencoder import AutoEncoder

STEP = "step"
TOLD_ROWS = 2000  # that the share of explained variance is told of
ENCODED_NUMBERS = 500 * 3 * 32 * 32  # of the images that go through the network at a time, and one image at least

Advanced = Callable[[int, float], None]  # (steps done, loss)


def made(shape: tuple[int, int, int], seed: int, device: torch.device) -> AutoEncoder:
    """The network, drawn from a seed; torch's generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(word(seed, Purpose.INITIALISATION))
        model = AutoEncoder(shape)
    return model.to(device)


class Fitting:
    """images: uint8 [rows, C, H, W], whose channels' means are taken off."""

    def __init__(self, asked: Embedding, images: Images, device: torch.device) -> None:
        self.asked, self.images, self.device = asked, images, device
        # Sums of integers: the same on every machine.
        self.mean: Floats = (images.sum(axis=(0, 2, 3), dtype=np.int64) / images[:, 0].size).astype(np.float32)
        self.model = made((images.shape[1], images.shape[2], images.shape[3]), asked.seed, device)
        self.optimiser = torch.optim.Adam(
            self.model.parameters(), lr=asked.learning_rate, weight_decay=asked.weight_decay, foreach=True
        )
        self.steps = max(1, math.ceil(asked.epochs * len(images) / asked.batch_size))
        self.done = 0

    def tensor(self, images: Images) -> torch.Tensor:
        return torch.from_numpy(normalise(images, self.mean)).to(self.device)

    def run(self, advanced: Advanced) -> None:
        """The steps that are left. Raises JobError where the loss is no finite number."""
        asked = self.asked
        order = lru_cache(maxsize=2)(partial(permutation, len(self.images), asked.seed, 0))
        self.model.train()
        while self.done < self.steps:
            rows = indices(len(self.images), asked.batch_size, self.done, asked.seed, 0, order)
            batch = self.tensor(self.images[rows])
            self.optimiser.zero_grad()
            loss = F.mse_loss(self.model(batch), batch, reduction="sum") / len(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            value = loss.item()
            if not math.isfinite(value):
                raise JobError(
                    f"the loss is {value} at step {self.done}: use a lower --learning-rate than {asked.learning_rate:g}"
                )
            self.optimiser.step()
            self.done += 1
            advanced(self.done, value)

    @torch.no_grad()
    def encode(self, images: Images) -> npt.NDArray[np.float32]:
        """float32 [rows, code_length], by the running statistics of BatchNorm."""
        self.model.eval()
        parts = [self.model.encode(self.tensor(part)).cpu().numpy() for part in _parts(images)]
        return np.concatenate(parts)

    @torch.no_grad()
    def explained(self) -> float:
        """The share of the variance of up to TOLD_ROWS of its rows that it reconstructs: 0 is the mean image, 1 all."""
        self.model.eval()
        images = self.images[:: max(1, len(self.images) // TOLD_ROWS)][:TOLD_ROWS]
        squares = sum(int((part.astype(np.int64) ** 2).sum()) for part in _parts(images))
        means = (images.sum(axis=0, dtype=np.int64).astype(np.float64) ** 2).sum() / len(images)
        total = (squares - means) / 255**2
        left = sum(
            float(((self.model(batch) - batch).double() ** 2).sum()) for batch in map(self.tensor, _parts(images))
        )
        return float(1 - left / total) if total else 1.0

    def checkpoint(self) -> bytes:
        """Parameters, running statistics, Adam's averages and the number of steps."""
        found = {STEP: torch.tensor(self.done)} | _prefixed("model", self.model.state_dict())
        for number, state in self.optimiser.state_dict()["state"].items():
            found |= _prefixed(f"adam.{number}", state)
        data: bytes = save({name: tensor.detach().cpu().contiguous() for name, tensor in found.items()})
        return data

    def restore(self, data: bytes) -> None:
        found = load(data)
        self.done = int(found[STEP])
        self.model.load_state_dict(_below("model", found))
        whole = self.optimiser.state_dict()
        whole["state"] = {number: _below(f"adam.{number}", found) for number in whole["param_groups"][0]["params"]}
        self.optimiser.load_state_dict(whole)


def _parts(images: Images) -> list[Images]:
    rows = max(1, ENCODED_NUMBERS // images[0].size)
    return [images[low : low + rows] for low in range(0, len(images), rows)]


def _prefixed(prefix: str, tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def _below(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    start = f"{prefix}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
