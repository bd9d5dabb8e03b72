"""Vectors as bodies of messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.transport.malformed import MalformedMessageError


def to_body(vector: npt.NDArray[Any]) -> memoryview:
    """Return the bytes of a vector, without a copy if it is contiguous."""
    return np.ascontiguousarray(vector).data.cast("B")


def from_body(body: bytes | memoryview, elements: int) -> npt.NDArray[np.float32]:
    """Return the numbers of a body, float32 [elements], without a copy. Raises MalformedMessageError for another length."""
    if len(body) != 4 * elements:
        raise MalformedMessageError(f"{len(body)} bytes for {elements} elements")
    return np.frombuffer(body, np.float32)
