"""Kill, freeze and cut real training runs at random moments, and hold what they end with against undisturbed ones.

``python -m tests.campaigns.training --kills 200``: a run of two hosts on this machine, one with the servers, the
evaluator and a worker, one whose workers reach them over connections that can be cut. What happens next is drawn from
a seed, which is printed: the same seed draws the same acts in the same order. Every process may be hit: roles,
supervisors, the process that the roles are forked from. A supervisor that has ended is started again, as a person or
a scheduler would.

A run of BSP or all-reduce must end with the bits of an undisturbed BSP run, one of ``--collective torch`` with those of
an undisturbed run of its own kind, an ASP run with those that its log gives when it is computed again; each has trained
every row once a pass, and leaves no process behind. A run with a switch is held to what ASP is, and has switched once, at
its epoch. A run of d-psgd or matcha goes on without a lost worker: no gradient may count twice, every round must have
some, the result is the mean of the models of the last checkpoint, and the log gives the same bits again."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.campaigns.cable import Cable
from tests.clusters import free_ports
from tests.support.slow_model import SLOW
from tests.support.trainer_runs import Training, train_here
from trainer.checkpoints.read import read_state
from trainer.checkpoints.replica_file import open_replicas, replica_name
from trainer.checkpoints.state import folder_of
from trainer.simulation.replay import replay

STEPS, ROWS = 600, 720
RUN = (
    *(*SLOW, "--batch-size", 24, "--learning-rate", 0.02, "--threads", 1),
    *("--steps", STEPS, "--checkpoint-every-s", 0.5, "--no-epoch-checkpoints", "--heartbeat-timeout-s", 3),
    *("--max-restarts", 10_000, "--no-report", "--quiet"),
)
EXCHANGES: dict[str, tuple[tuple[str, tuple[object, ...]], ...]] = {
    "parameter-server": (("bsp", ("--protocol", "bsp")), ("asp", ("--protocol", "asp"))),
    "all-reduce": (
        ("all-reduce", ("--exchange", "all-reduce")),
        # Over several hosts it needs --encryption off.
        ("torch", ("--exchange", "all-reduce", "--collective", "torch", "--encryption", "off")),
    ),
}
# A loss changes less than such a threshold: the rule decides at the first epoch at which it can, in the middle of kills.
RULE = ("--exchange", "strategy-switch", "--epoch-checkpoints", "--switch-window", 5, "--switch-threshold", 1e6)
EXCHANGES |= {
    "sync-switch": (("sync-switch", ("--exchange", "sync-switch", "--fraction", 0.5)),),
    "strategy-switch": (
        ("strategy-switch", ("--exchange", "strategy-switch", "--alpha", 0.5)),
        ("strategy-by-rule", RULE),
    ),
}
# The first epochs of second stages: half of the 20, or one after those whose losses the rule reads.
SWITCHES = {"sync-switch": 10, "strategy-switch": 10, "strategy-by-rule": 6}
EXCHANGES |= {name: ((name, ("--exchange", name)),) for name in ("d-psgd", "matcha")}
OWN_MODELS = ("d-psgd", "matcha")
REPLAYED = ("asp", *SWITCHES)
SERVERS = dict.fromkeys(("bsp", *REPLAYED), 2) | dict.fromkeys(("all-reduce", "torch", *OWN_MODELS), 1)
PATIENCE_S = 240.0  # of a run that nobody disturbs any more
ACTS_A_RUN = 10
ROLES_SHARE = 0.8  # of what is killed or frozen; the rest are supervisors and the processes that roles are forked from
ACTS = {"kill": 0.55, "freeze": 0.25, "cut": 0.1, "block": 0.1}


class Act(NamedTuple):
    """What is done next: to whom, as a share of all that are there; after a wait; for how long, of a freeze or a block."""

    kind: str
    whom: float
    wait_s: float
    lasts_s: float


def acts(seed: int) -> Iterator[Act]:
    """An endless sequence, the same for the same seed."""
    rng = np.random.default_rng(seed)
    while True:
        kind = str(rng.choice(list(ACTS), p=list(ACTS.values())))
        yield Act(kind, rng.random(), rng.exponential(1.2), rng.exponential(2.5))


class Failed(AssertionError):
    """A run that did not end as it must."""


@dataclass
class Disturbed:
    """One run on two hosts, with the second's connections in our hands."""

    shards: Path
    output: Path
    way: str
    hosts: list[Training] = field(default_factory=list)
    cables: list[Cable] = field(default_factory=list)
    frozen: dict[int, float] = field(default_factory=dict)  # process numbers, and when they go on
    ended: list[int | None] = field(default_factory=lambda: [None, None])
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.servers = SERVERS[self.way]
        servers = ",".join(f"server:{index}" for index in range(self.servers))
        self.roles = (f"{servers},evaluator,worker:0", "worker:1,worker:2")
        ports = free_ports(self.servers)
        self.cables = [Cable(port) for port in ports]
        own = ",".join(f"tcp://127.0.0.1:{port}" for port in ports)
        through = ",".join(f"tcp://127.0.0.1:{cable.port}" for cable in self.cables)
        self.addresses = [own, through]
        self.token = self.output.parent / "token"
        self.token.write_text("0123456789abcdef0123456789abcdef\n")
        self.hosts = [self._start(index) for index in range(2)]

    def _start(self, index: int, *flags: str) -> Training:
        where = ("--roles", self.roles[index], "--addresses", self.addresses[index], "--token-file", self.token)
        how = next(how for ways in EXCHANGES.values() for way, how in ways if way == self.way)
        return Training(self.shards, self.output, *RUN, *how, "--servers", self.servers, *where, *flags)

    def look(self) -> None:
        """Let what was frozen go on when it is time, and start again the supervisors that have ended without success."""
        for pid, until in list(self.frozen.items()):
            if time.monotonic() >= until:
                del self.frozen[pid]
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        for index, host in enumerate(self.hosts):
            code = host.process.poll()
            if code == 0:
                self.ended[index] = 0
            elif code is not None:
                if code != -signal.SIGKILL:
                    raise Failed(f"host {index} ended by itself, with {code}: {host.said()[-500:]}")
                has_begun = (self.output / "config.json").exists()
                self.hosts[index] = self._start(index, *(["--resume"] if index == 0 and has_begun else []))
                self.done["started again"] += 1

    @property
    def is_over(self) -> bool:
        return self.ended == [0, 0]

    def do(self, act: Act) -> bool:
        """Do it, if there is anything that it can be done to."""
        if act.kind in ("cut", "block"):
            cable = self.cables[int(act.whom * len(self.cables))]
            cable.cut() if act.kind == "cut" else cable.block(act.lasts_s)
            self.done[act.kind] += 1
            return True
        there = self._there(roles=act.whom < ROLES_SHARE) or self._there(roles=act.whom >= ROLES_SHARE)
        if not there:
            return False
        name, pid = there[int(act.whom * 1000) % len(there)]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if act.kind == "kill" else signal.SIGSTOP)
        if act.kind == "freeze":
            self.frozen[pid] = time.monotonic() + act.lasts_s
        self.done[f"{act.kind} {name.partition('-')[0]}"] += 1
        return True

    def _there(self, *, roles: bool) -> list[tuple[str, int]]:
        """The names and numbers of all roles' processes, or of all others."""
        found = []
        for host in self.hosts:
            for pid, named in host.names().items():
                name = "supervisor" if pid == host.process.pid else named
                is_role = name.partition("-")[0] in ("server", "worker", "evaluator")
                if is_role == roles and pid not in self.frozen:
                    found.append((name if name != "python" else "helper", pid))
        return sorted(found)

    def finish(self) -> None:
        """To its end, without further ado. Raises Failed where it does not come."""
        end = time.monotonic() + PATIENCE_S
        # A helper may be frozen for longer than the run lasts, and ends by itself once it goes on.
        while not self.is_over or self.frozen:
            if time.monotonic() > end:
                said = "\n".join(host.said()[-500:] for host in self.hosts)
                raise Failed(f"the run has not ended {PATIENCE_S:.0f} s after the last act:\n{said}")
            self.look()
            time.sleep(0.1)

    def close(self) -> None:
        for pid in self.frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for host in self.hosts:
            host.end()
        for cable in self.cables:
            cable.close()


def check(run: Disturbed, expected: np.ndarray) -> None:
    """Raises Failed where the run is not what an undisturbed one is."""
    result = run.hosts[0].result()
    if result["cause"] != "finished":
        raise Failed(f"result.json says {result['cause']}")
    if run.way in OWN_MODELS:
        check_own_models(run)
    else:
        check_gradients(run, expected)
    wait = time.monotonic() + 20
    while left := [process for host in run.hosts for process in host.family()]:
        if time.monotonic() > wait:
            raise Failed(f"processes are left: {[f'{each.name()}, {each.status()}' for each in left]}")
        time.sleep(0.1)


def check_own_models(run: Disturbed) -> None:
    """Raises Failed where a run of workers with models of their own lacks a round, or its mean is not theirs."""
    folder = run.hosts[0]
    pushes = folder.pushes()
    rounds = folder.result()["updates"]
    if pushes.duplicated(["worker", "clock"]).any() or set(pushes["clock"]) != set(range(rounds)):
        raise Failed(f"{len(pushes)} gradients of {pushes['clock'].nunique()} in {rounds} rounds")
    root = run.output / "checkpoints"
    state = read_state(root, rounds)
    shape = (3, state.num_parameters, state.num_buffers)
    models = open_replicas(folder_of(root, rounds) / replica_name(state.generation), *shape, rounds)
    present = [int(worker) for worker in state.memory["replicas"]["begun"]]
    mean = np.array(models.values, np.float64)[present].mean(axis=0)
    if not np.allclose(folder.vector(), mean, rtol=1e-6, atol=1e-7):
        raise Failed("the parameters are not the mean of all models")
    check_replay(run)


def check_replay(run: Disturbed) -> None:
    """Raises Failed where the log does not give the parameters of the run, bit for bit."""
    if not replay(run.output).is_equal:
        raise Failed("the log, computed again, does not give the run's parameters")


def check_gradients(run: Disturbed, expected: np.ndarray) -> None:
    """Raises Failed where not every gradient is used once, or the parameters are others."""
    folder = run.hosts[0]
    passes = folder.result()["passes"]
    if passes["true"] != passes["whole"] or (run.way != "asp" and not passes["whole"]):
        raise Failed(f"not every row was trained once a pass: {passes}")
    pushes = folder.pushes()
    used = pushes[pushes["accepted"] == 1]
    if used.duplicated(["worker", "clock"]).any() or len(used) != STEPS * 3:
        raise Failed(f"{len(used)} accepted gradients, {used.duplicated(['worker', 'clock']).sum()} of them twice")
    if run.way in SWITCHES:
        check_stages(run)
    if run.way in REPLAYED:
        check_replay(run)
    elif not np.array_equal(folder.vector(), expected):
        raise Failed("the parameters are not those of an undisturbed run")


def check_stages(run: Disturbed) -> None:
    """Raises Failed where a run has not switched once, at its epoch."""
    stages = run.hosts[0].result()["stages"]
    if [stage["first_epoch"] for stage in stages] != [0, SWITCHES[run.way]]:
        raise Failed(f"the stages are {stages}")


def campaign(
    shards: Path,
    root: Path,
    kills: int,
    seed: int,
    say: Any = print,
    exchange: str | None = None,
    *,
    only: Collection[str] | None = None,
    acts_a_run: int = ACTS_A_RUN,
) -> Counter[str]:
    """Carry out ``kills`` acts, on runs of all kinds in turn, or of one exchange.

    Raises Failed; the folder of that run stays.

    only: kinds of runs; None for all. acts_a_run: most acts on one run."""
    fast = (*RUN, "--model", "logistic")  # the later --model counts
    bsp = train_here(shards, root / "undisturbed", *fast, "--protocol", "bsp", "--servers", 2).vector()
    how = {way: words for name, ways in EXCHANGES.items() for way, words in ways if exchange in (None, name)}
    how = {way: words for way, words in how.items() if only is None or way in only}
    ways = list(how)
    undisturbed = dict.fromkeys(ways, bsp)
    if "torch" in ways:  # the order of its additions is gloo's
        undisturbed["torch"] = train_here(shards, root / "undisturbed-torch", *fast, *how["torch"]).vector()
    upcoming, left, tally, number = acts(seed), kills, Counter[str](), 0
    while left:
        way = ways[number % len(ways)]
        (root / f"{number}-{way}").mkdir()
        run = Disturbed(shards, root / f"{number}-{way}" / "run", way)
        try:
            here = 0
            while left and here < acts_a_run and not run.is_over:
                act = next(upcoming)
                wait = time.monotonic() + act.wait_s
                while time.monotonic() < wait and not run.is_over:
                    run.look()
                    time.sleep(0.05)
                if not run.is_over and run.do(act):
                    here, left = here + 1, left - 1
            run.finish()
            check(run, undisturbed[way])
        finally:
            run.close()
        say(f"run {number}, {way}: {here} acts, as it must be; {left} to go")
        tally += run.done
        tally["runs"] += 1
        number += 1
    return tally


def _shards(root: Path) -> Path:
    """A small set for three workers."""
    sample, shards = root / "sample", root / "shards"
    for command in (
        ("sample", "--to", sample, "--rows", ROWS, "--test-rows", 100),
        (
            "shard",
            "--strategy",
            "stratified",
            "--input",
            sample,
            "--eval-input",
            sample,
            "--output",
            shards,
            "--workers",
            3,
        ),
    ):
        done = subprocess.run([sys.executable, "-m", "pipeline", *map(str, command)], capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"the shards could not be made: {done.stderr}")
    return shards


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.training", description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="acts in all (default %(default)s)")
    parser.add_argument("--seed", type=int, help="of the acts (default: the clock's)")
    parser.add_argument("--exchange", choices=list(EXCHANGES), help="only this exchange's runs (default: all)")
    parser.add_argument("--shards", type=Path, help="a set for three workers (default: a small one is made)")
    args = parser.parse_args(argv)
    seed = args.seed if args.seed is not None else int(time.time())
    print(f"seed {seed}: python -m tests.campaigns.training --kills {args.kills} --seed {seed}", flush=True)
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    began = time.monotonic()
    try:
        tally = campaign(args.shards or _shards(root), root, args.kills, seed, exchange=args.exchange)
    except Failed as error:
        print(f"FAILED: {error}\nits folder is {root}; seed {seed}", file=sys.stderr)
        return 1
    shutil.rmtree(root)
    what = ", ".join(f"{count} {name}" for name, count in sorted(tally.items()))
    print(f"{args.kills} acts in {time.monotonic() - began:.0f} s, all runs ended as they must: {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
