"""Fail for each module of the product whose functions `make test` does not call: ``python -m tests.executed``.

Importing a module proves nothing about its functions, so only calls of them count. ``--record`` begins a recording."""

from __future__ import annotations

import argparse
import shutil
import sys
import sysconfig
from pathlib import Path

from tests.clusters.machine import ROOT
from tests.support.recorder import SITE_LINE, Recording

FOLDER = ROOT / "build" / "executed"
LEAST = 0.25  # of a module's functions
# Clients of servers that only the full tier starts.
LEFT_TO_FULL_TIER = {"pipeline.stream.kafka", "trainer.cluster.ray"}


def main(argv: list[str] | None = None) -> int:
    """Print the modules that lack tests, with the share of their functions that is called. Return 1 if there are any."""
    assert __doc__
    parser = argparse.ArgumentParser(prog="python -m tests.executed", description=__doc__.split("\n\n")[0])
    parser.add_argument("--record", action="store_true", help="begin a recording, which RECORD_CALLS switches on")
    if parser.parse_args(argv).record:
        begin()
        return 0
    if not (FOLDER / "calls").exists():
        print("build/executed has no recording of the default tier: run make test first", file=sys.stderr)
        return 1
    recording, called = Recording.read(FOLDER)
    shares = {name: len(called[name]) / len(mine) for name, mine in recording.functions.items() if mine}
    lacking = {name: share for name, share in shares.items() if share < LEAST and name not in LEFT_TO_FULL_TIER}
    for name, share in lacking.items():
        print(f"{name}: the default tier calls {share:.0%} of its functions", file=sys.stderr)
    least = sorted(shares.items(), key=lambda item: item[1])[:10]
    print(
        f"{len(shares) - len(lacking)} of {len(shares)} modules are executed by the default tier; the least: "
        + ", ".join(f"{name} {share:.0%}" for name, share in least)
    )
    return int(bool(lacking))


def begin() -> None:
    """Begin a recording, and let the Pythons of this environment take part in it."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    Recording.prepare(ROOT, FOLDER)
    line = Path(sysconfig.get_path("purelib"), "recorder_of_calls.pth")
    if not line.exists() or line.read_text() != SITE_LINE:
        line.write_text(SITE_LINE)


if __name__ == "__main__":
    sys.exit(main())
