"""The completed rounds of a worker, and the snapshots of its model, that server 0 has not settled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from trainer.coordination.orders import Round
from trainer.transport.bodies.reports import report_bytes
from trainer.transport.bodies.rounds import MOST_ROUNDS_BYTES
from trainer.worker.replica_links import Vector

MOST_COPIES = 2  # unwritten snapshots of a worker; with more, its next step waits
MOST_UNSETTLED = 200_000  # reports that a worker keeps for server 0 before it waits


@dataclass(frozen=True)
class ModelSnapshot:
    """A copy of the model at a version, kept until its checkpoint is complete."""

    generation: int
    values: Vector
    momentum: Vector


class RoundHistory:
    """Rounds and snapshots until server 0 settles them. Pure.

    num_workers: N.

    Attributes:
        rounds: completed ones, oldest first.
        snapshots: by version.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.rounds: list[Round] = []
        self.snapshots: dict[int, ModelSnapshot] = {}

    def is_full(self, version: int) -> bool:
        """Return whether the next step must wait until server 0 settles something. version: of the model."""
        pending = sum(each <= version for each in self.snapshots)
        if pending > MOST_COPIES or len(self.rounds) * self.num_workers > MOST_UNSETTLED:
            return True
        # Reports with losses of rows are long, and server 0 refuses messages of more than four times as many bytes.
        size = sum(map(report_bytes, self.rounds[-1].reports)) if self.rounds else 0
        return len(self.rounds) * size > MOST_ROUNDS_BYTES

    def versions(self, generation: int) -> list[int]:
        """Return the versions of the snapshots of a generation."""
        return [version for version, copy in self.snapshots.items() if copy.generation == generation]

    def settle(self, reached: int, version: int, pending: Collection[int]) -> None:
        """Forget the rounds up to a version, and the snapshots up to it that are no longer needed.

        reached: number of rounds that the worker has completed; pending: versions of which snapshots are needed."""
        first = reached - len(self.rounds)
        if version > first:
            del self.rounds[: version - first]
        self.snapshots = {v: copy for v, copy in self.snapshots.items() if v > version or v in pending}
