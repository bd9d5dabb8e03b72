"""``make bench-gpu``: images a second of training with several workers on one GPU, beside one plain torch process.

    python -m tests.benchmarks.gpu [--workers 1 4 12] [--model resnet56] [--batch-size 128] [--sets DIR]

The copies that a worker makes every step, of parameters to the GPU and of the gradient back, are timed apart, in
ordinary and in pinned memory. Without --sets the project's sample is generated and dealt out for every number of
workers, which needs Spark; with it, DIR/shards-N is used where it exists."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import nullcontext
from pathlib import Path

from tests.benchmarks import throughput
from tests.benchmarks.machine import print_machine

WORKERS = (1, 4, 12)
MODEL = "resnet56"
ELEMENTS = (850_000, 11_000_000)  # of ResNet-56 and of ResNet-18
COPIES = 50


def main(argv: list[str] | None = None) -> None:
    import torch

    args = build_parser().parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("bench-gpu: torch finds no GPU on this host; make bench-trainer measures CPUs")
    print_machine()
    print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    print_copies()
    # Runs are shorter than an epoch, so that the evaluator waits.
    rows = args.batch_size * max(args.workers) * (args.steps + 1)
    with nullcontext(args.sets) if args.sets else tempfile.TemporaryDirectory(prefix="bench-") as folder:
        sets = throughput.make_sets(Path(folder), rows)
        for per_worker in (True, False):
            training = throughput.Training(args.model, args.steps, args.batch_size, per_worker, "cuda")
            print(f"\n{3 - per_worker}. Images/s")
            throughput.print_heading(args.repeat, training)
            throughput.compare(sets, args.workers, training, args.repeat)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="numbers of workers (%(default)s)")
    parser.add_argument("--model", default=MODEL, help="a model of the trainer (%(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=throughput.BATCH, help="of each worker, then of all (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=50, help="of each worker (%(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="of every measurement (%(default)s)")
    parser.add_argument("--sets", type=Path, metavar="DIR", help="folder of shard sets, kept for the next time")
    return parser


def print_copies() -> None:
    """Print the milliseconds of a vector's copy to the GPU and back, in ordinary and in pinned memory."""
    import torch

    print("\n1. Copies of a vector, ms (to the GPU, back)")
    for elements in ELEMENTS:
        on_gpu = torch.zeros(elements, device="cuda")
        ordinary = torch.zeros(elements)
        for name, host in (("ordinary", ordinary), ("pinned", ordinary.pin_memory())):
            there = _milliseconds(on_gpu, host)
            back = _milliseconds(host, on_gpu)
            print(f"  {elements / 1e6:5.2f} M  {name:<9}{there:7.2f}{back:7.2f}   {4e-6 * elements / there:.1f} GB/s")


def _milliseconds(target: object, source: object) -> float:
    import time

    import torch

    times = []
    for _ in range(COPIES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


if __name__ == "__main__":
    main()
