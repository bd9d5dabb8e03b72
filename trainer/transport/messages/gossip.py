"""Messages with examples that workers exchange."""

from __future__ import annotations

from typing import NamedTuple


class GossipOffer(NamedTuple):
    """A worker's examples for all others. To server 0. Body: the examples.

    epoch: the worker's epoch by whose losses they were selected."""

    worker: int
    session: int
    epoch: int


class GossipPool(NamedTuple):
    """The examples of all workers, before the parameters of the step that uses them. From server 0. Body: examples.

    Attributes:
        round: number of their round; 0 for none.
        clock: that step.
        first: the worker's first step with examples of others.
        own_begin, own_end: the places of the worker's own examples, so that one body serves all workers.
    """

    worker: int
    session: int
    round: int
    clock: int
    first: int
    own_begin: int
    own_end: int


class GossipContent(NamedTuple):
    """The examples that a worker gives before a step, to another worker, before its gradient. Body: the examples.

    version: of the parameters of that step."""

    number: int
    version: int
    worker: int


class PeerOffer(NamedTuple):
    """The examples that a worker gives before a step, if workers have models of their own. To server 0. Body: examples.

    Attributes:
        session: of the sender.
        epoch: the worker's epoch by whose losses they were selected.
    """

    worker: int
    process: int
    session: int
    epoch: int


class PoolRequest(NamedTuple):
    """A worker needs the pools of the last rounds, from ``round`` on. To server 0, which sends a GossipPool for each.

    session: of the sender."""

    worker: int
    process: int
    session: int
    round: int
