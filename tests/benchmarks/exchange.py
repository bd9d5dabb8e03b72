"""``make bench-exchange``: the time of a step of every exchange, without any computation of gradients.

    python -m tests.benchmarks.exchange [--quick] [--steps N] [--repeat N] [--workers N ...] [--elements P ...]
        [--only CONTENDER ...] [--torchft PYTHON] [--json FILE]
    python -m tests.benchmarks.exchange --plot FILE OUT.png

Each contender runs N processes that exchange a vector of P numbers and apply the same update with momentum. Wall is
milliseconds per step, cpu the milliseconds of all processes per step, a server's included. Contenders alternate;
medians are printed, and beside them the wall time divided by the yardsticks' in the same turn: plain gloo and the floor
for sums of all gradients, plain sockets for averages of models. ``--json`` also writes all figures to a file, after each
case. ``--plot`` reads that file, prints the table of which exchange is cheapest when and draws it; it measures nothing.

gloo         torch.distributed.all_reduce over loopback TCP
floor        processes that only add and copy the gradients in shared memory, which is the least that an all-reduce does
memory       --exchange all-reduce, whose workers share memory on one host
tcp          --exchange all-reduce over loopback TCP, as between hosts: encrypted, unlike gloo
clear        the same with --encryption off
torch        --exchange all-reduce --collective torch: gloo within a run
memory server, server, clear server
             --exchange parameter-server --protocol bsp with one server: in memory, encrypted, in clear
torchft      torchft's Manager with gloo, each process a replica group, on one lighthouse: with --torchft PYTHON, the
             interpreter of an environment in which ``pip install torchft`` has run
sockets      a ring in which each process sends its model to both neighbours over loopback TCP and averages
local ring   --exchange d-psgd on one host, over private sockets
ring         the same over loopback TCP, encrypted, unlike sockets
clear ring   the same with --encryption off
local matcha, matcha, clear matcha
             --exchange matcha in the same places"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from pipeline.core.errors import UsageError
from pipeline.core.program import execute
from tests.benchmarks.exchange_contenders import Group, list_groups
from tests.benchmarks.exchange_figures import StepCost, cost_table, read_report, write_report
from tests.benchmarks.exchange_peers import Times
from tests.benchmarks.machine import describe_machine, list_versions, print_machine
from trainer.launch.fork_server import FORK_SERVER

ELEMENTS = (270_000, 850_000, 11_000_000)
WORKERS = (2, 4, 12)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises UsageError and DataError."""
    args = _parse(argv)
    if args.plot:
        return _plot(*args.plot)
    if args.json:
        check_folder(args.json)
    print_machine()
    machine = describe_machine()  # before the run, which loads it
    FORK_SERVER.ensure()
    groups = [group.choose(args.only) for group in list_groups(args.torchft)]
    print(f"{'elements':>10} {'workers':>7} {'contender':>13} {'wall ms':>8} {'cpu ms':>8}  wall by that of")
    costs: list[StepCost] = []
    try:
        for elements, workers in product(args.elements, args.workers):
            steps = args.steps or (20 if args.quick else max(20, int(30_000_000 / elements)))
            for group in groups:
                for cost in _compare(group, elements, workers, steps, args.repeat):
                    costs.append(cost)
                    print(_line(cost), flush=True)
            # After each case, because the next one can fail.
            if args.json:
                write_report(args.json, machine, list_versions(), costs)
    finally:
        FORK_SERVER.end()
    return 0


def check_folder(path: Path) -> None:
    """Raise UsageError if a file cannot be written because its folder is missing or it is a folder itself."""
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: name a file in a folder that exists")


def _plot(source: str, target: str) -> int:
    from tests.benchmarks.exchange_picture import write_picture  # matplotlib is slow to load

    path = Path(target)
    if path.suffix != ".png":
        raise UsageError(f"--plot draws a PNG file, not {target}")
    check_folder(path)
    report = read_report(Path(source))
    print(cost_table(report.costs()))
    write_picture(path, report)
    return 0


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
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of all figures")
    parser.add_argument(
        "--plot",
        nargs=2,
        metavar=("FILE", "OUT"),
        help="only draw a picture of the figures of --json, and print a table",
    )
    parser.add_argument("--torchft", metavar="PYTHON", help="an interpreter with torchft (default: without torchft)")
    args = parser.parse_args(argv)
    if args.quick:
        args.workers = (2,)
        args.elements = (270_000,)
        args.repeat = 1
    names = [name for group in list_groups(args.torchft) for name in group.contenders]
    if unknown := [name for name in args.only or () if name not in names]:
        parser.error(f"--only {unknown[0]}: no such contender; choose among {', '.join(names)}")
    if min(args.workers) < 2:
        parser.error(f"--workers {min(args.workers)}: an exchange needs 2")
    return args


def _compare(group: Group, elements: int, workers: int, steps: int, repeat: int) -> list[StepCost]:
    """Measure all contenders of a group in turn."""
    times: dict[str, list[Times]] = {name: [] for name in group.contenders}
    for _ in range(repeat):
        for name, contender in group.contenders.items():
            times[name].append(contender.run(elements, workers, steps))
    return [
        StepCost(
            part=name,
            exchange=contender.exchange,
            place=contender.place,
            workers=workers,
            parameters=elements,
            steps=steps,
            wall_ms=statistics.median(wall for wall, _ in times[name]),
            cpu_ms=statistics.median(cpu for _, cpu in times[name]),
            ratios={yardstick: _ratio(times[name], times[yardstick]) for yardstick in group.yardsticks},
            wall_ms_by_turn=[wall for wall, _ in times[name]],
            cpu_ms_by_turn=[cpu for _, cpu in times[name]],
        )
        for name, contender in group.contenders.items()
    ]


def _line(cost: StepCost) -> str:
    """Return the printed line of a contender."""
    ratios = ", ".join(f"{yardstick} {ratio:.2f}" for yardstick, ratio in cost.ratios.items())
    begin = f"{cost.parameters:>10,} {cost.workers:>7} {cost.part:>13}"
    return f"{begin} {cost.wall_ms:>8.2f} {cost.cpu_ms:>8.2f}  {ratios}"


def _ratio(measured: Sequence[Times], yardstick: Sequence[Times]) -> float:
    """Return the median of the wall times of a contender divided by those of its yardstick in the same turns."""
    return statistics.median(mine / theirs for (mine, _), (theirs, _) in zip(measured, yardstick, strict=True))


if __name__ == "__main__":
    execute(main, interrupted="run it again")
