"""``make bench-exchange``: the time of a step of all-reduce, without any computation of gradients, beside plain gloo.

    python -m tests.benchmarks.exchange [--quick] [--steps N] [--repeat N] [--workers N ...] [--elements P ...]

Each contender runs N processes that exchange a vector of P numbers and apply the same update with momentum. Wall is
milliseconds per step, cpu the milliseconds of all processes per step. Contenders alternate; medians are printed.

gloo         torch.distributed.all_reduce over loopback TCP
memory       --exchange all-reduce, whose workers share memory on one host
tcp          --exchange all-reduce over loopback TCP, as between hosts: encrypted, unlike gloo
clear        the same with --encryption off
torch        --exchange all-reduce --collective torch: gloo within a run"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.benchmarks.machine import print_machine
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import write_slice, write_state
from trainer.config import Config, Data, Optimiser, Processes, RunFacts, RunSpec
from trainer.coordination.orders import StepMeasurements
from trainer.exchange.all_reduce import AllReduce
from trainer.home.folders import Folders
from trainer.rules import build_slice
from trainer.transport.sockets import Secret

ELEMENTS = (270_000, 850_000, 11_000_000)
WORKERS = (2, 4, 12)
WARM_UP = 5
REPORT = StepMeasurements(10, 1.0, 5, 0.0)
Encryption = Literal["on", "off"]
Times = tuple[float, float]  # wall and CPU, milliseconds per step


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small case, once: does it work?")
    parser.add_argument(
        "--steps", type=int, default=0, help="of every measurement (default: by the length of the vector)"
    )
    parser.add_argument("--repeat", type=int, default=3, help="of every measurement (%(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--elements", type=int, nargs="+", default=ELEMENTS)
    args = parser.parse_args(argv)
    if args.quick:
        args.workers = (2,)
        args.elements = (270_000,)
        args.repeat = 1
    print_machine()
    print(f"{'elements':>10} {'workers':>7} {'contender':>9} {'wall ms':>8} {'cpu ms':>8} {'wall / gloo':>11}")
    for elements in args.elements:
        for workers in args.workers:
            steps = args.steps or (20 if args.quick else max(20, int(30_000_000 / elements)))
            _compare(elements, workers, steps, args.repeat)


def _compare(elements: int, workers: int, steps: int, repeat: int) -> None:
    """Measure all contenders in turn and print a line for each."""
    contenders = {"gloo": _gloo, "memory": _memory, "tcp": _tcp, "clear": _clear, "torch": _torch}
    times: dict[str, list[Times]] = {name: [] for name in contenders}
    for _ in range(repeat):
        for name, run in contenders.items():
            times[name].append(run(elements, workers, steps))
    gloo = [wall for wall, _ in times["gloo"]]
    for name, measured in times.items():
        wall = statistics.median(wall for wall, _ in measured)
        cpu = statistics.median(cpu for _, cpu in measured)
        ratio = statistics.median(mine / theirs for (mine, _), theirs in zip(measured, gloo, strict=True))
        print(f"{elements:>10,} {workers:>7} {name:>9} {wall:>8.2f} {cpu:>8.2f} {ratio:>11.2f}", flush=True)


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
    return _all_reduce(_private(), "memory", elements, workers, steps, exchange=AllReduce(collective="torch"))


def _memory(elements: int, workers: int, steps: int) -> Times:
    return _all_reduce(_private(), "memory", elements, workers, steps)


def _private() -> str:
    return f"ipc://@bench-{os.getpid()}-{time.monotonic_ns()}"


def _tcp(elements: int, workers: int, steps: int, encryption: Encryption = "on") -> Times:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return _all_reduce(f"tcp://127.0.0.1:{port}", "socket", elements, workers, steps, encryption)


def _clear(elements: int, workers: int, steps: int) -> Times:
    return _tcp(elements, workers, steps, "off")


def _all_reduce(
    address: str,
    same_host: str,
    elements: int,
    workers: int,
    steps: int,
    encryption: Encryption = "on",
    exchange: AllReduce | None = None,
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
    from trainer.worker.clients.all_reduce import open_client

    client = open_client(config, facts, rank, [address], secret, folders)
    turn = client.join()

    def step() -> None:
        nonlocal turn
        assert turn
        client.pushed.fill(1.0)
        turn = client.exchange(turn, REPORT)

    out.put(_time(step, steps))
    step()  # the last round of the run: no worker leaves before all have measured


def _config(folder: str, steps: int, same_host: Any = "memory", exchange: AllReduce | None = None) -> Config:
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
