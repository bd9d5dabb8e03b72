"""Kill, freeze and starve real sharding runs at random moments, and hold what readers find against undisturbed ones.

``python -m tests.campaigns.shards --kills 200``: jobs/distribution_aware.py replaces a set by one for another number
of workers, in a local folder, on HDFS or on S3, on a local Spark or on a standalone cluster with executors of its
own. What happens next is drawn from a seed, which is printed: the same seed draws the same runs and acts in the same
order.

- SIGKILL of the driver with all its processes, of an executor, of a Python worker
- SIGSTOP of a driver for longer than its lease, while another run, as on another host, commits there; then it goes on
- a DataNode or the NameNode ended by SIGKILL, and started again

A job that has ended without success is run again, as a person or a scheduler would. All the while a reader that goes by the
manifest reads every byte: it must find one whole set, and the right one. So must a reader of all Parquet files once a run,
or the command ``clean``, has ended; then nothing else is left either."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from pipeline.upkeep.clean import clean
from tests.campaigns.plans import ACTS, Act, Plan, plans
from tests.campaigns.readers import Failed, Reader, check_plain, heartless
from tests.clusters import ROOT, S3, Hdfs, Standalone, end_tree
from tests.clusters.cluster_runs import FIT, LAYOUT, QUIET, STORE, digests, whole
from tests.clusters.servers import Server
from tests.clusters.submit import start_submit
from tests.conftest import make_rows, write_binary
from tests.support.places import files_below, put

ROWS, PIXELS = 8000, 192
PATIENCE_S = 300.0  # of a job that nobody disturbs any more
STALL = {"SHARDING_STALL_S": "10"}
FREEZE_S = 4.5  # longer than the lease of chaos_driver


@dataclass
class Site:
    """Where everything happens. expected: the files of the right sets, by number of workers; usual_s: an undisturbed run;
    held: for how many workers the set is, by store."""

    folder: Path
    hdfs: Hdfs
    standalone: Standalone
    s3: S3
    expected: dict[int, dict[str, str]] = field(default_factory=dict)
    usual_s: dict[str, float] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)

    def input(self, store: str) -> str:
        return f"{self.root(store)}/in"

    def master(self, spark: str) -> str:
        return "local[2]" if spark == "local" else self.standalone.master_url

    def prepare(self) -> None:
        """The input, and what undisturbed runs make of it. The set on S3 is a copy of the one in a local folder."""
        labels, images = make_rows(ROWS, seed=3, pixels=PIXELS)
        images[[17, 400, ROWS - 1]] = np.random.default_rng(3).integers(0, 2, (3, PIXELS)) * 255
        write_binary(self.folder / "in", labels, images, files=3)
        self.hdfs.client().upload("/chaos/in", str(self.folder / "in"))
        for path in (self.folder / "in").iterdir():
            put(f"{self.input('s3')}/{path.name}", path.read_bytes())
        ways = {("file", "local"): 2, ("hdfs", "standalone"): 3}
        for (store, spark), workers in ways.items():
            began = time.monotonic()
            job = Job(self, store, spark, workers)
            if job.wait() != 0 or digests(job.output) != self.expected.setdefault(workers, digests(job.output)):
                raise Failed(
                    f"an undisturbed run on {store}, {spark} is not what one in another store is: {job.said()}"
                )
            self.usual_s[f"{store} {spark}"] = time.monotonic() - began
            self.held[store] = workers
        made = self.output("file")
        for name in files_below(made):
            put(f"{self.output('s3')}/{name}", STORE.read(f"{made}/{name}"))
        self.held["s3"] = self.held["file"]
        # Where a local Spark reads and writes matters little beside its own start.
        self.usual_s |= dict.fromkeys(("hdfs local", "s3 local"), self.usual_s["file local"])

    def output(self, store: str) -> str:
        return f"{self.root(store)}/set"

    def root(self, store: str) -> str:
        return {"file": str(self.folder), "hdfs": f"{self.hdfs.uri}/chaos", "s3": f"{self.s3.uri}/chaos"}[store]

    def start_again(self, server: Server) -> None:
        server.kill()
        server.start()


class Job:
    """One spark-submit under way."""

    def __init__(self, site: Site, store: str, spark: str, workers: int, host: str = "") -> None:
        self.output, self.log = site.output(store), site.folder / f"log{host}.txt"
        arguments = ("--input", site.input(store), "--output", self.output, "--workers", workers, *LAYOUT, *FIT)
        with self.log.open("wb") as log:
            self.process = start_submit(
                ROOT / "tests" / "campaigns" / "driver.py",
                *arguments,
                *("--no-report", "--overwrite"),
                master=site.master(spark),
                conf={f"spark.executorEnv.{name}": value for name, value in STALL.items()},
                env={**QUIET, **STALL} | ({"CHAOS_HOST": host} if host else {}),
                output=log,
            )

    def processes(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return [self.process, *self.process.children(recursive=True)]
        return []

    def running(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def wait(self, seconds: float = PATIENCE_S) -> int:
        try:
            return int(self.process.wait(seconds))
        except psutil.TimeoutExpired:
            raise Failed(f"a job has not ended in {seconds:.0f} s: {self.said()}") from None

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


@dataclass
class Disturbed:
    """One run of a plan, which replaces the set that is there by one for ``after`` workers."""

    site: Site
    plan: Plan
    output: str
    after: int
    number: int
    tally: Counter[str] = field(default_factory=Counter)
    down: dict[int, float] = field(default_factory=dict)  # servers of HDFS by index, and when they are started again
    starts: int = 0
    since: float = 0.0

    def start(self) -> Job:
        self.starts += 1
        host = f"host-{self.number}-{self.starts}" if self.plan.alone else ""
        self.since = time.monotonic()
        return Job(self.site, self.plan.store, self.plan.spark, self.after, host)

    def carry_out(self, limit: int) -> None:
        usual = self.site.usual_s[f"{self.plan.store} {self.plan.spark}"]
        with Reader(self.output, self.site.expected) as reader:
            job = self.start()
            try:
                for act in self.plan.acts[:limit]:
                    self._until(self.since + act.moment * usual, job)
                    job = self.do(act, job)
                self.bring_up(wait=True)
                job = self.finish(job)
            finally:
                job.signal(signal.SIGCONT)
                end_tree([job.process])
                self.bring_up(wait=True)
            reader.look()
        if reader.wrong:
            raise Failed(reader.wrong)
        # A run that was frozen when it had committed is not told that another one has replaced its set since.
        if digests(self.output) != self.site.expected[self.after] and not self.tally["freeze driver"]:
            raise Failed(f"{self.output}: the job ended well, but its set is not there")
        self.check_plain()
        self.tally["reads"] += reader.seen

    def check_plain(self) -> None:
        """What a driver that was killed before its first heartbeat has left names no process: it stays for a lease."""
        if heartless(self.output):
            self.tally["killed without a heart yet"] += 1
            time.sleep(FREEZE_S)
            clean_elsewhere(self.output, alone=True)
        check_plain(self.output)

    def _until(self, moment: float, job: Job) -> None:
        while time.monotonic() < moment and job.running():
            self.bring_up()
            time.sleep(0.02)

    def bring_up(self, wait: bool = False) -> None:
        """Start the servers of HDFS again whose time it is, or all of them."""
        for index, until in list(self.down.items()):
            if wait or time.monotonic() >= until:
                del self.down[index]
                self.site.start_again(self.site.hdfs.servers[index])
        if wait and self.plan.store == "hdfs":
            self.site.hdfs.wait_live(len(self.site.hdfs.servers) - 1)

    def do(self, act: Act, job: Job) -> Job:
        """Do it; the job that is under way then."""
        if not job.running():
            job = self.again(job)
        if act.kind == "kill driver":
            job.signal(signal.SIGKILL)
            job.wait(30)
            self.tally[act.kind] += 1
            return self.again(job)
        if act.kind == "freeze driver":
            return self.freeze(job)
        if "node" in act.kind:
            index = 0 if act.kind == "kill namenode" else 1 + int(act.whom * (len(self.site.hdfs.servers) - 1))
            if index in self.down:
                return job
            self.site.hdfs.servers[index].kill()
            self.down[index] = time.monotonic() + 1 + 6 * act.whom
        else:
            there = self.site.standalone.executors() if act.kind == "kill executor" else self.pythons(job)
            if not there:
                self.tally["nobody there"] += 1
                return job
            end_tree([there[int(act.whom * len(there))]])
        self.tally[act.kind] += 1
        return job

    def pythons(self, job: Job) -> list[psutil.Process]:
        """The Python workers of a job, and the process that they are forked from."""
        origins = self.site.standalone.executors() if self.plan.spark == "standalone" else job.processes()[:1]
        found = []
        for origin in origins:
            with suppress(psutil.NoSuchProcess):
                found += [child for child in origin.children(recursive=True) if is_python_worker(child)]
        return found

    def freeze(self, job: Job) -> Job:
        """Freeze the driver; have another run, as on another host, commit there after the lease; and let it go on."""
        self.bring_up(wait=True)
        job.signal(signal.SIGSTOP)
        time.sleep(FREEZE_S)
        rival = Job(self.site, self.plan.store, "local", 5 - self.after, f"rival-{self.number}")
        try:
            if rival.wait() != 0:
                raise Failed(f"a run beside a frozen one failed: {rival.said()}")
        finally:
            end_tree([rival.process])
            job.signal(signal.SIGCONT)
        self.tally["freeze driver"] += 1
        return job

    def again(self, job: Job) -> Job:
        """Start the job again once it has ended; before that, run the command clean where the plan says so."""
        self.bring_up(wait=True)
        if self.plan.tidied:
            if self.plan.alone:
                time.sleep(FREEZE_S)  # until it counts as dead
            Reader(self.output, self.site.expected).look()
            clean_elsewhere(self.output, self.plan.alone)
            self.check_plain()
        return self.start()

    def finish(self, job: Job) -> Job:
        """To its end, without further ado. A job that failed while something was down or frozen is run again."""
        for _ in range(4):
            code = job.wait()
            if code == 0:
                return job
            told = [line for line in job.said().splitlines() if line.startswith("error: ")]  # Spark may log after it
            if code != 1 or not told:
                raise Failed(f"a job ended by itself, with {code}: {job.said()}")
            self.tally["told, and run again"] += 1
            job = self.again(job)
        raise Failed(f"a job does not come to its end: {job.said()}")


def is_python_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("python_workers" in part or "pyspark.daemon" in part for part in process.cmdline())
    return False


def clean_elsewhere(output: str, alone: bool) -> None:
    """The command clean. Where drivers are on hosts of their own, it knows of them by their hearts alone, and soon."""
    from pipeline.core.shardset.attempt import Attempt
    from tests.campaigns.driver import HEARTBEAT_S, LEASE_S

    defaults = Attempt.__init__.__kwdefaults__
    assert defaults
    usual = dict(defaults)
    try:
        if alone:
            defaults.update(lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
        clean(STORE, output)
    finally:
        defaults.update(usual)


def campaign(site: Site, kills: int, seed: int, say: Any = print) -> Counter[str]:
    """As many acts as asked for. Raises Failed."""
    site.prepare()
    say(f"undisturbed: {', '.join(f'{way} {seconds:.1f} s' for way, seconds in site.usual_s.items())}")
    tally, upcoming, number = Counter[str](), plans(seed), 0
    while (left := kills - sum(count for kind, count in tally.items() if kind in ACTS)) > 0:
        plan = next(upcoming)
        after = 5 - site.held[plan.store]
        run = Disturbed(site, plan, site.output(plan.store), after, number)
        run.carry_out(left)
        site.held[plan.store] = whole(run.output).num_workers
        tally += run.tally
        tally["runs"] += 1
        number += 1
        did = ", ".join(f"{count} {kind}" for kind, count in run.tally.items())
        say(f"run {number}, {plan.store}, {plan.spark}: {did}: as it must be")
    return tally


def main(argv: list[str] | None = None) -> int:
    assert __doc__
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.shards", description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="acts in all (default %(default)s)")
    parser.add_argument("--seed", type=int, help="of the acts (default: the clock's)")
    args = parser.parse_args(argv)
    seed = args.seed if args.seed is not None else int(time.time())
    print(f"seed {seed}: python -m tests.campaigns.shards --kills {args.kills} --seed {seed}", flush=True)
    os.environ.update(STALL)
    folder = Path(tempfile.mkdtemp(prefix="chaos-shards-"))
    began = time.monotonic()
    with ExitStack() as stack:
        hdfs, standalone, s3 = Hdfs(), Standalone(), S3()
        for cluster in (hdfs, standalone, s3):
            stack.enter_context(cluster)
        os.environ.update(s3.settings)
        try:
            tally = campaign(Site(folder, hdfs, standalone, s3), args.kills, seed, lambda line: print(line, flush=True))
        except Failed as error:
            print(f"FAILED: {error}\nits folder is {folder}; seed {seed}", file=sys.stderr)
            return 1
    shutil.rmtree(folder)
    what = ", ".join(f"{count} {name}" for name, count in sorted(tally.items()))
    print(f"{args.kills} acts in {time.monotonic() - began:.0f} s, readers found whole sets only: {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
