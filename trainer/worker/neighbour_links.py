"""The members of a view among neighbours, and the interface of a worker's connections to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.transport.messages.heads import Body, Message


class NeighbourLinks(Protocol):
    """The connections of a worker to its neighbours."""

    def connect(self, members: Sequence[Mapping[str, Any] | None]) -> None:
        """Connect to the neighbours of a view, and drop all other connections."""
        ...

    def send(self, worker: int, message: Message, *bodies: Body) -> None: ...


@dataclass(frozen=True)
class PeerEntry:
    """A member of a view.

    Attributes:
        session: number of its membership, which grows with every one.
        process: a random number that identifies its process.
        first: the first round in which it takes part.
        source: the worker that sends it its first model; None if that is server 0.
        missed_from: the first round that the worker has missed before; None if it has missed none.
        reach: address, host and memory of its process.
    """

    session: int
    process: int
    first: int
    source: int | None
    missed_from: int | None
    reach: Mapping[str, Any]

    def to_links(self) -> dict[str, Any]:
        """Return the member as NeighbourLinks.connect needs it."""
        return {"process": self.process, **self.reach}
