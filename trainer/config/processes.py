"""The options of a run about its processes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from pipeline.core.sizes import parse_size
from pipeline.core.specs import Spec, option
from trainer.exchange.all_reduce import AllReduce

HEARTBEAT_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Processes(Spec):
    """The processes of a run, their device and their timeouts. A resumed run may change every field."""

    servers: int = option(1, "number of parameter servers", least=1, may_change=True)
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "device of the workers' computation; auto: GPUs if available", may_change=True
    )
    threads: int = option(
        0,
        "CPU threads per worker; 0 divides this host's cores among its workers",
        least=0,
        may_change=True,
        advanced=True,
    )
    row_storage: Literal["auto", "memory", "mapped"] = option(
        "auto",
        "where workers keep the images of their rows: in their memory, or in memory-mapped files that all workers of a"
        " host share; auto: mapped if the rows of a worker need more than half of --worker-memory",
        may_change=True,
        advanced=True,
    )
    worker_memory: int | None = option(
        None,
        "memory per worker, such as 512M or 2Gi, by which --row-storage auto decides",
        metavar="SIZE",
        least=1,
        parse=partial(parse_size, flag="--worker-memory"),
        may_change=True,
        shown="the memory of this host or container divided by its workers",
        advanced=True,
    )
    same_host: Literal["memory", "socket"] = option(
        "memory", "transport between a worker and a server on the same host", may_change=True, advanced=True
    )
    encryption: Literal["on", "off"] = option(
        "on",
        "encryption of messages between hosts. With off they travel in clear text, and a process proves that it has the"
        " token by a password, which whoever can read the traffic can use too: only for networks that you trust",
        may_change=True,
        advanced=True,
    )
    start_wait_s: float = option(
        60.0,
        "seconds to wait at the start for missing workers before the others begin; bsp needs all workers",
        metavar="SECONDS",
        above=0,
        may_change=True,
        advanced=True,
    )
    heartbeat_timeout_s: float | None = option(
        None,
        "seconds without a heartbeat after which a process is restarted",
        metavar="SECONDS",
        above=0,
        may_change=True,
        shown=f"{HEARTBEAT_TIMEOUT_S:g}; for workers that exchange among themselves {AllReduce.worker_timeout_s:g} once they"
        " have joined",
        advanced=True,
    )
    stall_timeout_s: float = option(
        300.0,
        "seconds without progress after which a process is restarted although it sends heartbeats; must exceed the time of"
        " a step, of an evaluation batch and of a checkpoint; 0 disables the test",
        metavar="SECONDS",
        least=0,
        may_change=True,
        advanced=True,
    )
    max_restarts: int = option(
        5,
        "fail when a process is restarted, or the run rolls back, more often than this without new progress in between;"
        " repeated restarts are delayed by up to 30 seconds",
        least=0,
        may_change=True,
        advanced=True,
    )
