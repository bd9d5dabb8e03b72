"""The interface of consistency protocols: which gradients are used, how many make an update, and when workers continue.

A protocol only reads a view of the run, so each is a few lines and is tested in virtual time. The coordinator executes its
decisions, and asks O(1) questions per pushed gradient for any number of workers."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from pipeline.core.errors import UsageError
from pipeline.core.specs import Spec


class Gradient(NamedTuple):
    """A pushed gradient: its worker, the worker's step, and the version of the parameters it was computed with."""

    worker: int
    clock: int
    version: int


class Release(NamedTuple):
    """The condition for a worker's next step.

    Attributes:
        version: the parameters must have at least this version.
        slowest: the slowest member must have done at least this many steps.
    """

    version: int = 0
    slowest: int = 0


NOW = Release()


class View(typing.Protocol):
    """The current state of the run. Every query costs O(1) or O(log N)."""

    num_workers: int
    time: float  # seconds of training
    memory: dict[str, Any]  # state of the protocol: plain JSON, in every checkpoint

    @property
    def version(self) -> int:
        """Return the number of updates so far."""

    def clock(self, worker: int) -> int:
        """Return a worker's number of steps: its gradients that were used or refused."""

    def slowest(self) -> int:
        """Return the smallest clock of the members, 0 without members."""

    def slowest_worker(self) -> int | None:
        """Return the member with the smallest clock, of several the one that has had it for the longest time."""

    def fastest(self) -> int:
        """Return the largest clock of the members, 0 without members."""

    def contributes(self, worker: int) -> bool:
        """Return whether the next update already has a gradient of that worker."""


@dataclass(frozen=True)
class Protocol(Spec):
    """A consistency protocol. Its fields are its parameters, and each protocol has its own file.

    The conformance suite (tests/unit/test_protocols.py) checks the declarations of every registered protocol.

    Attributes:
        synchronous: whether all gradients of an update were computed with the version that it updates.
        reproducible: whether runs are bit-identical for any order of arrivals and any failures.
        in_worker_order: sum gradients in the order of workers instead of their arrival.
        has_momentum: whether updates have momentum by default.
        refuses_gradients: whether ``admit`` may refuse a gradient.
        reads_own_writes: whether the parameters of a worker's step contain all its earlier gradients that are accepted.
    """

    synchronous: ClassVar[bool]
    reproducible: ClassVar[bool] = False
    in_worker_order: ClassVar[bool] = False
    has_momentum: ClassVar[bool] = True
    refuses_gradients: ClassVar[bool] = False
    reads_own_writes: ClassVar[bool] = True

    def check(self, num_workers: int) -> None:
        """Raise UsageError if the parameters do not fit the number of workers."""

    def check_steps(self, steps: int) -> None:
        """Raise UsageError if the parameters do not fit the length of a new run. steps: of each worker in the run."""

    def update_size(self, num_workers: int) -> int:
        """Return the number of gradients per update. The last updates of a run may have fewer."""
        return 1

    def local_steps(self, clock: int) -> int:
        """Return the number of mini-batches, from a worker's step ``clock`` on, whose gradients it sums for its next push.

        Between two of them, it moves its copy of the parameters by the gradient. Only for updates of one push."""
        return 1

    def most_local_steps(self) -> int:
        """Return the largest result of ``local_steps``."""
        return 1

    def parts_of_a_step(self) -> int:
        """Return the number of micro-batches per step.

        Between two of them, a worker gives up its step if server 0 has cancelled it because the gradient will be
        refused. With 1, steps are never cancelled."""
        return 1

    def clock_bound(self) -> int | None:
        """Return by how many steps a worker that starts one may be ahead of the slowest, None for no bound."""
        return None

    def admit(self, gradient: Gradient, view: View) -> bool:
        """Return whether a gradient may be used. A refused gradient is dropped, and its worker continues."""
        return True

    def weight(self, staleness: int, num_workers: int) -> float:
        """Return the factor c_g of a gradient in its update: w -= (a/n) * sum of c_g * g, without momentum."""
        return 1.0

    def pushed(self, worker: int, view: View) -> None:
        """Update ``view.memory`` after a worker's gradient was used or refused. Called before ``release``."""

    def release(self, worker: int, view: View) -> Release:
        """Return the condition for the next step of a worker that has pushed or joined. Called once per step."""
        return NOW

    def clock_on_joining(self, clock: int, view: View) -> int:
        """Return the clock at which a lost worker continues when it rejoins."""
        return clock


def k_of(k: int | None, num_workers: int) -> int:
    """Return the number of gradients per update of a k-protocol: half of the workers by default."""
    return max(1, num_workers // 2) if k is None else k


def check_distinct(k: int | None, num_workers: int) -> None:
    """Raise UsageError if an update would need more distinct workers than there are."""
    if k_of(k, num_workers) > num_workers:
        raise UsageError(f"--k {k} exceeds the number of workers, {num_workers}: give at most {num_workers}")
