"""How the tasks of a barrier job meet: in a star of connections around task 0, set up once.

BarrierTaskContext.allGather itself takes about a second, whatever it carries (it sleeps between two looks at the answer),
so it only hands round where task 0 listens; Horovod and XGBoost on Spark do the same."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from multiprocessing.connection import Client, Connection, Listener
from types import TracebackType

import numpy as np
import numpy.typing as npt
from pyspark import BarrierTaskContext

Floats = npt.NDArray[np.float64]


class Meeting:
    """gather(row [k]) returns every task's row [tasks, k], in order of tasks, to all of them. A context manager.

    Connections are authenticated by a key of this job. A task that dies ends the others' connections, and so the job."""

    def __init__(self, barrier: BarrierTaskContext) -> None:
        self.index = barrier.partitionId()
        hosts = [info.address.rsplit(":", 1)[0] for info in barrier.getTaskInfos()]
        self._stack = ExitStack()
        self._others: list[Connection] = []
        if self.index == 0:
            key = secrets.token_bytes(16)
            listener = self._stack.enter_context(Listener((hosts[0], 0), backlog=len(hosts), authkey=key))
            barrier.allGather(f"{listener.address[1]} {key.hex()}")
            found = dict(self._accept(listener) for _ in hosts[1:])
            self._others = [found[index] for index in range(1, len(hosts))]
        else:
            port, key_text = barrier.allGather("")[0].split()
            root = Client((hosts[0], int(port)), authkey=bytes.fromhex(key_text))
            self._others = [self._stack.enter_context(root)]
            root.send_bytes(str(self.index).encode())

    def _accept(self, listener: Listener) -> tuple[int, Connection]:
        connection = self._stack.enter_context(listener.accept())
        return int(connection.recv_bytes()), connection

    def gather(self, row: Floats) -> Floats:
        """Two messages a task."""
        if self.index:
            self._others[0].send_bytes(row.tobytes())
            told = self._others[0].recv_bytes()
        else:
            told = b"".join([row.tobytes(), *(other.recv_bytes() for other in self._others)])
            for other in self._others:
                other.send_bytes(told)
        return np.frombuffer(told).reshape(-1, len(row))

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
