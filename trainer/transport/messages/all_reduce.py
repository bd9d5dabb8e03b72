"""Messages of all-reduce: among workers, and between a worker and server 0."""

from __future__ import annotations

from typing import NamedTuple


class PeerView(NamedTuple):
    """The members of the next rounds, and the model with which they begin. From server 0. Body: members and progress.

    Attributes:
        number: grows with every view, and every Regroup before it.
        version: of the model with which all members begin.
    """

    number: int
    generation: int
    version: int


class CopyReceipt(NamedTuple):
    """A worker has written the checkpoint of a version, or failed to. outcome: a checkpoints.write.WriteOutcome."""

    worker: int
    process: int
    generation: int
    version: int
    outcome: int


class WriteCopy(NamedTuple):
    """A worker must write its copy of a snapshot as a checkpoint. From server 0."""

    generation: int
    version: int


class Settlement(NamedTuple):
    """Server 0 has the rounds up to a version. Body: the versions of which workers must keep a copy."""

    generation: int
    version: int


class WantSnapshot(NamedTuple):
    """The next round must end with a snapshot. From server 0 to worker 0, whose sums tell all others.

    wish: grows with every snapshot that is wanted, so that a repeated message does not cause another one."""

    number: int
    wish: int


class GradientPiece(NamedTuple):
    """A worker's gradient in the range of the addressee. Bodies: the worker's report; the elements, float32.

    Attributes:
        version: of the parameters at which it was computed.
        in_memory: whether the elements are in the memory of the sender, or a collective transfers them; the second body
            is empty then.
    """

    number: int
    version: int
    worker: int
    in_memory: bool


class RangeSum(NamedTuple):
    """The sum of all gradients in the range of the sender. Bodies: the reports of all workers; the elements, float32.

    Attributes:
        version: of the parameters at which the gradients were computed.
        in_memory: as in GradientPiece.
        snapshot: whether the round ends with a snapshot; decided by worker 0.
    """

    number: int
    version: int
    worker: int
    in_memory: bool
    snapshot: bool


class StoreEntry(NamedTuple):
    """An entry in the store of a view's process group, where its members find each other. Bodies: its key; its value."""

    number: int
