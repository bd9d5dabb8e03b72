"""Dynamic stale synchronous parallel (DSSP): SSP with a bound that adapts to the workers' speeds.

Source: Zhao et al. 2019, algorithms 1 and 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.core.errors import UsageError
from pipeline.core.specs import option
from trainer.protocols.base import NOW, Release, View
from trainer.protocols.ssp import SSP


@dataclass(frozen=True)
class DSSP(SSP):
    """SSP with a bound between ``staleness_bound`` and ``staleness_upper_bound``. Equal bounds are SSP.

    The fastest worker gets extra steps when it reaches the lower bound: the number after which its push is predicted to
    be closest to one of the slowest worker. The prediction extrapolates the last two pushes of both. No worker starts a
    step more than the upper bound ahead, which the paper's algorithm alone does not guarantee. The protocol's memory holds
    the times of the last two pushes and the extra steps of each worker: O(N)."""

    name: ClassVar[str] = "dssp"
    summary: ClassVar[str] = "like ssp, with a bound that adapts to the workers' speeds"

    staleness_upper_bound: int = option(
        15, "highest value of the bound on how many steps a worker may be ahead of the slowest worker", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.staleness_upper_bound < self.staleness_bound:
            raise UsageError(
                f"--staleness-upper-bound {self.staleness_upper_bound} is below --staleness-bound"
                f" {self.staleness_bound}, the lower bound: give at least as much"
            )

    def clock_bound(self) -> int:
        return self.staleness_upper_bound

    def pushed(self, worker: int, view: View) -> None:
        memory = _memory(view)
        memory["before"][worker] = memory["last"][worker]
        memory["last"][worker] = view.time

    def release(self, worker: int, view: View) -> Release:
        """Return the condition for a worker's next step.

        It may start at once within the lower bound and, if it has an extra step left, up to the upper bound. Otherwise
        it waits until its lead over the slowest worker is no more than the lower bound."""
        extra: list[int] = _memory(view)["extra"]
        ahead = view.clock(worker) - view.slowest()
        if extra[worker] and ahead <= self.staleness_upper_bound:
            extra[worker] -= 1
            return NOW
        # Beyond the upper bound a worker waits, and its grant expires: the paces that it was predicted from may change.
        extra[worker] = 0
        if ahead <= self.staleness_bound:
            return NOW
        # As in the paper, only the fastest worker is granted extra steps; the lower bound holds for all others.
        if ahead <= self.staleness_upper_bound and view.clock(worker) == view.fastest():
            extra[worker] = self._extra_steps(worker, view)
            if extra[worker]:
                return NOW
        return Release(slowest=view.clock(worker) - self.staleness_bound)

    def _extra_steps(self, worker: int, view: View) -> int:
        """Return after how many more steps this worker's push is predicted to be closest to one of the slowest worker.

        At most the difference of the two bounds; 0 until both workers have pushed twice."""
        slowest = view.slowest_worker()
        own_pace = _pace(worker, view)
        other = _pace(slowest, view) if slowest is not None else None
        if own_pace is None or other is None:
            return 0
        (last, interval) = own_pace
        (slow_last, slow_interval) = other
        most = self.staleness_upper_bound - self.staleness_bound

        def gap(extra: int) -> float:
            """Return the seconds from this worker's push after ``extra`` steps to the slowest worker's nearest push."""
            after = last + extra * interval - slow_last
            # The last push of the slowest worker is past, so only its next ``most + 1`` pushes count. Two of its pushes
            # at one time, as in virtual time, give no pace.
            pushes = min(max(after / slow_interval, 1), most + 1) if slow_interval > 0 else 1
            return abs(after - round(pushes) * slow_interval)

        # Of equally good numbers the smallest, which adds the least staleness.
        return min(range(most + 1), key=gap)


def _memory(view: View) -> dict[str, Any]:
    """Return the protocol's memory, which is filled at its first use.

    It has an entry per worker: in ``last`` and ``before`` the times of its last two pushes (None if it has not pushed),
    in ``extra`` its remaining extra steps."""
    if not view.memory:
        never = [None] * view.num_workers
        view.memory.update(last=never[:], before=never[:], extra=[0] * view.num_workers)
    return view.memory


def _pace(worker: int, view: View) -> tuple[float, float] | None:
    """Return (time of a worker's last push, seconds between its last two pushes), None before its second push."""
    last = view.memory["last"][worker]
    before = view.memory["before"][worker]
    return None if before is None else (last, last - before)
