"""Messages between workers and servers, and among servers."""

from __future__ import annotations

from typing import NamedTuple


class Join(NamedTuple):
    """A worker asks to take part. To all servers. Body: an introduction, with the handle of its shared memory if any."""

    worker: int
    session: int


class Push(NamedTuple):
    """A worker hands over its gradient. To all servers. Bodies: its report; the server's part, float32.

    in_memory: whether the gradient is in the memory that worker and server share; the second body is empty then."""

    worker: int
    session: int
    generation: int
    clock: int
    in_memory: bool


class GiveUp(NamedTuple):
    """A worker has given up a step, because its gradient would be refused. To server 0. Body: its report."""

    worker: int
    session: int
    clock: int


class Heartbeat(NamedTuple):
    """A worker is alive. To server 0, on a connection of its own, so that it can overtake the join request.

    joined: whether all servers have answered the session's join request."""

    worker: int
    session: int
    joined: bool


class Hello(NamedTuple):
    """A server announces itself. Body: an introduction."""

    server: int
    session: int


class JoinReceipt(NamedTuple):
    """A server has a worker's join request."""

    server: int
    generation: int
    worker: int
    session: int


class GradientReceipt(NamedTuple):
    """A server has its part of a worker's gradient."""

    server: int
    generation: int
    worker: int
    session: int
    clock: int


class LoadReceipt(NamedTuple):
    """A server has loaded the checkpoint of a generation."""

    server: int
    generation: int


class WriteReceipt(NamedTuple):
    """A server has written its slice of a checkpoint, or failed to.

    Attributes:
        order: number of the order that asked for it.
        outcome: a checkpoints.write.WriteOutcome.
    """

    server: int
    generation: int
    order: int
    outcome: int


class Parameters(NamedTuple):
    """A worker's next step. Body: the server's part of the parameters, float32.

    in_memory: whether they are in the memory that worker and server share; the body is empty then, or the handle of the
    server's pipe."""

    worker: int
    session: int
    generation: int
    clock: int
    version: int
    in_memory: bool


class Stop(NamedTuple):
    """A worker has nothing left to do. Fields as in Parameters."""

    worker: int
    session: int
    generation: int
    clock: int
    version: int


class Cancel(NamedTuple):
    """A worker may give up its step ``clock``, because its gradient will be refused."""

    worker: int
    session: int
    clock: int


class Rejoin(NamedTuple):
    """A worker must join again, because the session is no member, its connection broke, or the servers rolled back.

    Attributes:
        later_session: a later session of this worker that the server knows, which its next one must exceed; else 0.
        joined: False in the reply to a heartbeat whose ``joined`` is False.
    """

    worker: int
    session: int
    later_session: int = 0
    joined: bool = True


class Load(NamedTuple):
    """A server must load the checkpoint of a version, and start a generation with it.

    stage: number of the stage in which the run continues."""

    generation: int
    version: int
    stage: int


class Execute(NamedTuple):
    """A server must execute the next order. Body: the order in JSON."""

    generation: int


class ChangeStage(NamedTuple):
    """A worker must leave its exchange, because the run is in another stage. From server 0.

    stage: number of that stage."""

    stage: int
