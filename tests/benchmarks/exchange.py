"""``make bench-exchange``: the time of a step of all-reduce and of d-psgd, without any computation of gradients.

    python -m tests.benchmarks.exchange [--quick] [--steps N] [--repeat N] [--workers N ...] [--elements P ...]
        [--only CONTENDER ...] [--torchft PYTHON]

Each contender runs N processes that exchange a vector of P numbers and apply the same update with momentum. Wall is
milliseconds per step, cpu the milliseconds of all processes per step, a server's included. Contenders alternate;
medians are printed, and beside them the wall time divided by the yardsticks' in the same turn: plain gloo and the floor
for sums of all gradients, plain sockets for a ring of models.

gloo         torch.distributed.all_reduce over loopback TCP
floor        processes that only add and copy the gradients in shared memory, which is the least that an all-reduce does
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
import statistics
from collections.abc import Sequence

from tests.benchmarks.exchange_contenders import Group, list_groups
from tests.benchmarks.exchange_peers import Times
from tests.benchmarks.machine import print_machine
from trainer.launch.processes import FORK_SERVER

ELEMENTS = (270_000, 850_000, 11_000_000)
WORKERS = (2, 4, 12)


def main(argv: list[str] | None = None) -> None:
    args = _parse(argv)
    print_machine()
    FORK_SERVER.ensure()
    groups = [group.choose(args.only) for group in list_groups(args.torchft)]
    print(f"{'elements':>10} {'workers':>7} {'contender':>10} {'wall ms':>8} {'cpu ms':>8}  wall by that of")
    try:
        for elements in args.elements:
            for workers in args.workers:
                steps = args.steps or (20 if args.quick else max(20, int(30_000_000 / elements)))
                for group in groups:
                    _compare(group, elements, workers, steps, args.repeat)
    finally:
        FORK_SERVER.end()


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments. Exits with 2 if they are unusable."""
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
    if min(args.workers) < 2:
        parser.error(f"--workers {min(args.workers)}: an exchange needs 2")
    return args


def _compare(group: Group, elements: int, workers: int, steps: int, repeat: int) -> None:
    """Measure all contenders of a group in turn and print a line for each."""
    times: dict[str, list[Times]] = {name: [] for name in group.contenders}
    for _ in range(repeat):
        for name, run in group.contenders.items():
            times[name].append(run(elements, workers, steps))
    for name, measured in times.items():
        wall = statistics.median(wall for wall, _ in measured)
        cpu = statistics.median(cpu for _, cpu in measured)
        ratios = {yardstick: _ratio(measured, times[yardstick]) for yardstick in group.yardsticks}
        quotients = ", ".join(f"{yardstick} {ratio:.2f}" for yardstick, ratio in ratios.items())
        print(f"{elements:>10,} {workers:>7} {name:>10} {wall:>8.2f} {cpu:>8.2f}  {quotients}", flush=True)


def _ratio(measured: Sequence[Times], yardstick: Sequence[Times]) -> float:
    """Return the median of the wall times of a contender divided by those of its yardstick in the same turns."""
    return statistics.median(mine / theirs for (mine, _), (theirs, _) in zip(measured, yardstick, strict=True))


if __name__ == "__main__":
    main()
