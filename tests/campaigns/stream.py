"""Kill a stream at random moments, start it again, and hold its set against the rows that arrived.

``python -m tests.campaigns.stream --kills 200 --place hdfs`` kills a process that commits generations one after the
other, as the driver of a stream does, but for Spark: it notes a batch as done after it is committed, and begins with
the first that it has not noted. All the while a reader reads every byte: it must find generations from the first on,
each once, and never fewer than before. ``--jobs`` kills whole applications of jobs/hash_stream.py instead, while
files go on arriving: at the end every row must be there once, in the order of arrival, dealt as if nothing had
happened."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from multiprocessing import Value
from pathlib import Path
from typing import Any

import psutil

from pipeline.core.shardset.attempt import Attempt
from pipeline.core.shardset.generations import generations
from pipeline.core.shardset.manifest import read_committed
from tests.campaigns.commits import ended
from tests.campaigns.readers import Failed
from tests.clusters import ROOT, Hdfs, end_tree
from tests.clusters.cluster_runs import QUIET
from tests.clusters.submit import start_submit
from tests.conftest import make_rows
from tests.support.commits import assert_nothing_else
from tests.support.kills import forked
from tests.support.places import STORE, elsewhere, put_after
from tests.support.stream_runs import check_set
from tests.unit.test_generations import append, batches

COMMITS = 3  # undisturbed ones that would fit between the start of a process and its kill, at most
EARLY = 0.25  # of applications are killed at a moment of their start, the others while they commit generations
START_S, JOB_S, PATIENCE_S = 10.0, 5.0, 120.0  # of the one, the other, and until there is a generation
ROWS, FILES = 60, 5  # of a file; that arrive while an application runs
BATCHES = 60  # of a set, after which another is begun: a commit costs what its set has of files


def drive(output: str, noted: str) -> None:
    """Commit batches one after the other and note those that are done, for ever."""
    batch = int(STORE.read(noted)) if STORE.exists(noted) else 0
    while True:
        append(STORE, output, batch)
        batch += 1
        STORE.replace(noted, f"{batch}".encode())


def watch(output: str, seen: Any) -> None:
    """Read generations for ever. Raises AssertionError where they are not those that were committed."""
    before = 0
    while True:
        there = look(output)
        assert there == list(range(len(there)))
        assert len(there) >= before
        before = len(there)
        seen.value += 1


def look(output: str, tries: int = 5) -> list[int]:
    """The file of the counters is deleted when the next generation is there: who misses it reads the manifest again."""
    while True:
        try:
            return batches(output)
        except (FileNotFoundError, AssertionError):
            tries -= 1
            if not tries:
                raise


def campaign(place: str, kills: int, seed: int) -> dict[str, int]:
    """So many kills; what was done. Raises Failed. This process has no client of a store: it forks those that have."""
    rng, tally, sets = random.Random(seed), {"kills": 0, "generations": 0, "reads": 0}, 0
    for batch in (0, 1):  # the first one finds a server that has just started
        began = time.monotonic()
        if ended(forked(partial(append, STORE, f"{place}/first", batch))) != 0:
            raise Failed(f"{place}: an undisturbed commit failed")
    most = COMMITS * (time.monotonic() - began)
    while tally["kills"] < kills:
        output, noted = f"{place}/set-{sets}", f"{place}/noted-{sets}"
        sets += 1
        seen, there = Value("i", 0, lock=False), Value("i", 0, lock=False)
        reader = forked(partial(watch, output, seen))
        try:
            while tally["kills"] < kills and there.value < BATCHES:
                driver = forked(partial(drive, output, noted))
                time.sleep(rng.uniform(0, most))
                os.kill(driver, signal.SIGKILL)
                if ended(driver) != -signal.SIGKILL:
                    raise Failed(f"{output}: a commit failed by itself")
                tally["kills"] += 1
                if ended(forked(partial(number_of_generations, output, there))) != 0:
                    raise Failed(f"{output}: a reader found generations that are not those that were committed")
                if not there.value and sets == 1:
                    most *= 1.5  # a commit takes longer now than it did undisturbed
                if os.waitpid(reader, os.WNOHANG)[0]:
                    raise Failed(f"{output}: a reader found generations that are not those that were committed")
        finally:
            os.kill(reader, signal.SIGKILL)
            ended(reader)
        if ended(forked(partial(last_word, output, there))) != 0:
            raise Failed(f"{output}: a generation was lost or doubled, or something was left behind")
        tally["generations"] += there.value
        tally["reads"] += seen.value
    if not tally["generations"]:
        raise Failed(f"{place}: nothing was ever committed, so nothing was tried")
    return tally | {"sets": sets}


def number_of_generations(output: str, there: Any) -> None:
    there.value = len(batches(output))


def last_word(output: str, there: Any) -> None:
    """One generation more, after which nothing is left of what was killed."""
    append(STORE, output, there.value)
    time.sleep(0.01)  # one that was killed before its first heartbeat names no process, so it is given its lease
    with Attempt(STORE, output, lease_s=0.001):
        pass
    assert batches(output) == list(range(there.value + 1))
    assert_nothing_else(output)


class Arriving:
    """Files of a few rows each that appear in a folder, whole, one after the other."""

    def __init__(self, folder: str, files: int, seed: int) -> None:
        """files: at most."""
        self.folder, self.labels, self.images = folder, *make_rows(files * ROWS, seed=seed, pixels=192)
        self.files = self.newest_ms = 0

    def arrive(self) -> None:
        rows = slice(self.files * ROWS, (self.files + 1) * ROWS)
        pairs = zip(self.labels[rows], self.images[rows], strict=True)
        data = b"".join(bytes([label]) + image.tobytes() for label, image in pairs)
        self.newest_ms = put_after(f"{self.folder}-draft", data, self.newest_ms)
        STORE.makedirs(self.folder)
        STORE.rename(f"{self.folder}-draft", f"{self.folder}/part-{self.files:05d}.bin")
        self.files += 1

    @property
    def rows(self) -> int:
        return self.files * ROWS


def start_stream(source: str, output: str, trigger: str, log: Path, *arguments: object) -> psutil.Popen:
    """An application of jobs/hash_stream.py under way."""
    shape = ("--format", "cifar10-binary", "--image-shape", "3x8x8", "--family", "sign", "--functions", 6)
    with log.open("ab") as out:
        return start_submit(
            ROOT / "jobs" / "hash_stream.py",
            *("--source", source, "--output", output, "--workers", 3, "--trigger", trigger, *shape),
            *("--window-rows", 500, "--no-report", *arguments),
            env=QUIET,
            output=out,
        )


def job_campaign(root: str, kills: int, seed: int, say: Any = print) -> dict[str, int]:
    """So many kills of applications. Raises Failed."""
    rng, tally = random.Random(seed), {"kills": 0, "applications": 0}
    source, output = Arriving(f"{root}/in", 3 + FILES * kills, seed), f"{root}/set"
    log = Path(tempfile.mkdtemp(prefix="chaos-stream-")) / "log.txt"
    for _ in range(3):
        source.arrive()
    while tally["kills"] < kills:
        process = start_stream(source.folder, output, "1 second", log)
        tally["applications"] += 1
        before, begins = len(committed(output)), rng.random() < EARLY
        end = time.monotonic() + (rng.uniform(1.0, START_S) if begins else PATIENCE_S)
        try:
            while time.monotonic() < end and process.poll() is None:
                time.sleep(rng.uniform(0.1, 0.4))
                if source.files < 3 + FILES * tally["applications"] and rng.random() < 0.15:
                    source.arrive()
                if not begins and len(committed(output)) > before:  # it is at work: soon
                    begins, end = True, time.monotonic() + rng.uniform(0, JOB_S)
            if process.poll() is not None or not begins:
                raise Failed(f"an application ended by itself, or came to nothing: {log.read_text()[-2000:]}")
        finally:
            end_tree([process])
        tally["kills"] += 1
        say(f"kill {tally['kills']}: {len(committed(output))} generations, {source.files} files have arrived")
    last = start_stream(source.folder, output, "once", log)
    try:
        code = last.wait(120)
    finally:
        end_tree([last])
    if code != 0:
        raise Failed(f"the last start ended with {code}: {log.read_text()[-2000:]}")
    rows = source.rows
    shards = check_set(output, source.images[:rows], source.labels[:rows])
    numbers = [generation.batch for generation in generations(shards)]
    if numbers != sorted(set(numbers)):
        raise Failed(f"{output}: batches {numbers}")
    return tally | {"generations": len(numbers), "rows": rows, "copies": shards.manifest.copies}


def committed(output: str) -> list[Any]:
    found = read_committed(STORE, output)
    return generations(found) if found else []


def main(argv: list[str] | None = None) -> int:
    assert __doc__
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.stream", description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="processes killed (default %(default)s)")
    parser.add_argument("--place", choices=["file", "hdfs"], default="file", help="(default %(default)s)")
    parser.add_argument("--jobs", action="store_true", help="kill whole applications")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments (default: the clock's)")
    args = parser.parse_args(argv)
    print(f"seed {args.seed}", flush=True)
    with ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory())
        if args.place == "hdfs":
            root = stack.enter_context(Hdfs()).uri + "/chaos"
        began = time.monotonic()
        try:
            tally = (job_campaign if args.jobs else partial(elsewhere, campaign))(root, args.kills, args.seed)
        except Failed as error:
            print(f"FAILED: {error}; seed {args.seed}", file=sys.stderr)
            return 1
    what = ", ".join(f"{count:,} {name}" for name, count in tally.items())
    print(f"{what} in {time.monotonic() - began:.0f} s: every generation once, and whole")
    return 0


if __name__ == "__main__":
    sys.exit(main())
