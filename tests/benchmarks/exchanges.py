"""All exchanges and protocols beside each other: time to an accuracy on real images, in virtual time.

``python -m tests.benchmarks.exchanges SET --output DIR [--seeds N] [FLAG ...]``: SET is a shard set with evaluation rows.
Each profile of step times and each seed is a ``sharding simulate --compare`` in a folder of its own below DIR, and runs that
are there are not repeated. Prints a Markdown table per profile: means over the seeds, and their range. Other flags go to
every run. The published figures are of the ``cnn`` on 5,000 images of CIFAR-10 at 16x16, at random over 8 workers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trainer.protocols import PROTOCOLS
from trainer.simulate import main as simulate

PROFILES = ("homogeneous", "one-slow:4", "mixed")
CONTENDERS = (*PROTOCOLS, "all-reduce", "d-psgd", "matcha", "sync-switch", "strategy-switch:0.5", "strategy-switch")
NETWORK = ("--latency-ms", "1", "--bandwidth-mbps", "1000")
HEADER = ("", "s to accuracy {accuracy:g}", "seconds", "GB sent", "final accuracy", "consensus")


def compare(folder: Path, shards: Path, contenders: str, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Run one comparison, or what is missing of it, and return its rows. contenders: as for --compare."""
    common = [
        "--shards",
        str(shards),
        "--model",
        "cnn",
        "--epochs",
        "6",
        "--batch-size",
        "128",
        "--no-report",
        "--quiet",
    ]
    code = simulate([*common, *NETWORK, "--compare", contenders, "--output", str(folder), *flags])
    assert code == 0, "every other end raises"
    rows: list[dict[str, Any]] = json.loads((folder / "comparison.json").read_text())["runs"]
    return rows


def cell(values: Iterable[float | None], form: str) -> str:
    """Return mean and range over seeds; with the number of seeds, if some have no value."""
    every = list(values)
    numbers = [value for value in every if value is not None]
    if not numbers:
        return "never"
    mean = format(sum(numbers) / len(numbers), form)
    ends = [format(end, form) for end in (min(numbers), max(numbers))]
    spread = f" ({ends[0]} to {ends[1]})" if ends[0] != ends[1] else ""
    return mean + spread + (f", {len(numbers)} of {len(every)}" if len(numbers) < len(every) else "")


def table(runs: Sequence[Sequence[dict[str, Any]]], accuracy: float) -> str:
    """Return the Markdown table of one profile. runs: the rows of a comparison for each seed."""
    lines = [[text.format(accuracy=accuracy) for text in HEADER], ["---"] * len(HEADER)]
    for of_seeds in zip(*runs, strict=True):
        values = {key: [row[key] for row in of_seeds] for key in of_seeds[0]}
        has_models = values["consensus"][0] is not None
        lines.append(
            [
                f"`{values['label'][0]}`",
                cell(values["to_accuracy"], ".1f"),
                cell(values["total_s"], ".1f"),
                cell([size / 1e9 for size in values["sent_bytes"]], ".2f"),
                cell(values["final_accuracy"], ".3f"),
                cell(values["consensus"], ".4f") if has_models else "",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.exchanges", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("shards", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default %(default)s)")
    parser.add_argument("--accuracy", type=float, default=0.42, help="target (default %(default)s)")
    parser.add_argument("--profiles", default=",".join(PROFILES), help="default %(default)s")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="as for --compare (default %(default)s)")
    args, flags = parser.parse_known_args()
    for profile in args.profiles.split(","):
        runs = []
        for seed in range(args.seeds):
            folder = args.output / f"{profile.replace(':', '-')}-{seed}"
            own = ["--profile", profile, "--seed", str(seed), "--accuracy", str(args.accuracy)]
            runs.append(compare(folder, args.shards, args.contenders, [*own, *flags]))
        print(f"\n`{profile}`\n\n{table(runs, args.accuracy)}", flush=True)


if __name__ == "__main__":
    main()
