"""Where a process of a run computes."""

from __future__ import annotations

import torch

from pipeline.core.errors import UsageError

EVALUATOR = -1  # its place: the last card, which the first workers leave free where there are several


def device_of(wanted: str, place: int, cards: int) -> str:
    """auto: a card where there is one. place: among the workers of this host, which spread over its cards. Raises
    UsageError where there is no card and one is wanted. Pure."""
    if wanted == "cuda" and not cards:
        raise UsageError("--device cuda: torch finds no GPU on this host; give --device cpu, or auto")
    return f"cuda:{place % cards}" if cards and wanted != "cpu" else "cpu"


def pick_device(wanted: str, place: int) -> torch.device:
    """The device of one process of this host. Raises UsageError."""
    cards = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    return torch.device(device_of(wanted, place, cards))
