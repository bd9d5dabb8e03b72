"""Dropout whose mask costs one random byte per element, drawn eight at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEVELS = 256  # values of a byte


class Dropout(nn.Module):
    """A fast torch.nn.Dropout for rates that are multiples of 1/256. Elements are dropped independently.

    torch draws a double per element, which takes a seventh of a small network's step. This mask is drawn from torch's
    generator of the device, in the order of elements in memory, so that the same seed gives the same mask. Raises
    ValueError for other rates."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1 or rate * LEVELS != int(rate * LEVELS):
            raise ValueError(f"a dropout rate of {rate} is no number of 256ths below 1")
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        if not (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)):
            x = x.contiguous()
        # One random 64-bit word has the bytes of eight elements; a byte below 256 * rate drops its element.
        words = torch.empty(-(-x.numel() // 8), dtype=torch.int64, device=x.device).random_(-(2**63), None)
        random_bytes = words.view(torch.uint8)[: x.numel()].as_strided(x.size(), x.stride())
        mask: Tensor = (random_bytes >= int(self.rate * LEVELS)).to(x.dtype).mul_(1 / (1 - self.rate))
        return x * mask

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
