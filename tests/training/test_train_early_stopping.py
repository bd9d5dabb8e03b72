"""Early stopping on real processes: the same end as in virtual time, through kills and on several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import make_config
from tests.support.trainer_runs import RunFolder, Training, train_here, until
from trainer import Options, Result
from trainer.simulate import simulate
from trainer.simulation.options import SimulationSettings
from trainer.simulation.replay import replay

pytestmark = pytest.mark.full

EPOCHS, PATIENCE, MIN_DELTA = 12, 2, 0.15
FLAGS: tuple[Any, ...] = (
    *("--model", "logistic", "--batch-size", 24, "--threads", 1, "--device", "cpu", "--quiet", "--no-report"),
    *("--epochs", EPOCHS, "--patience", PATIENCE, "--min-delta", MIN_DELTA),
)


def virtual(shards: Path, output: Path, **values: Any) -> Result:
    """Return the same run in virtual time, where evaluations take no time."""
    stopping = {"patience": PATIENCE, "min_delta": MIN_DELTA, "epochs": EPOCHS}
    common: dict[str, Any] = {"model": "logistic", "batch_size": 24, "threads": 1} | stopping
    config = make_config(shards, output, **common | values)
    return simulate(config, SimulationSettings(), Options(silent=True, report=False))


@pytest.fixture(scope="module")
def expected(sets: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The end of a run of bsp in virtual time, whose bits every run of bsp and of all-reduce has."""
    done = virtual(sets[3], tmp_path_factory.mktemp("virtual") / "run", protocol="bsp")
    assert done.early_stop
    assert done.early_stop["epoch"] < EPOCHS
    return done


def assert_same_end(run: RunFolder, expected: Result) -> None:
    """Hold a run of the same bits against the one in virtual time."""
    result = run.result()
    assert (result["cause"], result["early_stop"]) == ("finished", expected.early_stop)
    assert run.vector().tobytes() == RunFolder(Path(str(expected.output))).vector().tobytes()
    assert (run.output / "model.safetensors").read_bytes() == (expected.output / "model.safetensors").read_bytes()
    assert (run.output / "best.safetensors").read_bytes() == (expected.output / "best.safetensors").read_bytes()


def test_real_processes_stop_with_the_bits_of_virtual_time(
    sets: dict[int, Path], tmp_path: Path, expected: Result
) -> None:
    run = train_here(sets[3], tmp_path / "run", *FLAGS, "--exchange", "all-reduce")
    assert_same_end(run, expected)
    assert run.result()["rollbacks"] == 0
    assert replay(run.output).is_equal


@pytest.mark.parametrize("exchange", [("--exchange", "d-psgd", "--topology", "ring"), ("--protocol", "asp")])
def test_other_runs_stop_too(sets: dict[int, Path], tmp_path: Path, exchange: tuple[Any, ...]) -> None:
    run = train_here(sets[3], tmp_path / "run", *FLAGS, *exchange)
    stop = run.result()["early_stop"]
    assert stop
    assert run.events("eval")[-1]["final"]
    assert run.events("eval")[-1]["epoch"] == stop["epoch"] < EPOCHS
    assert replay(run.output).is_equal


@pytest.mark.parametrize("role", ["server-0", "evaluator"])
def test_a_kill_at_the_decision_changes_no_bit(
    sets: dict[int, Path], tmp_path: Path, runs: list[Training], expected: Result, role: str
) -> None:
    run = Training(sets[3], tmp_path / "run", *FLAGS, "--protocol", "bsp", "--servers", 2)
    runs.append(run)
    until(lambda: (run.output / "checkpoints" / "stop.json").exists() or run.process.poll() is not None, "a decision")
    if run.process.poll() is None and run.pid(role) is not None:
        run.send(role)
    assert run.wait() == 0, run.said()
    assert_same_end(run, expected)


def test_two_hosts_stop_together(sets: dict[int, Path], tmp_path: Path, expected: Result) -> None:
    flags = ("--launcher", "local", "--hosts", 2, "--protocol", "bsp", "--servers", 2)
    assert_same_end(train_here(sets[3], tmp_path / "run", *FLAGS, *flags), expected)


def test_a_converged_run_without_its_result_stays_ended(sets: dict[int, Path], tmp_path: Path) -> None:
    """Kill server 0's host before it writes result.json."""
    flags = (
        *FLAGS[:8],
        "--quiet",
        "--no-report",
        "--steps",
        9,
        "--protocol",
        "bsp",
        "--servers",
        1,
        "--tolerance",
        1e6,
    )
    run = train_here(sets[3], tmp_path / "run", *flags)
    before = run.vector().tobytes()
    (run.output / "result.json").unlink()
    again = train_here(sets[3], tmp_path / "run", *flags, "--resume")
    result = again.result()
    assert (result["converged"], result["updates"], again.vector().tobytes()) == (True, 2, before)
    assert replay(run.output).is_equal
