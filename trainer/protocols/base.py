"""What a consistency protocol decides: which gradients are used, how many make an update, and who may go on when.

A protocol reads a view of the run and touches nothing else, so every one is a few lines and is tested in virtual time.
The coordinator carries its decisions out. It asks O(1) questions a pushed gradient, whatever the number of workers."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from pipeline.core.errors import UsageError
from pipeline.core.specs import Spec


class Gradient(NamedTuple):
    """A pushed gradient: whose it is, of which of its steps, and the version of the parameters that it was computed at."""

    worker: int
    clock: int
    version: int


class Release(NamedTuple):
    """When a worker may start its next step: once the parameters have this version, and the slowest worker that takes
    part has done so many steps."""

    version: int = 0
    slowest: int = 0


NOW = Release()


class View(typing.Protocol):
    """The run at this instant. Every answer takes O(1) or O(log N)."""

    num_workers: int
    time: float  # seconds of training
    memory: dict[str, Any]  # the protocol's own: plain JSON, in every checkpoint

    @property
    def version(self) -> int:
        """Updates made."""

    def clock(self, worker: int) -> int:
        """Steps that a worker has done: gradients of it that were used or refused."""

    def slowest(self) -> int:
        """The least clock of the workers that take part; 0 if none does."""

    def slowest_worker(self) -> int | None:
        """The worker of that clock; of several the one that has had it for longest."""

    def fastest(self) -> int:
        """The greatest clock of the workers that take part; 0 if none does."""

    def contributes(self, worker: int) -> bool:
        """Whether the next update has a gradient of that worker already."""


@dataclass(frozen=True)
class Protocol(Spec):
    """One file a protocol, whose fields are its parameters.

    synchronous: whether all gradients of an update were computed at its own version. reproducible: whether a run's bits
    are the same whoever comes first or dies. in_worker_order: gradients are summed in the order of workers, not of their
    arrival, so a worker whose turn it is not waits. The conformance suite (tests/test_protocols.py) holds every
    registered protocol to what it declares."""

    synchronous: ClassVar[bool]
    reproducible: ClassVar[bool] = False
    in_worker_order: ClassVar[bool] = False

    def check(self, num_workers: int) -> None:
        """Raises UsageError for a number of workers that the protocol's parameters do not fit."""

    def update_size(self, num_workers: int) -> int:
        """How many gradients make an update. The last ones of a run may have fewer."""
        return 1

    def parts_of_a_step(self) -> int:
        """Micro-batches in which a worker computes a step. Between two of them it gives the step up, if it has been told
        that the protocol will refuse its gradient. 1: it is never told."""
        return 1

    def clock_bound(self) -> int | None:
        """How many steps a worker that starts one may be ahead of the slowest; None for no bound."""
        return None

    def admit(self, gradient: Gradient, view: View) -> bool:
        """Whether a gradient may be used; a refused one is dropped and its worker goes on."""
        return True

    def weight(self, staleness: int, num_workers: int) -> float:
        """The factor c_g of a gradient in its update's sum: w -= (a/n) * sum of c_g * g, without momentum."""
        return 1.0

    def pushed(self, worker: int, view: View) -> None:
        """A worker's gradient was used or refused; called before ``release``. For protocols with a memory."""

    def release(self, worker: int, view: View) -> Release:
        """When a worker that has pushed, or joined, may start its next step. Asked once a step."""
        return NOW

    def clock_on_joining(self, clock: int, view: View) -> int:
        """The clock at which a worker that was away goes on."""
        return clock


def k_of(k: int | None, num_workers: int) -> int:
    """Gradients an update of the k-protocols."""
    return max(1, num_workers // 2) if k is None else k


def check_distinct(k: int | None, num_workers: int) -> None:
    """Raises UsageError where an update would need more different workers than there are."""
    if k_of(k, num_workers) > num_workers:
        raise UsageError(
            f"--k {k} asks for gradients of {k} workers, and there are {num_workers}: give at most so many"
        )
