"""Messages of every exchange among workers: between a worker and server 0, and the model for a newcomer."""

from __future__ import annotations

from typing import NamedTuple


class PeerJoin(NamedTuple):
    """A worker has left its view and asks to take part in the next. To server 0. Bodies: an introduction; its rounds.

    The introduction has the address at which other workers reach it, and the snapshots of which it keeps a copy. The
    rounds are those that server 0 has not settled, up to the version that the worker holds.

    Attributes:
        process: a random number of the worker's process.
        number: of the Regroup that this answers, 0 before the first.
        generation: of the model that the worker holds.
        holds: version of that model plus one; 0 for none.
    """

    worker: int
    process: int
    number: int
    generation: int
    holds: int


class PeerBeat(NamedTuple):
    """A worker is alive. To server 0, on a connection of its own. number: of its view."""

    worker: int
    process: int
    number: int


class RoundReport(NamedTuple):
    """The last rounds that a worker has completed, up to a version. To server 0. Bodies: none; the rounds.

    In all-reduce only worker 0 sends the rounds themselves, because they are the same on all workers.

    number: of the view; among neighbours the session of the sender."""

    worker: int
    process: int
    number: int
    version: int


class LinkLoss(NamedTuple):
    """A worker's connection to another worker broke, so that messages of the view may be lost. To server 0."""

    worker: int
    process: int
    number: int


class Regroup(NamedTuple):
    """A worker must leave its view and answer with a PeerJoin of this number. From server 0."""

    number: int


class Replacement(NamedTuple):
    """A later process has taken the place of this one, which must end. From server 0."""

    process: int


class RunEnd(NamedTuple):
    """The run is over. From server 0."""

    number: int


class ModelCopy(NamedTuple):
    """The model with which a view begins, to a member that lacks it. Bodies: values and momentum, float32.

    Among neighbours it is for a single worker, and an empty momentum is 0.

    number: of the view; among neighbours the session of the addressee."""

    number: int
    version: int
