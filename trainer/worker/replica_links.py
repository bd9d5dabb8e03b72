"""The interfaces of a replica's connections: to other workers, to the memory that they share, and to a collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainer.transport.messages.heads import Body, Message

Vector = npt.NDArray[np.float32]


class SharedRange(Protocol):
    """Memory of another worker on this host. Each method returns None if the memory no longer has that round's data."""

    def piece(self, number: int, version: int, begin: int, end: int) -> Vector | None: ...
    def range_sum(self, number: int, version: int, begin: int, end: int) -> Vector | None: ...


class Links(Protocol):
    """The connections of a worker, and the memory that it shares with workers of its host."""

    def connect(self, members: Sequence[Mapping[str, Any]]) -> None:
        """Connect to the members of a view, and drop the connections to processes that they have replaced."""
        ...

    def send(self, worker: int, message: Message, *bodies: Body) -> None: ...
    def shares_memory(self, worker: int) -> bool: ...
    def memory_of(self, worker: int) -> SharedRange: ...
    def offer_piece(self, number: int, version: int) -> None:
        """Mark the gradient in this worker's memory with its round; number 0 marks it as void."""
        ...

    def offer_sum(self, number: int, version: int) -> None:
        """Mark the sum in this worker's memory with its round; number 0 marks it as void."""
        ...


class Collective(Protocol):
    """Another way to add up gradients, beside which the connections carry reports, views and models only."""

    def open(self, number: int, members: Sequence[Mapping[str, Any]]) -> None:
        """Begin to connect to the members of a view. All operations of earlier views are void."""
        ...

    def close(self) -> None:
        """Give up the view. Its operations may never end, so this does not wait for them."""
        ...

    def start(self, version: int, gradient: Vector, factor: float) -> None:
        """Start to add up a round's gradients, of which this worker's is multiplied by ``factor``. Copies it.

        ``Replica.collected`` takes the sum."""
        ...
