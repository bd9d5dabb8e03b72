"""Every exchange of the registry in virtual time: what all of them promise, under deaths, restarts and resumption."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from pipeline.core import command_line
from pipeline.core.errors import UsageError
from tests.clusters.machine import ROOT
from tests.support.tiers import only
from tests.support.virtual_runs import QUIET, RESUME, final, virtual
from trainer import Options, Result
from trainer.checkpoints.prune import WAITING, prune
from trainer.checkpoints.read import versions
from trainer.checkpoints.state import folder_of
from trainer.config import Config
from trainer.exchange import EXCHANGES, Exchange
from trainer.exchange.neighbours import NeighbourExchange
from trainer.flags import build_parser, config_of
from trainer.protocols import PROTOCOLS
from trainer.sampling import SAMPLERS
from trainer.simulation.engine import Engine
from trainer.simulation.failures import Failure, parse_failures
from trainer.simulation.peers.engine import PeerEngine
from trainer.simulation.profiles import parse_profile
from trainer.simulation.replay import replay

WORKERS, STEPS = 3, 8
# Two epochs of four steps, and times that differ by worker and step.
VALUES: dict[str, Any] = {"workers": WORKERS, "steps": STEPS, "batch_size": 30, "rows": 120, "momentum": 0.9}
VALUES |= {"profile": parse_profile("lognormal:0.5"), "latency_ms": 5.0, "bandwidth_mbps": 0.5, "learning_rate": 0.02}
# Parameters of exchanges whose defaults need evaluations, which the toy loss has not.
OWN_VALUES: dict[str, dict[str, Any]] = {"strategy-switch": {"alpha": 0.5}}


class Case(NamedTuple):
    """An exchange, and the protocol of its run."""

    exchange: str
    protocol: str

    @property
    def kind(self) -> type[Exchange]:
        return EXCHANGES[self.exchange]

    @property
    def is_exact(self) -> bool:
        """Return whether its bits depend neither on times nor on failures that only delay gradients."""
        stages = [protocol for _, protocol in self.kind().stages()] or [PROTOCOLS[self.protocol]()]
        return all(protocol.reproducible for protocol in stages)

    @property
    def chooses_protocol(self) -> bool:
        return self.kind.protocol is None and not self.kind().stages()


def find_cases() -> Iterator[Case]:
    """Yield every exchange with its own protocol, or with an asynchronous and a synchronous one."""
    for name, kind in EXCHANGES.items():
        if kind.in_virtual_time:
            default = Case(name, kind.protocol or "asp")
            yield from (default, Case(name, "bsp")) if default.chooses_protocol else (default,)


CASES = list(find_cases())
every_exchange = pytest.mark.parametrize("case", CASES, ids="-".join)


def train(output: Path, case: Case, options: Options = QUIET, **values: Any) -> Result:
    own = OWN_VALUES.get(case.exchange, {})
    return virtual(output, case.protocol, options, exchange=case.exchange, **VALUES | own | values)


def bits_of(result: Result) -> tuple[bytes, bytes]:
    """All that happened, and the parameters that came of it."""
    assert isinstance(result.output, Path)
    return (result.output / "pushes.csv").read_bytes(), final(result).tobytes()


def assert_every_gradient_counts_once(done: Result, calm: Result) -> None:
    """Check a run against one without failures: it ends, with as many updates and with no gradient twice."""
    pushes = done.pushes()
    accepted = pushes[pushes["accepted"] == 1]
    assert (done.cause, done.updates) == ("finished", calm.updates)
    assert not accepted.duplicated(["worker", "clock"]).any()
    assert done.examples == accepted["examples"].sum()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Result]:
    """A run of every exchange without failures."""
    return {case: train(tmp_path_factory.mktemp("calm") / "run", case) for case in CASES}


@every_exchange
def test_every_gradient_of_a_calm_run_is_used_once(case: Case, calm: dict[Case, Result]) -> None:
    done = calm[case]
    assert_every_gradient_counts_once(done, done)
    assert done.pushes().groupby("worker").size().sum() == WORKERS * STEPS
    assert done.examples == 30 * STEPS
    assert (done.restarts, done.rollbacks) == ({"worker": 0, "server": 0, "evaluator": 0}, 0)


@every_exchange
def test_the_same_command_repeats_its_bits(case: Case, calm: dict[Case, Result], tmp_path: Path) -> None:
    """Repeat runs with and without failures; another seed has other bits."""
    failures = parse_failures("worker:2@0.4+0.3,server@0.7+0.2")
    one, two = (train(tmp_path / name, case, failures=failures) for name in ("one", "two"))
    assert bits_of(one) == bits_of(two)
    assert one.seconds == two.seconds
    assert bits_of(train(tmp_path / "calm", case)) == bits_of(calm[case])
    assert bits_of(train(tmp_path / "other", case, seed=1)) != bits_of(calm[case])


# Exchanges that train as stages of others; a run of ten thousand workers takes 4 to 8 s of CPU time.
STAGES = {exchange.name for kind in EXCHANGES.values() for exchange, _ in kind().stages()}


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in CASES if case.exchange not in STAGES], ids="-".join)
def test_ten_thousand_workers_train_on_the_toy_loss(case: Case, tmp_path: Path) -> None:
    """Train two epochs of one step per worker, so that a switch leaves one to either stage.

    The other exchanges, all-reduce and parameter servers by bsp and asp, train here as stages."""
    done = train(tmp_path / "run", case, workers=10_000, batch_size=10_000, rows=10_000, steps=2)
    assert_every_gradient_counts_once(done, done)
    assert done.examples == 2 * 10_000
    assert len(done.stages) == max(1, len(case.kind().stages()))


def event_times(output: Path, case: Case, monkeypatch: pytest.MonkeyPatch, **values: Any) -> tuple[Result, list[float]]:
    """Train without failures; return the result and the distinct virtual times of all its events."""
    times: set[float] = {0.0}
    with monkeypatch.context() as patch:
        for engine in (Engine, PeerEngine):
            patch.setattr(engine, "_handle", recording(times, engine._handle))
        return train(output, case, **values), sorted(times)


def recording(times: set[float], handle: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return ``handle`` of an engine, which also adds the time of every event to ``times``."""

    def record_and_handle(engine: Any, event: Any) -> None:
        times.add(event.time)
        handle(engine, event)

    return record_and_handle


def assert_no_gradient_is_lost(done: Result, calm: Result, case: Case, victim: int | None, steps: int) -> None:
    """Check that the budget was spent on gradients that all count once, and that the parameters follow from the log."""
    assert_every_gradient_counts_once(done, calm)
    accepted = done.pushes()[done.pushes()["accepted"] == 1]
    used = set(zip(accepted["worker"], accepted["clock"], strict=True))
    lost = set(product(range(WORKERS), range(steps))) - used
    if case.is_exact and not lost:
        assert final(done).tobytes() == final(calm).tobytes()
        return
    # Neighbours go on without a dead worker, whose rounds are missing; asp makes up for a lost step by a later one.
    assert len(used) == WORKERS * steps or (
        issubclass(case.kind, NeighbourExchange) and {w for w, _ in lost} == {victim}
    )
    assert replay(done.output).is_equal


@pytest.mark.slow
@every_exchange
@pytest.mark.parametrize("victims", only(["all at some events"], ["all at some events", "servers", "workers"]))
def test_a_death_at_any_event_ends_no_run(
    case: Case, victims: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill right before or after events of a short run: the servers at every one, and at every one a worker in its turn.

    By default, all of them take turns in dying, at every third event."""
    in_turn, stride = {
        "all at some events": ((None, *range(WORKERS)), 3),
        "servers": ((None,), 1),
        "workers": (tuple(range(WORKERS)), 1),
    }[victims]
    values: dict[str, Any] = {"steps": 4, "rows": 60, "checkpoint_every_s": 0.2}
    undisturbed, times = event_times(tmp_path / "calm", case, monkeypatch, **values)
    rng = np.random.default_rng([CASES.index(case), len(in_turn)])
    assert len(times) > WORKERS * 4, "more than the ends of all steps"
    # Nothing is killed in a run that has ended.
    for number, time in enumerate(times[:-1:stride]):
        victim = in_turn[number % len(in_turn)]
        at_s = time if rng.random() < 0.5 else float(np.nextafter(time, np.inf))
        failure = Failure(victim, at_s, rng.uniform(0.02, 0.4))
        done = train(tmp_path / str(number), case, failures=(failure,), **values)
        try:
            assert_no_gradient_is_lost(done, undisturbed, case, victim, 4)
            assert done.restarts["server" if victim is None else "worker"] == 1
            assert done.rollbacks >= (victim is None)
        except AssertionError as error:
            raise AssertionError(f"{failure!r}") from error


def cut_after(run: Path, version: int) -> None:
    """Leave of a run what a kill right after a checkpoint leaves."""
    (run / "result.json").unlink()
    for later in versions(run / "checkpoints"):
        if later > version:
            shutil.rmtree(folder_of(run / "checkpoints", later))


@pytest.mark.slow
@every_exchange
def test_a_run_resumes_from_every_checkpoint(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact ones end with the same bits and the same log, also through a death."""
    monkeypatch.setattr(prune, "__defaults__", (1000, WAITING))
    values: dict[str, Any] = {"failures": parse_failures("worker:1@0.45+0.2"), "checkpoint_every_s": 0.25}
    whole = train(tmp_path / "whole", case, **values)
    found = versions(tmp_path / "whole" / "checkpoints")
    assert len(found) >= 4
    for version in found[:-1]:
        part = tmp_path / f"part-{version}"
        shutil.copytree(tmp_path / "whole", part)
        cut_after(part, version)
        again = train(part, case, RESUME, **values)
        assert_every_gradient_counts_once(again, whole)
        if case.is_exact:
            assert final(again).tobytes() == final(whole).tobytes(), version
            assert again.pushes()[["version", "worker", "clock"]].equals(whole.pushes()[["version", "worker", "clock"]])


@every_exchange
def test_a_replay_has_the_bits_or_refuses_in_one_line(case: Case, tmp_path: Path) -> None:
    done = train(tmp_path / "run", case, failures=parse_failures("worker:1@0.6+0.2,server@0.9+0.1"))
    try:
        assert replay(done.output).is_equal
    except UsageError as refusal:
        assert f"by {case.exchange}, which a replay cannot compute" in str(refusal)  # noqa: PT017  the other outcome
        assert "\n" not in str(refusal)  # noqa: PT017


# The command line and the documents


def config_from(*words: str) -> Config:
    common = ["--shards", "s", "--output", "o", "--steps", "3"]
    return config_of(command_line.parse(build_parser(), [*common, *words]))


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_has_code_flags_and_a_row_of_its_readme(name: str) -> None:
    kind = EXCHANGES[name]
    assert kind.in_virtual_time or kind.client
    assert not kind.client or callable(import_module(kind.client).open_client)
    assert callable(import_module(kind.server).main)
    assert kind.summary
    known = {word for action in build_parser()._actions for word in action.option_strings}
    assert {f"--{item.name.replace('_', '-')}" for item in fields(kind)} <= known
    assert f"\n| `{name}` | " in (ROOT / "trainer" / "exchange" / "README.md").read_text()


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_configuration_keeps_its_exchange_when_saved(name: str) -> None:
    config = config_from("--exchange", name)
    assert config.exchange == EXCHANGES[name]()
    assert Config.from_json(json.loads(json.dumps(config.to_json()))) == config


def cells_of_the_readme(column: str) -> dict[str, str]:
    """Return what the table of exchanges has in a column, by exchange."""
    text = (ROOT / "trainer" / "exchange" / "README.md").read_text()
    table = text[text.index("| exchange |") :].partition("\n\n")[0]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return {row[0].strip("`"): row[head.index(column)] for row in rows}


def supported_pairs() -> Iterator[tuple[str, list[str], str]]:
    """Yield every exchange with every protocol and sampler, and the line that refuses them; "" if the table has them."""
    protocols, samplers = cells_of_the_readme("protocols"), cells_of_the_readme("samplers")
    assert protocols.keys() == EXCHANGES.keys()
    for name, kind in EXCHANGES.items():
        # A cell is "all", or "all; with `flags` all but `samplers`": the second part is of a command with these flags.
        always, _, part = samplers[name].partition("; with ")
        flags, _, but = part.partition(" all but ")
        assert always == "all"
        assert bool(flags) == bool(but)
        has = "protocols of its own" if kind().stages() else "no protocols"
        for protocol, sampler in product((None, *PROTOCOLS), SAMPLERS):
            words = ["--sampling", sampler, *(["--protocol", protocol] if protocol else [])]
            words += ["--example-table", "t"] if SAMPLERS[sampler].column else []
            is_refused = protocol and protocols[name].strip("[").partition("]")[0] != "all"
            line = f"--exchange {name} has {has}: leave out --protocol {protocol}" if is_refused else ""
            if (
                protocol
                and not is_refused
                and getattr(SAMPLERS[sampler], "has_row_entries", False)
                and not PROTOCOLS[protocol].reads_own_writes
            ):
                line = (
                    f"--sampling {sampler} needs a worker's losses before its next mini-batch, but --protocol {protocol} may"
                    " apply them later: give another --protocol, such as asp, or another --sampling"
                )
            yield name, words, line
            if flags and not protocol:
                line = f"needs passes over fixed rows: leave out --sampling {sampler}" if f"`{sampler}`" in but else ""
                yield name, [*words, *flags.strip("`").split()], line and f"{flags.strip('`')} {line}"


def test_the_readme_has_the_pairs_that_are_supported() -> None:
    """Every exchange, protocol and sampler: a pair is accepted, or refused by one line, as the table says."""
    parser = build_parser()
    expected, found = {}, {}
    for name, words, line in supported_pairs():
        words = ["--shards", "s", "--output", "o", "--steps", "3", "--exchange", name, *words]
        expected[" ".join(words)] = line
        try:
            config = config_of(command_line.parse(parser, words))
            assert (config.exchange.name, config.sampler.name) == (name, config.data.sampling)
            found[" ".join(words)] = ""
        except UsageError as refusal:
            found[" ".join(words)] = str(refusal)
    assert found == expected
    assert len(found) == len(EXCHANGES) * (len(PROTOCOLS) + 1) * len(SAMPLERS) + len(SAMPLERS)
