"""``make bench-exchange``: the time of a step of all-reduce and of d-psgd, without any computation of gradients.

    python -m tests.benchmarks.exchange [--quick] [--steps N] [--repeat N] [--workers N ...] [--elements P ...]
        [--only CONTENDER ...] [--torchft PYTHON]

Each contender runs N processes that exchange a vector of P numbers and apply the same update with momentum. Wall is
milliseconds per step, cpu the milliseconds of all processes per step. Contenders alternate; medians are printed, and
beside them the wall time divided by the yardstick's in the same turn: plain gloo for sums of all gradients, plain
sockets for a ring of models.

gloo         torch.distributed.all_reduce over loopback TCP
memory       --exchange all-reduce, whose workers share memory on one host
tcp          --exchange all-reduce over loopback TCP, as between hosts: encrypted, unlike gloo
clear        the same with --encryption off
torch        --exchange all-reduce --collective torch: gloo within a run
torchft      torchft's Manager with gloo, each process a replica group, on one lighthouse: with --torchft PYTHON, the
             interpreter of an environment in which ``pip install torchft`` has run
sockets      a ring in which each process sends its model to both neighbours over loopback TCP and averages
ring         --exchange d-psgd over loopback TCP, encrypted, unlike sockets
clear ring   the same with --encryption off"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.benchmarks.exchange_peers import Times, average_in_ring, run_torchft
from tests.benchmarks.machine import print_machine
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import write_slice, write_state
from trainer.config import Config, Data, Optimiser, Processes, RunFacts, RunSpec
from trainer.coordination.orders import StepMeasurements
from trainer.exchange.all_reduce import AllReduce
from trainer.exchange.base import Exchange
from trainer.exchange.d_psgd import DPSGD
from trainer.home.folders import Folders
from trainer.rules import build_slice
from trainer.transport.sockets import Secret

ELEMENTS = (270_000, 850_000, 11_000_000)
WORKERS = (2, 4, 12)
WARM_UP = 5
REPORT = StepMeasurements(10, 1.0, 5, 0.0)
Encryption = Literal["on", "off"]
Contender = Callable[[int, int, int], Times]  # of elements, workers and steps


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small case, once: does it work?")
    parser.add_argument(
        "--steps", type=int, default=0, help="of every measurement (default: by the length of the vector)"
    )
    parser.add_argument("--repeat", type=int, default=3, help="of every measurement (%(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--elements", type=int, nargs="+", default=ELEMENTS)
    parser.add_argument("--only", nargs="+", help="contenders, and their yardsticks (default: all)")
    parser.add_argument("--torchft", metavar="PYTHON", help="an interpreter with torchft (default: without torchft)")
    args = parser.parse_args(argv)
    if args.quick:
        args.workers = (2,)
        args.elements = (270_000,)
        args.repeat = 1
    print_machine()
    groups = _contenders(args.torchft, args.only)
    print(f"{'elements':>10} {'workers':>7} {'contender':>10} {'wall ms':>8} {'cpu ms':>8} {'ratio of wall':>13}")
    for elements in args.elements:
        for workers in args.workers:
            steps = args.steps or (20 if args.quick else max(20, int(30_000_000 / elements)))
            for group in groups:
                _compare(group, elements, workers, steps, args.repeat)


def _contenders(torchft: str | None, only: Sequence[str] | None) -> list[dict[str, Contender]]:
    """Return the contenders in groups; the first one of each is the yardstick of the others.

    torchft: an interpreter; None to do without. only: names of contenders; None for all."""
    sums: dict[str, Contender] = {"gloo": _gloo, "memory": _memory, "tcp": _tcp, "clear": _clear, "torch": _torch}
    if torchft:
        sums["torchft"] = partial(run_torchft, torchft, WARM_UP)
    models: dict[str, Contender] = {"sockets": _sockets, "ring": _ring, "clear ring": _clear_ring}
    groups = []
    for group in (sums, models):
        yardstick, *names = group
        chosen = [name for name in names if only is None or name in only]
        if chosen:
            groups.append({name: group[name] for name in (yardstick, *chosen)})
    return groups


def _compare(contenders: dict[str, Contender], elements: int, workers: int, steps: int, repeat: int) -> None:
    """Measure all contenders of a group in turn and print a line for each."""
    times: dict[str, list[Times]] = {name: [] for name in contenders}
    for _ in range(repeat):
        for name, run in contenders.items():
            times[name].append(run(elements, workers, steps))
    yardstick = [wall for wall, _ in next(iter(times.values()))]
    for name, measured in times.items():
        wall = statistics.median(wall for wall, _ in measured)
        cpu = statistics.median(cpu for _, cpu in measured)
        ratio = statistics.median(mine / theirs for (mine, _), theirs in zip(measured, yardstick, strict=True))
        print(f"{elements:>10,} {workers:>7} {name:>10} {wall:>8.2f} {cpu:>8.2f} {ratio:>13.2f}", flush=True)


# --- contenders -------------------------------------------------------------------------------------------------------


def _gloo(elements: int, workers: int, steps: int) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        return _run(_gloo_worker, workers, (f"file://{folder}/store", workers, elements, steps), others=[])


def _gloo_worker(rank: int, out: Any, store: str, workers: int, elements: int, steps: int) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=workers)
    vector = torch.zeros(elements)
    model = build_slice(
        _config("unused", steps), workers, np.zeros(elements, np.float32), np.zeros(elements, np.float32)
    )

    def step() -> None:
        vector.fill_(1.0)
        distributed.all_reduce(vector)
        model.apply_sum(vector.numpy(), 0.01, workers)

    out.put(_time(step, steps))
    distributed.barrier()


def _torch(elements: int, workers: int, steps: int) -> Times:
    return _exchange(AllReduce(collective="torch"), _private(), "memory", elements, workers, steps)


def _memory(elements: int, workers: int, steps: int) -> Times:
    return _exchange(AllReduce(), _private(), "memory", elements, workers, steps)


def _private() -> str:
    return f"ipc://@bench-{os.getpid()}-{time.monotonic_ns()}"


def _tcp(elements: int, workers: int, steps: int) -> Times:
    return _over_tcp(AllReduce(), elements, workers, steps, "on")


def _clear(elements: int, workers: int, steps: int) -> Times:
    return _over_tcp(AllReduce(), elements, workers, steps, "off")


def _ring(elements: int, workers: int, steps: int) -> Times:
    return _over_tcp(DPSGD(), elements, workers, steps, "on")


def _clear_ring(elements: int, workers: int, steps: int) -> Times:
    return _over_tcp(DPSGD(), elements, workers, steps, "off")


def _over_tcp(exchange: Exchange, elements: int, workers: int, steps: int, encryption: Encryption) -> Times:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return _exchange(exchange, f"tcp://127.0.0.1:{port}", "socket", elements, workers, steps, encryption)


def _sockets(elements: int, workers: int, steps: int) -> Times:
    """Run the processes of a plain ring, each of which listens at a port of its own."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers)]
    try:
        return _run(_socket_worker, workers, (listeners, elements, steps), others=[])
    finally:
        for listener in listeners:
            listener.close()


def _socket_worker(rank: int, out: Any, listeners: list[socket.socket], elements: int, steps: int) -> None:
    model = build_slice(_config("unused", steps), 1, np.zeros(elements, np.float32), np.zeros(elements, np.float32))
    gradient = np.ones(elements, np.float32)
    with average_in_ring(rank, listeners) as average:

        def step() -> None:
            model.values[:] = average(model.values)
            model.apply_sum(gradient, 0.01, 1)

        out.put(_time(step, steps))


def _exchange(
    exchange: Exchange,
    address: str,
    same_host: str,
    elements: int,
    workers: int,
    steps: int,
    encryption: Encryption = "on",
) -> Times:
    """Run a server 0 and its workers, which begin with a checkpoint of zeros."""
    with tempfile.TemporaryDirectory() as folder:
        config = _config(folder, WARM_UP + steps + 1, same_host, exchange)
        facts = RunFacts(workers, 1_000_000, elements, 0)
        folders = Folders.from_home(Path(folder))
        zeros = np.zeros(elements, np.float32)
        first = folder_of(folders.checkpoints, 0)
        write_slice(first, 0, 1, 0, 0, elements, elements, zeros, zeros)
        clocks = dict.fromkeys(range(workers), 0)
        write_state(first, RunState(0, 0, 0, 0, 0.0, None, False, clocks, 0.0, 1, elements, 0, config.identity()))
        secret = Secret("benchmark", encryption)
        server = multiprocessing.get_context("spawn").Process(
            target=_server, args=(config, facts, address, secret, folders), daemon=True
        )
        server.start()
        try:
            return _run(_worker, workers, (config, facts, address, secret, folders, steps), others=[server.pid or 0])
        finally:
            server.kill()
            server.join()


def _server(config: Config, facts: RunFacts, address: str, secret: Secret, folders: Folders) -> None:
    from trainer.server.endpoint import Endpoint
    from trainer.server.rounds import RoundsServer

    RoundsServer(config, facts, Endpoint(0, [address], secret, None, folders)).run()


def _worker(
    rank: int, out: Any, config: Config, facts: RunFacts, address: str, secret: Secret, folders: Folders, steps: int
) -> None:
    client = import_module(config.exchange.client).open_client(config, facts, rank, [address], secret, folders)
    turn = client.join()

    def step() -> None:
        nonlocal turn
        assert turn
        client.pushed.fill(1.0)
        turn = client.exchange(turn, REPORT)

    out.put(_time(step, steps))
    step()  # the last round of the run: no worker leaves before all have measured


def _config(folder: str, steps: int, same_host: Any = "memory", exchange: Exchange | None = None) -> Config:
    return Config(
        Data(shards="unused", batch_size=120),
        RunSpec(output=folder, steps=steps, epoch_checkpoints=False, checkpoint_every_s=1e6),
        optimiser=Optimiser(learning_rate=0.01, momentum=0.9),
        exchange=exchange or AllReduce(),
        processes=Processes(same_host=same_host, heartbeat_timeout_s=60.0),
    )


# --- measurements -----------------------------------------------------------------------------------------------------


def _time(step: Callable[[], None], steps: int) -> Times:
    """Return the wall and the CPU time of this process per step, in milliseconds."""
    for _ in range(WARM_UP):
        step()
    wall = time.perf_counter()
    cpu = time.process_time()
    for _ in range(steps):
        step()
    return 1e3 * (time.perf_counter() - wall) / steps, 1e3 * (time.process_time() - cpu) / steps


def _run(worker: Callable[..., None], workers: int, arguments: Sequence[Any], others: Sequence[int]) -> Times:
    """Run the processes of a contender. Returns the wall time of the slowest, and the CPU time of all, per step."""
    spawning = multiprocessing.get_context("spawn")
    out: Any = spawning.Queue()
    processes = [spawning.Process(target=worker, args=(rank, out, *arguments), daemon=True) for rank in range(workers)]
    for process in processes:
        process.start()
    times = [out.get(timeout=300) for _ in processes]
    for process in processes:
        process.join(10)
        process.kill()
    return max(wall for wall, _ in times), sum(cpu for _, cpu in times)


if __name__ == "__main__":
    main()
