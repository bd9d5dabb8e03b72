"""Kill processes at random moments while several commit to one place, and hold what readers find against undisturbed sets.

``python -m tests.campaigns.commits --kills 200 --place s3``: three processes replace a set again and again; at moments drawn
from a seed one of them gets SIGKILL, and another takes its place. All the while a reader reads every byte: it must find one
whole set. After every tenth kill all are killed; the next commit must leave its set and nothing else."""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import Value
from typing import Any

from pipeline.core.shardset.attempt import Attempt
from tests.campaigns.readers import Failed, Reader
from tests.clusters import S3, Hdfs
from tests.support.commits import assert_nothing_else, commit, contents, whole
from tests.support.kills import forked
from tests.support.places import STORE, elsewhere

WRITERS = 3
MOMENT_S = 0.8  # of a kill, at most after the one before
SETS = ("a", 2), ("b", 3)


def in_turn(place: str, first: int) -> None:
    """Commit the sets in turn, for ever."""
    while True:
        name, workers = SETS[first % 2]
        commit(STORE, place, name, workers)
        first += 1


def watch(place: str, seen: Any) -> None:
    """Read and count whole sets for ever. Raises Failed."""
    expected = {
        workers: {
            path.replace(".parquet", "-*.parquet"): hashlib.sha256(data).hexdigest()
            for path, data in contents(name, workers).items()
            if path.endswith(".parquet")
        }
        for name, workers in (*SETS, ("next", 1))
    }
    reader = Reader(place, expected)
    while True:
        reader.look()
        seen.value = reader.seen


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def take_over(place: str) -> None:
    """The next run, after which nothing is left of those before."""
    commit(STORE, place, "next", 1)
    time.sleep(0.01)  # one that was killed before its first heartbeat names no process, so it is given its lease
    with Attempt(STORE, place, lease_s=0.001):
        pass
    assert whole(place) == "next"
    assert_nothing_else(place)


def campaign(place: str, kills: int, seed: int) -> dict[str, int]:
    """So many kills; what was done. Raises Failed. This process has no client of a store: it forks those that have."""
    rng, tally, seen = random.Random(seed), Counter[str](), Value("i", 0, lock=False)
    assert ended(forked(partial(take_over, place))) == 0
    reader = forked(partial(watch, place, seen))
    writers: list[int] = []
    try:
        number = 0
        while tally["kills"] < kills:
            number += 1
            while len(writers) < WRITERS:
                writers.append(forked(partial(in_turn, place, rng.randrange(2))))
            time.sleep(rng.uniform(0, MOMENT_S))
            doomed = writers if number % 10 == 0 else [rng.choice(writers)]
            for writer in list(doomed):
                os.kill(writer, signal.SIGKILL)
                if ended(writer) != -signal.SIGKILL:
                    raise Failed(f"{place}: a commit failed by itself")
                writers.remove(writer)
                tally["kills"] += 1
            if not writers:
                if ended(forked(partial(take_over, place))) != 0:
                    raise Failed(f"{place}: a killed process has left something behind, or a set that is not whole")
                tally["taken over"] += 1
            if os.waitpid(reader, os.WNOHANG)[0]:
                raise Failed(f"{place}: a reader found no whole set")
    finally:
        for child in (*writers, reader):
            with suppress(ProcessLookupError):  # of the reader that has failed
                os.kill(child, signal.SIGKILL)
    return {**tally, "sets read": seen.value}


def main(argv: list[str] | None = None) -> int:
    assert __doc__
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.commits", description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="processes killed, at least (default %(default)s)")
    parser.add_argument("--place", choices=["file", "hdfs", "s3"], default="s3", help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments (default: the clock's)")
    args = parser.parse_args(argv)
    print(f"seed {args.seed}", flush=True)
    with ExitStack() as stack:
        if args.place == "file":
            root = stack.enter_context(tempfile.TemporaryDirectory())
        else:
            server = S3() if args.place == "s3" else Hdfs()
            stack.enter_context(server)
            os.environ.update(getattr(server, "settings", {}))
            root = server.uri
        began = time.monotonic()
        tally = elsewhere(campaign, f"{root}/set", args.kills, args.seed)
    what = ", ".join(f"{count} {name}" for name, count in tally.items())
    print(f"{what} in {time.monotonic() - began:.0f} s: readers found whole sets only")
    return 0


if __name__ == "__main__":
    sys.exit(main())
