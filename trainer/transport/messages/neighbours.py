"""Messages of an exchange among neighbours: between two workers, and between a worker and server 0."""

from __future__ import annotations

from typing import NamedTuple


class NeighbourView(NamedTuple):
    """The workers of a run in which each has a model of its own. From server 0. Body: members, and the plan of links.

    number: grows with every view."""

    number: int
    generation: int


class RoundGrant(NamedTuple):
    """The rounds below ``until`` may begin. From server 0. Body: see PeerTraining.grant_details.

    Attributes:
        number: of the view that belongs to it.
        received: one more than the rounds of the addressee that server 0 has; 0 if it does not know of a first model.
    """

    number: int
    generation: int
    until: int
    received: int


class NeighbourModel(NamedTuple):
    """A worker's model in a round, to its neighbours in that round. Body: the parameters, float32.

    session: of the sender."""

    session: int
    worker: int
    round: int


class ReplicaCopy(NamedTuple):
    """A worker's model at a version, for a checkpoint. To server 0. Bodies: values and momentum, float32."""

    worker: int
    process: int
    session: int
    version: int
