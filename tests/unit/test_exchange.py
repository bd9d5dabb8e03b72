"""Exchanges: their place in a configuration, and the worker's loop over a client without processes or sockets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.core import command_line
from pipeline.core.errors import UsageError
from tests.support.configs import make_config
from tests.support.draws import shuffled
from tests.support.local_client import LocalClient
from tests.support.local_exchange import Local
from trainer import watchdog
from trainer.api import train as start_training
from trainer.config import Config
from trainer.coordination.orders import StepMeasurements
from trainer.data.batches import Batches
from trainer.data.prefetch import Prefetch
from trainer.data.rows import Rows
from trainer.exchange import EXCHANGES
from trainer.exchange.all_reduce import AllReduce
from trainer.flags import build_parser, config_of
from trainer.launch.role_main import PULSE_S
from trainer.launch.role_processes import POLL_S
from trainer.models.base import ModelInput
from trainer.models.build import NetworkAndTask, build
from trainer.models.flat_vector import FlatModel
from trainer.models.linear import Logistic
from trainer.options import Options
from trainer.protocols import PROTOCOLS
from trainer.simulate import SimulationSettings, simulate
from trainer.worker.clients.base import MustRejoin, Turn, Vector
from trainer.worker.clients.leader_link import HEARTBEAT_S
from trainer.worker.loop import train
from trainer.worker.step import Step

SHAPE = (1, 1, 6)
ROWS, BATCH, STEPS, RATE = 10, 4, 7, 0.25


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange of a user's own: a file, a client and a registry line."""
    monkeypatch.setitem(EXCHANGES, Local.name, Local)


def config_from(*words: str) -> Config:
    common = ["--shards", "s", "--output", "o", "--steps", "3"]
    return config_of(command_line.parse(build_parser(), [*common, *words]))


# The configuration


def test_an_exchange_is_chosen_by_name_with_flags_of_its_own() -> None:
    config = config_from("--exchange", "local", "--own-share", "0.5")
    assert config.exchange == Local(own_share=0.5)
    assert Config.from_json(config.to_json()) == config
    assert config.identity() != config_from("--exchange", "local").identity()
    assert config_from().exchange == EXCHANGES["parameter-server"]()


def test_all_reduce_has_the_rate_and_the_momentum_of_bsp() -> None:
    config = config_from("--exchange", "all-reduce")
    assert config.protocol == PROTOCOLS["bsp"]()
    assert config.optimiser == config_from("--protocol", "bsp").optimiser
    assert (config.worker_timeout_s, config.heartbeat_timeout_s) == (2, 15)
    assert config_from("--exchange", "all-reduce", "--heartbeat-timeout-s", "9").worker_timeout_s == 9


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--own-share", "0.5"], "--exchange parameter-server has no --own-share 0.5: leave it out, or use local"),
        (["--exchange", "local", "--own-share", "2"], "--own-share must be at least 0 and at most 1, got 2.0"),
        (
            ["--exchange", "all-reduce", "--servers", "2"],
            "--exchange all-reduce keeps the model on the workers: leave out --servers 2",
        ),
        (
            ["--exchange", "all-reduce", "--tolerance", "0.1"],
            "--exchange all-reduce has no --tolerance: leave it out, or use parameter-server",
        ),
    ],
)
def test_a_flag_of_another_exchange_is_refused_in_one_line(words: list[str], line: str) -> None:
    with pytest.raises(UsageError) as refused:
        config_from(*words)
    assert str(refused.value) == line


def test_a_configuration_saved_before_there_were_exchanges_is_read() -> None:
    values = make_config(steps=3).to_json()
    assert values.pop("exchange") == {"name": "parameter-server"}
    assert Config.from_json(values) == make_config(steps=3)


def test_virtual_time_refuses_an_exchange_that_it_does_not_have(tmp_path: Path) -> None:
    config = make_config("", tmp_path / "run", exchange="local", steps=3)
    with pytest.raises(UsageError, match="--exchange local has no virtual time"):
        simulate(config, SimulationSettings(compute="quadratic", workers=2), Options(silent=True))
    assert not (tmp_path / "run").exists()


# The loop of a worker


class Turns:
    """A client that gives a fixed number of turns and exchanges nothing. It drops the worker once, at ``dropped``.

    missed_from, clock: the first mini-batch that the worker has missed, None for none, and its first turn."""

    def __init__(
        self, start: Vector, steps: int, missed_from: int | None = None, clock: int = 0, *, dropped: int = -1
    ) -> None:
        self.start = start
        self.steps = steps
        self.dropped = dropped
        self.pulled = np.zeros_like(start)
        self.pushed = np.zeros_like(start)
        self.clock = clock
        self.missed_from = missed_from
        self.joins = 0
        self.reports: list[StepMeasurements] = []
        self.cancelled: set[int] = set()
        self.given_up: list[int] = []

    def join(self) -> Turn | None:
        self.joins += 1
        self.pulled[:] = self.start
        return Turn(self.clock, 0, 1, self.missed_from)

    def exchange(self, turn: Turn, report: StepMeasurements) -> Turn | None:
        if turn.clock == self.dropped:
            self.dropped = -1
            raise MustRejoin
        self.reports.append(report)
        self.clock += 1
        return Turn(self.clock, 0, 1) if self.clock < self.steps else None

    def poll_cancelled(self, turn: Turn) -> bool:
        return turn.clock in self.cancelled

    def give_up(self, turn: Turn, report: StepMeasurements) -> Turn | None:
        self.given_up.append(turn.clock)
        return self.exchange(turn, report)

    def close(self) -> None:
        pass


def batches_of(worker: int) -> Batches:
    rng = np.random.default_rng(worker)
    images = rng.normal(size=(ROWS, *SHAPE)).astype(np.float32)
    rows = Rows(images, rng.integers(0, 3, ROWS), np.arange(ROWS), np.arange(ROWS, dtype=np.uint64))
    sampler = shuffled(rows, BATCH, seed=0, worker=worker)
    return Batches(sampler, np.zeros(1, np.float32), seed=0, worker=worker, augment=False)


def network() -> NetworkAndTask:
    return build(Logistic(), ModelInput(SHAPE, 3, False, True), seed=0)


def trained_alone(worker: int) -> Vector:
    """The oracle: torch's own loop on one worker's rows."""
    built = network()
    optimiser = torch.optim.SGD(built.model.parameters(), RATE)
    batches = batches_of(worker)
    for clock in range(STEPS):
        images, labels = batches.make(clock).tensors
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(built.model(images), labels).backward()
        optimiser.step()
    return FlatModel(built.model).read()


def run_loop(client: LocalClient | Turns, config: Config, worker: int = 0) -> None:
    torch.set_num_threads(1)
    step = Step(config, network(), client.pulled, client.pushed, torch.device("cpu"), 2)
    with Prefetch(batches_of(worker).make) as mini_batches:
        train(client, mini_batches, step, 0, worker)


def local_config() -> Config:
    return make_config(model="logistic", exchange="local", learning_rate=RATE, momentum=0.0, weight_decay=0.0)


@pytest.mark.slow
def test_workers_of_the_local_exchange_train_as_if_alone() -> None:
    config = local_config()
    start = FlatModel(network().model).read()
    for worker in (0, 1):
        inner = Turns(start, STEPS)
        client = LocalClient(config, inner)
        run_loop(client, config, worker)
        np.testing.assert_allclose(client.own, trained_alone(worker), rtol=1e-5, atol=1e-6)
        assert [report.examples for report in inner.reports] == [BATCH] * STEPS
        assert all(min(report.loss, report.seconds, report.read_s) > 0 for report in inner.reports)


def test_a_dropped_worker_joins_again_and_repeats_its_step() -> None:
    config = local_config()
    inner = Turns(FlatModel(network().model).read(), STEPS, dropped=3)
    run_loop(inner, config)
    assert (inner.joins, len(inner.reports)) == (2, STEPS)


def test_the_first_report_after_an_absence_has_the_missed_passes() -> None:
    """The first report counts the mini-batches that the worker missed as passed over."""
    first, present = 3, 9
    batches = batches_of(0)
    inner = Turns(FlatModel(network().model).read(), present + 2, first, present)
    step = Step(local_config(), network(), inner.pulled, inner.pushed, torch.device("cpu"), 2)
    with Prefetch(batches.make) as mini_batches:
        train(inner, mini_batches, step, 0, 0, batches.ends_of_passes)
    ends = [(clock + 1) * BATCH // ROWS - clock * BATCH // ROWS for clock in range(present + 2)]
    passes = [report.seen.passes for report in inner.reports if report.seen]
    assert passes == [sum(ends[first : present + 1]), ends[present + 1]]
    assert passes[0] > ends[present]


def test_a_cancelled_step_is_given_up_without_examples() -> None:
    """Between two of the four micro-batches of a step."""
    config = make_config(model="logistic", protocol="k-batch-bsp", cancel="preempt")
    inner = Turns(FlatModel(network().model).read(), STEPS)
    inner.cancelled = {2, 5}
    run_loop(inner, config)
    assert inner.given_up == [2, 5]
    assert [report.examples for report in inner.reports] == [0 if clock in (2, 5) else BATCH for clock in range(STEPS)]


def test_a_worker_has_started_when_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on, a missing heartbeat is noticed sooner."""
    monkeypatch.setattr(watchdog, "_has_started", False)
    found = []

    class Client(Turns):
        def join(self) -> Turn | None:
            found.append(watchdog.has_started())
            return super().join()

    assert not watchdog.has_started()
    run_loop(Client(FlatModel(network().model).read(), 1), make_config(model="logistic"))
    assert found == [True]


def test_a_frozen_worker_is_noticed_before_three_seconds() -> None:
    """Count the check of the supervisor, and several heartbeats before it, each of which may be late."""
    assert max(HEARTBEAT_S, PULSE_S) * 4 <= AllReduce.worker_timeout_s <= 3.0 - 2 * POLL_S


# All-reduce by torch.distributed


def test_torch_between_hosts_needs_encryption_off(tmp_path: Path) -> None:
    config = make_config("", tmp_path / "run", exchange="all-reduce", collective="torch")
    with pytest.raises(UsageError) as refused:
        start_training(config, Options(addresses=("tcp://host:7000",)))
    assert str(refused.value) == (
        "--collective torch does not encrypt gradients between hosts: give --encryption off too, on networks that you"
        " trust, or --collective mesh"
    )
    assert not (tmp_path / "run").exists()


def test_virtual_time_refuses_the_rounding_of_torch(tmp_path: Path) -> None:
    config = make_config("", tmp_path / "run", exchange="all-reduce", collective="torch")
    with pytest.raises(UsageError, match="--collective torch has no virtual time: leave it out"):
        simulate(config, SimulationSettings(compute="quadratic", workers=2), Options(silent=True))
    assert not (tmp_path / "run").exists()
