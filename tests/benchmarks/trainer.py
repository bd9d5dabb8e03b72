"""``make bench-trainer``: what the trainer costs beside the least that anything could cost, in the same run.

    python -m tests.benchmarks.trainer [--quick] [--part transport|throughput|memory|coordinator|virtual|rows] [--model NAME]
                                  [--shards DIR]

transport   CPU time of a push-pull round trip by sockets and by shared memory, beside raw TCP, torch RPC and a lock
throughput  images a second of training with N workers, beside one plain torch process on the same cores
memory      what all processes of a run hold, shared pages counted once, beside Pythons that import torch
coordinator its CPU time an event, by protocol, for 16 to 10,000 workers
virtual     images a second of a run in virtual time, beside a plain torch loop; 10,000 virtual workers
rows        images a second with memory-mapped rows, beside rows in memory

Without --shards the project's sample is generated and dealt out round robin for every number of workers; a set that is
given is measured with the workers it has. Contenders alternate, and medians of ratios are printed: on a noisy machine
ratios hold where seconds do not. Each part ends with its physical limit: bytes moved, at this machine's memcpy rate."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.benchmarks import coordination as bench_coordination
from tests.benchmarks import memory as bench_memory
from tests.benchmarks import row_storage as bench_rows
from tests.benchmarks import throughput as bench_throughput
from tests.benchmarks import transport as bench_transport
from tests.benchmarks.machine import print_machine

PARTS = ("transport", "throughput", "memory", "coordinator", "virtual", "rows")
WORKERS = (1, 2, 4, 12)
MODELS = ("resnet20", "cnn")
COPIED = 1 << 24  # numbers in the copy that gives memcpy's rate: 64 MiB, larger than a cache


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    parts = args.part or PARTS
    steps = 10 if args.quick else args.steps
    repeat = 1 if args.quick else args.repeat
    print_machine()
    if "transport" in parts:
        cases = bench_transport.QUICK if args.quick else bench_transport.CASES
        bench_transport.run(cases, repeat, 0.5 if args.quick else args.seconds)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        sets, workers = _sets(args, Path(scratch), steps)
        models = args.model or (MODELS[1:] if args.quick else MODELS)
        if "throughput" in parts:
            bench_throughput.run(sets, workers, models, repeat, steps, copy_gb_s())
        if "memory" in parts:
            bench_memory.run(sets(workers[-1]), MODELS[0], workers[-1], bench_throughput.BATCH)
        if "coordinator" in parts:
            bench_coordination.coordinator_alone(*(((16, 140), 1000) if args.quick else ()))
        if "virtual" in parts:
            bench_coordination.virtual_time(sets(workers[-1]), 12 * steps, repeat, large=not args.quick)
        if "rows" in parts:
            bench_rows.run(sets, [n for n in workers if n <= bench_throughput.GOAL_WORKERS], models, repeat, steps)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few cases, once: does it work?")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be given again")
    parser.add_argument("--model", action="append", help="only this model's throughput; may be given again")
    parser.add_argument("--shards", type=Path, metavar="DIR", help="a committed shard set instead of the sample")
    parser.add_argument("--repeat", type=int, default=3, help="of every measurement (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a transport measurement (%(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="of a throughput measurement (%(default)s)")
    return parser


def _sets(args: argparse.Namespace, scratch: Path, steps: int) -> tuple[bench_throughput.Sets, tuple[int, ...]]:
    """Shard sets by number of workers, and the numbers to measure: rows for more steps than an epoch has."""
    if not args.shards:
        workers = (1, 4) if args.quick else WORKERS
        return bench_throughput.make_sets(scratch, bench_throughput.BATCH * (steps + 1)), workers
    from trainer.data.opening import open_shards

    return (lambda _: args.shards), (open_shards(str(args.shards)).num_workers,)


def copy_gb_s() -> float:
    return 4 * COPIED / 1e6 / bench_transport.limits(COPIED).copy_ms


if __name__ == "__main__":
    main()
