"""The contenders of ``make bench-exchange``, and the processes that each of them runs.

All processes start as the roles of a run do: from the fork server, with malloc's settings of a role."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.benchmarks.exchange_figures import CLEAR, ENCRYPTED, ONE_HOST
from tests.benchmarks.exchange_peers import (
    SharedSums,
    Times,
    add_in_memory,
    average_in_ring,
    run_torchft,
    share_sums,
)
from tests.clusters.machine import free_ports
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import write_model, write_state
from trainer.config import Config, Data, Optimiser, Processes, RunFacts, RunSpec
from trainer.coordination.orders import StepMeasurements
from trainer.exchange.all_reduce import AllReduce
from trainer.exchange.base import Exchange
from trainer.exchange.d_psgd import DPSGD
from trainer.exchange.matcha import MATCHA
from trainer.exchange.parameter_server import ParameterServer
from trainer.home.folders import Folders
from trainer.launch.fork_server import context
from trainer.launch.role_main import keep_freed_memory
from trainer.protocols.bsp import BSP
from trainer.rules import build_slice
from trainer.server.endpoint import Endpoint
from trainer.transport.sockets import Secret

WARM_UP = 5
REPORT = StepMeasurements(10, 1.0, 5, 0.0)
TIMEOUT_S = 300.0
Encryption = Literal["on", "off"]
Run = Callable[[int, int, int], Times]  # of elements, workers and steps
Measure = Callable[[Callable[[], None]], None]  # of a step; does not return


@dataclass(frozen=True)
class Contender:
    """A way to exchange vectors, and the function that measures it.

    Attributes:
        run: measures steps.
        exchange: the exchange that it is, with its default options; None for a yardstick or other options.
        place: one of PLACES, where its workers are; None for a yardstick.
    """

    run: Run
    exchange: str | None = None
    place: str | None = None


@dataclass(frozen=True)
class Group:
    """Contenders that compute the same.

    Attributes:
        contenders: by name.
        yardsticks: the names of those to which the others are compared.
    """

    contenders: dict[str, Contender]
    yardsticks: tuple[str, ...]

    def choose(self, only: Sequence[str] | None) -> Group:
        """Return the group with its yardsticks and some contenders, or without any if none of these is in it.

        only: names; None for all."""
        chosen = [name for name in self.contenders if only is None or name in only]
        kept = {name: each for name, each in self.contenders.items() if name in (*self.yardsticks, *chosen)}
        return Group(kept if chosen else {}, self.yardsticks)


def list_groups(torchft: str | None) -> list[Group]:
    """Return all contenders. torchft: an interpreter that has it; None to do without."""
    sums = {
        "gloo": Contender(_gloo),
        "floor": Contender(_floor),
        "memory": _on_one_host(AllReduce()),
        "tcp": _over_tcp(AllReduce(), "on"),
        "clear": _over_tcp(AllReduce(), "off"),
        "torch": replace(_on_one_host(AllReduce(collective="torch")), exchange=None),
        "memory server": _on_one_host(ParameterServer()),
        "server": _over_tcp(ParameterServer(), "on"),
        "clear server": _over_tcp(ParameterServer(), "off"),
    }
    if torchft:
        sums["torchft"] = Contender(partial(run_torchft, torchft, WARM_UP))
    models = {
        "sockets": Contender(_sockets),
        "local ring": _on_one_host(DPSGD()),
        "ring": _over_tcp(DPSGD(), "on"),
        "clear ring": _over_tcp(DPSGD(), "off"),
        "local matcha": _on_one_host(MATCHA()),
        "matcha": _over_tcp(MATCHA(), "on"),
        "clear matcha": _over_tcp(MATCHA(), "off"),
    }
    return [Group(sums, ("gloo", "floor")), Group(models, ("sockets",))]


# --- yardsticks -------------------------------------------------------------------------------------------------------


def _gloo(elements: int, workers: int, steps: int) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        return _run(_gloo_worker, workers, steps, (f"file://{folder}/store", workers, elements))


def _gloo_worker(rank: int, measure: Measure, store: str, workers: int, elements: int) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=workers)
    vector = torch.zeros(elements)
    model = _zero_model(elements, workers)

    def step() -> None:
        vector.fill_(1.0)
        distributed.all_reduce(vector)
        model.apply_sum([vector.numpy()], 0.01, workers)

    measure(step)


def _floor(elements: int, workers: int, steps: int) -> Times:
    return _run(_floor_worker, workers, steps, (share_sums(context(), elements, workers), elements, workers))


def _floor_worker(rank: int, measure: Measure, shared: SharedSums, elements: int, workers: int) -> None:
    gradient, add_up = add_in_memory(rank, shared)
    total = np.empty(elements, np.float32)
    model = _zero_model(elements, workers)

    def step() -> None:
        gradient.fill(1.0)
        add_up(total)
        model.apply_sum([total], 0.01, workers)

    measure(step)


def _sockets(elements: int, workers: int, steps: int) -> Times:
    """Run the processes of a plain ring, each of which listens at a port of its own."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers)]
    try:
        return _run(_socket_worker, workers, steps, (listeners, elements))
    finally:
        for listener in listeners:
            listener.close()


def _socket_worker(rank: int, measure: Measure, listeners: list[socket.socket], elements: int) -> None:
    model = _zero_model(elements, 1)
    gradient = np.ones(elements, np.float32)
    with average_in_ring(rank, listeners) as average:

        def step() -> None:
            gradient.fill(1.0)
            model.values[:] = average(model.values)
            model.apply_sum([gradient], 0.01, 1)

        measure(step)


def _zero_model(elements: int, workers: int) -> Any:
    """Return parameters, all 0, with the update of a run, for contenders without a trainer's client."""
    return build_slice(_config("unused", 1), workers, np.zeros(elements, np.float32), np.zeros(elements, np.float32))


# --- exchanges --------------------------------------------------------------------------------------------------------


def _on_one_host(exchange: Exchange) -> Contender:
    def run(elements: int, workers: int, steps: int) -> Times:
        address = f"ipc://@bench-{os.getpid()}-{time.monotonic_ns()}"
        return _exchange(exchange, address, "memory", "on", elements, workers, steps)

    return Contender(run, exchange.name, ONE_HOST)


def _over_tcp(exchange: Exchange, encryption: Encryption) -> Contender:
    def run(elements: int, workers: int, steps: int) -> Times:
        return _exchange(
            exchange, f"tcp://127.0.0.1:{free_ports(1)[0]}", "socket", encryption, elements, workers, steps
        )

    return Contender(run, exchange.name, ENCRYPTED if encryption == "on" else CLEAR)


def _exchange(
    exchange: Exchange,
    address: str,
    same_host: str,
    encryption: Encryption,
    elements: int,
    workers: int,
    steps: int,
) -> Times:
    """Run a server 0 and its workers, which begin with a checkpoint of zeros."""
    with tempfile.TemporaryDirectory() as folder:
        config = _config(folder, WARM_UP + steps + 1, same_host, exchange)
        facts = RunFacts(workers, 1_000_000, elements, 0)
        folders = Folders.from_home(Path(folder))
        zeros = np.zeros(elements, np.float32)
        first = folder_of(folders.checkpoints, 0)
        write_model(first, 0, zeros, zeros)
        clocks = dict.fromkeys(range(workers), 0)
        write_state(first, RunState(0, 0, 0, 0, 0.0, None, False, clocks, 0.0, 1, elements, 0, config.identity()))
        secret = Secret("benchmark", encryption)
        server = context().Process(target=_server, args=(config, facts, address, secret, folders), daemon=True)
        server.start()
        try:
            return _run(_worker, workers, steps, (config, facts, address, secret, folders), server=server.pid)
        finally:
            server.kill()
            server.join()


def _server(config: Config, facts: RunFacts, address: str, secret: Secret, folders: Folders) -> None:
    keep_freed_memory()
    import_module(config.exchange.server).main(config, facts, Endpoint(0, [address], secret, None, folders))


def _worker(
    rank: int, measure: Measure, config: Config, facts: RunFacts, address: str, secret: Secret, folders: Folders
) -> None:
    client = import_module(config.exchange.client).open_client(config, facts, rank, [address], secret, folders)
    turn = client.join()

    def step() -> None:
        nonlocal turn
        assert turn
        client.pushed.fill(1.0)
        turn = client.exchange(turn, REPORT)

    measure(step)


def _config(folder: str, steps: int, same_host: Any = "memory", exchange: Exchange | None = None) -> Config:
    return Config(
        Data(shards="unused", batch_size=120),
        RunSpec(output=folder, steps=steps, epoch_checkpoints=False, checkpoint_every_s=1e6),
        optimiser=Optimiser(learning_rate=0.01, momentum=0.9),
        protocol=BSP(),  # of the parameter server; the others have one of their own
        exchange=exchange or AllReduce(),
        processes=Processes(same_host=same_host, heartbeat_timeout_s=60.0),
    )


# --- measurements -----------------------------------------------------------------------------------------------------


def _run(
    worker: Callable[..., None], workers: int, steps: int, arguments: Sequence[Any], server: int | None = None
) -> Times:
    """Run the processes of a contender. Returns the wall time of the slowest, and the CPU time of all, per step.

    Args:
        worker: gets its rank, a function that measures its step, and the arguments.
        workers, steps: of the measurement.
        arguments: of every worker.
        server: the process whose CPU time is added; None if there is none.
    """
    out: Any = context().Queue()
    processes = [
        context().Process(target=_enter, args=(worker, rank, out, steps, server, arguments), daemon=True)
        for rank in range(workers)
    ]
    for process in processes:
        process.start()
    times = [out.get(timeout=TIMEOUT_S) for _ in processes]
    for process in processes:
        process.kill()
        process.join()
    return max(wall for wall, _ in times), sum(cpu for _, cpu in times)


def _enter(
    worker: Callable[..., None], rank: int, out: Any, steps: int, server: int | None, arguments: Sequence[Any]
) -> None:
    """Run a worker in this process, with the memory of a role. Worker 0 also counts the server's CPU time."""
    keep_freed_memory()
    counted = (os.getpid(), server) if server and rank == 0 else (os.getpid(),)

    def measure(step: Callable[[], None]) -> None:
        out.put(_time(step, steps, counted))
        threading.Event().wait()  # other workers may still need what this one has sent; _run kills it

    worker(rank, measure, *arguments)


def _time(step: Callable[[], None], steps: int, processes: Sequence[int]) -> Times:
    """Return the wall time of a step in this process and the CPU time of some processes, in milliseconds."""
    for _ in range(WARM_UP):
        step()
    wall = time.perf_counter()
    cpu = _cpu_s(processes)
    for _ in range(steps):
        step()
    return 1e3 * (time.perf_counter() - wall) / steps, 1e3 * (_cpu_s(processes) - cpu) / steps


def _cpu_s(processes: Sequence[int]) -> float:
    """Return the CPU seconds of processes since their start."""
    # The number of Linux's clock for the CPU time of another process; /proc counts in hundredths of a second.
    return sum(time.clock_gettime(~process << 3 | 2) for process in processes)
