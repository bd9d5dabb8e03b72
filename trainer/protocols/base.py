"""What a consistency protocol decides: which gradients are applied now, and which worker may go on.

a protocol sees a frozen view of the run and touches nothing, so every one is a few lines and is tested in virtual
time; the coordinator carries its decisions out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pipeline.specs import Spec


@dataclass(frozen=True)
class Gradient:
    """A pushed gradient that no update has used yet: the worker's clock and the version that it was computed at."""

    worker: int
    clock: int
    version: int


@dataclass(frozen=True)
class View:
    """The run at one instant.

    clocks: completed steps of every worker that still has steps to do; absent: those of them that are not taking part
    now (not started, lost, joining again); waiting: complete gradients in order of arrival."""

    version: int
    clocks: Mapping[int, int]
    absent: frozenset[int]
    waiting: Sequence[Gradient]

    def slowest(self) -> int:
        """The least clock of the workers that take part; 0 if none does."""
        return min((clock for worker, clock in self.clocks.items() if worker not in self.absent), default=0)


@dataclass(frozen=True)
class Protocol(Spec):
    """One file a protocol, whose fields are its parameters. synchronous: whether an update averages over all workers
    (learning rate a) or uses one push (a/n). reproducible: whether a run's bits are the same whoever comes first or dies.
    The conformance suite (tests/test_protocols.py) holds every registered protocol to what it declares."""

    synchronous: ClassVar[bool]
    reproducible: ClassVar[bool] = False

    def clock_bound(self) -> int | None:
        """How many steps a worker that starts one may be ahead of the slowest; None for no bound."""
        return None

    def admit(self, gradient: Gradient, view: View) -> bool:
        """Whether a waiting gradient may still be used; a refused one is dropped and its worker may go on."""
        return True

    @abstractmethod
    def take(self, view: View) -> Sequence[Gradient]:
        """The waiting gradients that make the next update, in the order of their summation; empty for none yet."""

    def weight(self, staleness: int) -> float:
        """The factor of a gradient in its update's sum (c_g)."""
        return 1.0

    def may_go(self, worker: int, view: View) -> bool:
        """Whether a worker whose gradient was used may pull and start its next step."""
        return True

    def clock_on_joining(self, clock: int, view: View) -> int:
        """The clock at which a worker that was away goes on."""
        return clock
