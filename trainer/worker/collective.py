"""The sum of gradients by torch.distributed, for ``--collective torch``: gloo, or NCCL if each worker has its own GPU.

A process group belongs to a view, and each view has a new one. If a member dies, an operation fails on the others. If a
member is frozen, an operation may never end, and gloo cannot abort it; it may also write into its buffer long after, when
the member is killed or resumes. Each group therefore has a buffer and a thread of its own, which alone waits for it. The
worker polls the mesh meanwhile: when it leaves the view, it abandons both. The members find each other by messages of
the mesh, so that there is no store whose process could be lost, and strangers cannot take a member's place in it."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from torch import distributed

from pipeline.core.errors import JobError, UsageError
from trainer.config import RunFacts
from trainer.coordination.parameter_slice import add_pushed
from trainer.transport.addresses import PRIVATE, interface_towards
from trainer.transport.messages.all_reduce import StoreEntry
from trainer.transport.messages.heads import Body, Message
from trainer.worker.replica_links import Vector

LONGEST = timedelta(minutes=5)  # of an operation without any progress, after which gloo fails
MOST_FAILURES = 20  # views whose group failed, without a sum in between, after which the worker ends
LOCALHOST = "127.0.0.1"

# send(worker, message, *bodies)
Send = Callable[..., None]
Member = Mapping[str, Any]


class Sender(Protocol):
    """The mesh, of which the collective uses only this."""

    worker: int

    def send(self, worker: int, message: Message, *bodies: Body) -> None: ...


class TorchCollective:
    """Adds up the gradients of each round by torch.distributed; implements trainer.worker.replica_links.Collective.

    Args:
        mesh: sends messages to the members of the newest view.
        facts: the run.
        leader: address of server 0.
        post: has the thread that owns this object make a call; any thread may post one.
        on_sum: on_sum(number, version, total) takes the sum of a round.
        patience_s: how long the members may take to connect, after all have their gradients (seconds).
    """

    def __init__(
        self,
        mesh: Sender,
        facts: RunFacts,
        leader: str,
        post: Callable[[Callable[[], None]], None],
        on_sum: Callable[[int, int, Vector], None],
        patience_s: float,
    ) -> None:
        if not (distributed.is_available() and distributed.is_gloo_available()):
            raise UsageError("--collective torch: this build of torch has no gloo; use --collective mesh")
        self.mesh = mesh
        self.facts = facts
        self.interface = LOCALHOST if PRIVATE.fullmatch(leader) else interface_towards(leader)[1]
        self.post = post
        self.on_sum = on_sum
        self.patience_s = patience_s
        self.gpu = torch.cuda.current_device() if has_nccl() else None
        self.number = 0
        self._group: Group | None = None
        self._early: list[tuple[int, str, bytes]] = []  # entries of later views
        self._error = ""  # why the group of the view has failed
        self._failures = 0  # since the last sum
        self._is_connected = False
        self._started_at = math.inf  # time of the first operation of the view (monotonic seconds)

    def introduction(self) -> dict[str, Any]:
        """Return what the other workers need to choose between gloo and NCCL, for the join request."""
        if self.gpu is None:
            return {"gpu": ""}
        return {"gpu": str(torch.cuda.get_device_properties(self.gpu).uuid)}

    def open(self, number: int, members: Sequence[Member]) -> None:
        """Begin to connect to the members of a view, in a thread."""
        self.close()
        # Nothing of an earlier view counts in this one, such as a failure.
        self.number = number
        self._error = ""
        self._is_connected = False
        self._started_at = math.inf
        others = [worker for worker in range(len(members)) if worker != self.mesh.worker]
        store = MeshStore(partial(self._call, number, self._send_entry, others))
        connect: Callable[..., ConnectedGroup] = partial(connect_gloo, interface=self.interface)
        if have_own_gpus(members) and self.gpu is not None:
            connect = partial(connect_nccl, gpu=self.gpu)
        self._group = Group(
            partial(connect, store, self.mesh.worker, len(members)),
            store,
            self.facts.elements,
            partial(self._call, number, self._note_connection),
            partial(self._call, number, self._take),
            partial(self._call, number, self._note_failure),
        )
        # Faster members have sent their addresses already.
        early = self._early
        self._early = [entry for entry in early if entry[0] > number]
        for at, key, value in early:
            if at == number:
                store.put(key, value)

    def close(self) -> None:
        """Abandon the group of the view. Its thread ends by itself, as soon as its operation does."""
        if self._group:
            self._group.abandon()
        self._group = None

    def start(self, version: int, gradient: Vector, factor: float) -> None:
        """Start to add up a round's gradients. The group may still be connecting."""
        assert self._group
        self._started_at = min(self._started_at, time.monotonic())
        add_pushed(self._group.buffer, [gradient], [factor], self.facts.num_parameters)
        self._group.start(version)

    def hear(self, entry: StoreEntry, key: Body, value: Body) -> None:
        """Handle another member's entry, which can arrive before the view."""
        if self._group and entry.number == self.number:
            self._group.store.put(bytes(key).decode(), bytes(value))
        elif entry.number > self.number:
            self._early.append((entry.number, bytes(key).decode(), bytes(value)))

    def has_broken(self, now: float) -> bool:
        """Return whether the view needs another group. Raises JobError if the workers cannot be connected.

        now: monotonic seconds."""
        if not self._group:
            return False
        is_late = not self._is_connected and now - self._started_at > self.patience_s
        # Otherwise the run would change its view for ever if a firewall separates two hosts.
        if is_late or self._failures >= MOST_FAILURES:
            raise JobError(
                f"--collective torch: {self._error or 'the workers cannot be connected'}: let workers reach each other at"
                " any port, or use --collective mesh"
            )
        return bool(self._error)

    # --- calls that the group's thread posts --------------------------------------------------------------------------

    def _call(self, number: int, method: Callable[..., None], *arguments: Any) -> None:
        """Post a call of a method, which is dropped if the view has changed meanwhile. Runs in any thread."""

        def call() -> None:
            if self._group and number == self.number:
                method(*arguments)

        self.post(call)

    def _send_entry(self, others: Sequence[int], key: str, value: bytes) -> None:
        for other in others:
            self.mesh.send(other, StoreEntry(self.number), key.encode(), value)

    def _note_connection(self) -> None:
        self._is_connected = True

    def _note_failure(self, error: str) -> None:
        self._error = error
        self._failures += 1

    def _take(self, version: int) -> None:
        """Hand over the sum of a round."""
        assert self._group
        self._failures = 0
        self.on_sum(self.number, version, self._group.buffer)


class Group:
    """The process group of a view: a thread that connects it, and then executes one operation after the other.

    Args:
        connect: returns the process group.
        store: the store with which it connects.
        elements: length of the flat vector.
        on_connection, on_sum, on_failure: called in the thread: without arguments, with the version of a round whose
            sum is in ``buffer``, and with the error in words.

    Attributes:
        buffer: float32 [elements], the gradient before an operation and the sum after it; belongs to the thread in
            between, and for good if that operation never ends.
    """

    def __init__(
        self,
        connect: Callable[[], ConnectedGroup],
        store: MeshStore,
        elements: int,
        on_connection: Callable[[], None],
        on_sum: Callable[[int], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self.connect = connect
        self.store = store
        self.on_connection = on_connection
        self.on_sum = on_sum
        self.on_failure = on_failure
        self.buffer: Vector = np.empty(elements, np.float32)
        self._connected: ConnectedGroup | None = None
        self._versions: SimpleQueue[int | None] = SimpleQueue()
        threading.Thread(target=self._work, name="collective", daemon=True).start()

    def start(self, version: int) -> None:
        self._versions.put(version)

    def abandon(self) -> None:
        """Have the thread end as soon as it does not wait for another member."""
        self.store.close()
        self._versions.put(None)
        if connected := self._connected:
            threading.Thread(target=connected.abort, name="abort", daemon=True).start()

    def _work(self) -> None:
        """Connect the group and execute its operations, until it fails or is abandoned."""
        try:
            connected = self._connected = self.connect()
            self.on_connection()
            tensor = torch.from_numpy(self.buffer)
            while (version := self._versions.get()) is not None:
                connected.add_up(tensor)
                self.on_sum(version)
        except Exception as error:  # torch raises several types
            self.on_failure(" ".join(str(error).split())[:300] or type(error).__name__)
        finally:
            self._connected = None


class MeshStore(distributed.Store):  # type: ignore[name-defined, misc] # not in torch's annotations
    """A store for the addresses of a group's members. Each member has the entries of all, which arrive as messages.

    Other operations than these, such as counters, would need one process that decides, and are not there.

    send: send(key, value) sends an entry to all other members."""

    def __init__(self, send: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._send = send
        self._entries: dict[str, bytes] = {}
        self._change = threading.Condition()
        self._is_closed = False

    def put(self, key: str, value: bytes) -> None:
        """Note an entry, of this member or another."""
        with self._change:
            self._entries[key] = value
            self._change.notify_all()

    def close(self) -> None:
        """End all waits with an error, because the view is over."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()

    def set(self, key: str, value: Any) -> None:
        entry = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, entry)
        self._send(key, entry)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]

    def check(self, keys: Sequence[str]) -> bool:
        with self._change:
            return all(key in self._entries for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there. The timeout is ignored, because a member may first compute a long step."""
        with self._change:
            self._change.wait_for(lambda: self._is_closed or all(key in self._entries for key in keys))
            if self._is_closed:
                raise RuntimeError("the view is over")


# --- gloo and NCCL ----------------------------------------------------------------------------------------------------


class ConnectedGroup(Protocol):
    """A process group whose members are connected."""

    def add_up(self, tensor: torch.Tensor) -> None:
        """Replace a tensor of the host by the sum over all members. Blocks, and may never return."""
        ...

    def abort(self) -> None:
        """End an operation with an error, if that is possible. Called in another thread."""
        ...


class Gloo:
    """A process group of gloo, which adds up vectors of the host."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def add_up(self, tensor: torch.Tensor) -> None:
        self.group.allreduce([tensor]).wait()

    def abort(self) -> None:
        """Do nothing: gloo cannot end an operation. It ends when the member for which it waits has been killed."""


class Nccl:
    """A process group of NCCL, with a copy of the vector on this worker's GPU."""

    def __init__(self, group: Any) -> None:
        self.group = group
        # Of its own: an operation that hangs on the default stream would block the next step too.
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def add_up(self, tensor: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            on_gpu = tensor.cuda()
            self.group.allreduce([on_gpu]).wait()  # only the stream waits
            tensor.copy_(on_gpu)

    def abort(self) -> None:
        self.group.abort()


def connect_gloo(store: MeshStore, rank: int, size: int, interface: str) -> Gloo:
    """Return a group of gloo. Blocks until all members are connected, for ever if one of them has died meanwhile.

    interface: address of this host that other members reach."""
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = LONGEST
    # Without a device gloo takes the address of the host's name, which may be another network or none.
    options._devices = [gloo.create_device(hostname=interface)]
    return Gloo(gloo(store, rank, size, options))


def connect_nccl(store: MeshStore, rank: int, size: int, gpu: int) -> Nccl:
    """Return a group of NCCL. Tested in a group of one only: it needs a GPU per worker. gpu: number of this worker's."""
    torch.cuda.set_device(gpu)  # each thread has its own current one
    # By default the loss of a member ends the process, and with it the model that the others need.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    nccl: Any = distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = LONGEST
    return Nccl(nccl(store, rank, size, options))


def has_nccl() -> bool:
    """Return whether this process computes on a GPU and torch has NCCL."""
    return bool(torch.cuda.is_initialized()) and distributed.is_nccl_available()  # type: ignore[no-untyped-call]


def have_own_gpus(members: Sequence[Member]) -> bool:
    """Return whether every member has a GPU that no other one has. All members decide alike, from the same view."""
    gpus = {member.get("gpu", "") for member in members}
    return "" not in gpus and len(gpus) == len(members)
