"""Whole runs with real processes: held against one process, against each other, and under faults."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.draws import shuffled
from tests.support.trainer_runs import Training, train_here, until
from tests.support.trainer_sets import SHAPE
from tests.unit.test_run_metrics import Samples, scrape
from trainer.checkpoints.read import whole
from trainer.data.batches import Batches
from trainer.data.loading import load_worker
from trainer.data.mean_image import subtracted_mean
from trainer.data.opening import open_shards
from trainer.models import ModelInput
from trainer.models.build import build
from trainer.models.cnn import CNN
from trainer.worker.step import step_seed

STEPS = 150  # some seconds: time to be disturbed in
COMMON = (
    *("--model", "cnn", "--batch-size", 24, "--learning-rate", 0.02, "--momentum", 0.9, "--recipe", "constant"),
    *("--threads", 1, "--quiet"),
)
Start = Callable[..., Training]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start runs that leave nothing behind, whatever the test does."""
    runs: list[Training] = []

    def begin(shards: Path, name: str, *flags: object, common: tuple[object, ...] = COMMON) -> Training:
        runs.append(Training(shards, tmp_path / name, *common, "--no-report", *flags))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


@pytest.fixture(scope="module")
def undisturbed(sets: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A BSP run that nothing happens to. Its oracle computes on the CPU, whose bits a GPU does not have."""
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    run = Training(sets[3], output, *COMMON, "--protocol", "bsp", "--servers", 2, "--steps", STEPS, "--device", "cpu")
    assert run.wait() == 0, run.said()
    yield run
    run.end()


def one_process(shards: Path, workers: int, steps: int) -> np.ndarray:
    """Synchronous training as one loop with torch's own autograd: parameters, then BatchNorm's statistics."""
    found = open_shards(str(shards))
    model = build(CNN(), ModelInput(SHAPE, 10), seed=0).model
    parameters = list(model.parameters())
    velocities = [torch.zeros_like(parameter) for parameter in parameters]
    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    batches = [
        Batches(
            shuffled(load_worker(found, worker), 24 // workers, seed=0, worker=worker),
            subtracted_mean(found),
            seed=0,
            worker=worker,
            augment=True,
        )
        for worker in range(workers)
    ]
    torch.set_num_threads(1)
    for step in range(steps):
        pulled, sums = [buffer.clone() for buffer in statistics], [torch.zeros_like(p) for p in parameters]
        pushed = []
        for worker, each in enumerate(batches):
            for buffer, value in zip(statistics, pulled, strict=True):
                buffer.copy_(value)
            batch = each.make(step).tensors
            torch.manual_seed(step_seed(0, worker, step))
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(batch.images_BCHW), batch.labels).backward()
            for total, parameter in zip(sums, parameters, strict=True):
                assert parameter.grad is not None
                total += parameter.grad.add(parameter.detach(), alpha=2e-4 if parameter.ndim > 1 else 0.0)
            pushed.append([buffer.clone() for buffer in statistics])
        with torch.no_grad():
            for parameter, velocity, total in zip(parameters, velocities, sums, strict=True):
                velocity.mul_(0.9).add_(total * (0.02 / workers))
                parameter.sub_(velocity)
        for index, buffer in enumerate(statistics):
            changes = torch.stack([mine[index] - pulled[index] for mine in pushed])
            buffer.copy_(pulled[index] + _sum(changes) / workers if workers > 1 else pushed[0][index])
    return torch.cat([tensor.detach().reshape(-1) for tensor in [*parameters, *statistics]]).numpy()


def _sum(vectors: torch.Tensor) -> torch.Tensor:
    """In their order, which torch.sum does not promise."""
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    return total


def test_bsp_on_two_servers_is_one_process_bit_for_bit(undisturbed: Training, sets: dict[int, Path]) -> None:
    np.testing.assert_array_equal(undisturbed.vector(), one_process(sets[3], 3, STEPS))


def test_asp_with_one_worker_is_plain_sgd_bit_for_bit(sets: dict[int, Path], tmp_path: Path) -> None:
    flags = ("--protocol", "asp", "--servers", 2, "--steps", 30, "--no-report", "--device", "cpu")
    run = train_here(sets[1], tmp_path / "asp", *COMMON, *flags)
    np.testing.assert_array_equal(run.vector(), one_process(sets[1], 1, 30))
    assert set(run.pushes()["staleness"]) == {0}


def test_the_run_tells_what_it_did(undisturbed: Training) -> None:
    result = undisturbed.result()
    assert result["cause"] == "finished"
    assert result["updates"] == STEPS
    assert result["staleness"]["max"] == 0
    assert result["final_accuracy"] > 0.15
    assert result["passes"]["whole"] == result["passes"]["true"] >= 4
    assert result["images_per_second"] > 0
    assert result["restarts"] == {"worker": 0, "server": 0, "evaluator": 0}
    pushes = undisturbed.pushes()
    assert sorted(zip(pushes["worker"], pushes["clock"], strict=True)) == [
        (w, c) for w in range(3) for c in range(STEPS)
    ]
    epochs = undisturbed.events("epoch")
    assert [event["epoch"] for event in epochs] == [1, 2, 3, 4, 5]
    assert epochs[-1]["loss"] < epochs[0]["loss"]
    assert (undisturbed.output / "report.html").stat().st_size > 10_000
    for name in ("model.safetensors", "best.safetensors"):
        assert (undisturbed.output / name).exists()


def test_nothing_is_left_of_a_run_that_has_ended(undisturbed: Training) -> None:
    until(lambda: not undisturbed.family(), "its last processes end")


def role_lines(log: Path) -> list[str]:
    """The messages of the supervisor in a role's log, which are lines of JSON."""
    return [json.loads(line)["message"] for line in log.read_text().splitlines() if line.startswith("{")]


def scrapes_to_the_end(address: str) -> list[Samples]:
    """Return the samples of scrapes that follow each other until the port is closed."""
    scrapes: list[Samples] = []
    while True:
        try:
            samples = scrape(address)
        except (OSError, HTTPException):
            return scrapes
        # The process may end while it answers: then a reply has a part of its headers, and no body.
        if not samples:
            return scrapes
        scrapes.append(samples)
        time.sleep(0.05)


def test_a_storm_of_kills_and_stops_changes_no_bit_of_bsp(
    sets: dict[int, Path], start: Start, undisturbed: Training
) -> None:
    """Every role dies or freezes once; the run goes on by itself and ends with the same bits. Its metrics count that."""
    flags = ("--protocol", "bsp", "--servers", 2, "--steps", STEPS, "--checkpoint-every-s", 0.3)
    run = start(
        sets[3], "storm", *flags, "--heartbeat-timeout-s", 4, "--metrics-port", "127.0.0.1:0", "--log-format", "json"
    )
    until(lambda: "metrics: " in run.said(), "the address is printed")
    address = re.findall('"message": "metrics: (.*?)"', run.said())[0]
    for version, role, number in (
        (5, "worker-1", signal.SIGKILL),
        (10, "server-1", signal.SIGKILL),
        (15, "evaluator-0", signal.SIGKILL),
        (20, "server-0", signal.SIGKILL),
        (30, "worker-2", signal.SIGSTOP),
        (40, "server-1", signal.SIGSTOP),
    ):
        run.wait_for_updates(version)
        run.send(role, number)
    scrapes = scrapes_to_the_end(address)
    assert run.wait() == 0, run.said()
    restarts = {
        role: scrapes[-1]["sharding_training_restarts_total", role] for role in ("worker", "server", "evaluator")
    }
    assert restarts == {"worker": 2, "server": 3, "evaluator": 1}
    last = {name: scrapes[-1]["sharding_training_" + name,] for name in ("version", "updates_total", "rollbacks_total")}
    assert last["rollbacks_total"] == run.result()["rollbacks"]
    assert last["updates_total"] >= last["version"] == STEPS, "repeated updates count again"
    lives = {role: role_lines(run.output / "logs" / f"{role}.log") for role in ("worker-1", "worker-2", "server-0")}
    killed = ["starts", "has ended: killed by SIGKILL", "starts again, after: killed by SIGKILL"]
    assert lives["worker-1"] == [*killed, "has ended: nothing is left to do"]
    assert lives["worker-2"][1:3] == ["has ended: no heartbeat for 4 s", "starts again, after: no heartbeat for 4 s"]
    assert lives["server-0"][-1] == "ends with the run: finished"
    np.testing.assert_array_equal(run.vector(), undisturbed.vector())
    assert run.result()["restarts"] == {"worker": 2, "server": 3, "evaluator": 1}
    assert run.result()["rollbacks"] >= 1  # server 0 takes none back when it dies, nor for a server that dies with it
    until(lambda: not run.family(), "its last processes end")


def test_a_killed_supervisor_ends_all_and_resumes_to_the_same_bits(
    sets: dict[int, Path], start: Start, undisturbed: Training
) -> None:
    flags = ("--protocol", "bsp", "--steps", STEPS, "--checkpoint-every-s", 0.3)
    run = start(sets[3], "killed", *flags, "--servers", 2)
    until(
        lambda: (run.output / "checkpoints").exists() and whole(run.output / "checkpoints")[-1:] > [0], "a checkpoint"
    )
    run.process.kill()
    until(lambda: not run.family(), "its processes end by themselves")
    again = train_here(sets[3], run.output, *COMMON, *flags, "--servers", 2, "--no-report", "--resume")
    assert again.events("start")[-1]["resumed_from"] > 0
    np.testing.assert_array_equal(again.vector(), undisturbed.vector())


@pytest.mark.full
def test_ctrl_c_leaves_a_checkpoint_and_resume_is_exact(
    sets: dict[int, Path], start: Start, undisturbed: Training
) -> None:
    run = start(sets[3], "interrupted", "--protocol", "bsp", "--servers", 2, "--steps", STEPS)
    run.wait_for_updates(1)  # so early that the supervisor's last status may tell of none
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to all its processes
    assert run.wait() == 1
    assert "--resume" in run.said()
    until(lambda: not run.family(), "its last processes end")
    left = whole(run.output / "checkpoints")[-1]
    assert 1 <= left < STEPS
    flags = ("--protocol", "bsp", "--servers", 2, "--steps", STEPS)
    again = train_here(sets[3], run.output, *COMMON, *flags, "--no-report", "--resume")
    assert again.events("start")[-1]["resumed_from"] == left
    np.testing.assert_array_equal(again.vector(), undisturbed.vector())


@pytest.mark.full
def test_asp_spends_its_budget_and_learns_though_workers_are_killed(sets: dict[int, Path], start: Start) -> None:
    flags = ("--protocol", "asp", "--servers", 2, "--steps", 200, "--no-augment")
    run = start(sets[3], "asp", *flags)
    for version in (15, 100, 200):
        run.wait_for_updates(version)
        run.send(f"worker-{version % 3}")
    assert run.wait() == 0, run.said()
    result = run.result()
    assert result["updates"] == 600
    assert result["restarts"]["worker"] == 3
    accepted = run.pushes()
    assert accepted["loss"][-30:].mean() < 0.85 * accepted["loss"][:30].mean()
    assert list(accepted["version"]) == list(range(1, 601))
    assert (accepted["staleness"] == accepted["version"] - 1 - accepted["version_pulled"]).all()


def nobody_may_go_on(run: Training, bound: int) -> int:
    """Return the number of pushes of a run whose worker 1 is as far behind as the bound permits; 0 otherwise."""
    pushes = run.pushes()
    done = pushes.groupby("worker")["clock"].max() + 1
    return len(pushes) if done[0] == done[2] == done[1] + bound + 1 else 0


@pytest.mark.full
def test_ssp_waits_for_a_frozen_worker_and_not_for_a_lost_one(sets: dict[int, Path], start: Start) -> None:
    """A push says at which version its step began: what had been applied by then gives every worker's clock."""
    bound = 2
    flags = ("--protocol", "ssp", "--staleness-bound", bound, "--servers", 2, "--steps", 200)
    run = start(sets[3], "ssp", *flags, "--heartbeat-timeout-s", 5)
    run.wait_for_updates(12)
    run.send("worker-1", signal.SIGSTOP)
    stood_still = until(lambda: nobody_may_go_on(run, bound), "the others wait for the frozen worker")
    assert run.wait() == 0, run.said()
    pushes = run.pushes()
    before = pushes[:stood_still]
    for row in before.itertuples():
        applied = before[before["version"] <= row.version_pulled]
        clocks = [int((applied["worker"] == worker).sum()) for worker in range(3)]
        assert clocks[row.worker] == row.clock
        assert row.clock - min(clocks) <= bound
    frozen = int((before["worker"] == 1).sum())
    held = before.groupby("worker")["clock"].max() + 1  # steps done when nobody might go on
    assert [held[0], held[2]] == [frozen + bound + 1] * 2
    assert pushes["clock"][stood_still:].max() > frozen + bound
    assert run.result()["restarts"]["worker"] == 1
    assert run.result()["updates"] == 600
