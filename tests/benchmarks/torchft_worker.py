"""Run a worker of torchft for ``make bench-exchange``, in an interpreter that has only torch and torchft.

    PYTHON torchft_worker.py LIGHTHOUSE RANK WORKERS ELEMENTS WARM_UP STEPS

LIGHTHOUSE is an address, or ``serve`` for the process that is the lighthouse, which prints its address and serves until
its input ends. A worker prints its wall and its CPU time per step in milliseconds."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]

TIMEOUT = timedelta(seconds=120)


def main(lighthouse: str, rank: int, workers: int, elements: int, warm_up: int, steps: int) -> None:
    if lighthouse == "serve":
        server = LighthouseServer(bind="127.0.0.1:0", min_replicas=workers, join_timeout_ms=100)
        print(server.address(), flush=True)
        sys.stdin.read()
        server.shutdown()
        return
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Each process is a replica group of its own, which all begin with the same zeros.
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=workers,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"worker-{rank}",
        hostname="127.0.0.1",
        init_sync=False,
    )
    gradient, values, momentum = (torch.zeros(elements) for _ in range(3))

    def step() -> None:
        manager.start_quorum()
        gradient.fill_(1.0)
        manager.allreduce(gradient).wait()
        assert manager.should_commit()
        momentum.mul_(0.9).add_(gradient)
        values.sub_(momentum, alpha=0.01)

    for _ in range(warm_up):
        step()
    wall = time.perf_counter()
    cpu = time.process_time()
    for _ in range(steps):
        step()
    scale = 1e3 / steps
    print((time.perf_counter() - wall) * scale, (time.process_time() - cpu) * scale, flush=True)
    sys.stdin.read()  # no worker leaves before all have measured
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
