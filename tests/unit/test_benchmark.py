"""The benchmark's pure parts against scikit-learn, closed forms and each other, and the job itself on a small problem."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import AuthenticationError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pyspark.sql import SparkSession
from sklearn.linear_model import LogisticRegression

from pipeline.core.command_line import parse
from pipeline.core.errors import JobError, UsageError
from pipeline.core.extras import EXTRAS
from tests.support.application import run_job
from trainer.benchmark import arithmetic
from trainer.benchmark.__main__ import PROG
from trainer.benchmark.command import build_parser, run_benchmark
from trainer.benchmark.configurations import (
    HYPERPARAMETERS,
    Configuration,
    Model,
    System,
    configurations_of_fixed_length,
    configurations_to_converge,
)
from trainer.benchmark.experiment import QUICK, Experiment, experiment_from_flags
from trainer.benchmark.problems import HIGGS, YEAR, Problem, generate, write_problem
from trainer.benchmark.records import PlannedRun, RunTimings
from trainer.benchmark.results import published
from trainer.benchmark.systems import all_gather
from trainer.benchmark.systems.all_gather import start_all_gather
from trainer.benchmark.systems.descent import LOCAL_STEPS, Descent, Gather, TaskRows, descend
from trainer.benchmark.systems.measure import Setup, measure

pytestmark = pytest.mark.timeout(900)  # of the job with every system: three minutes, more beside other tests
Floats = npt.NDArray[np.float64]
MODELS = list(HYPERPARAMETERS)


def draw_rows(problem: Problem, count: int, seed: int = 3) -> tuple[Floats, npt.NDArray[np.int32], Floats]:
    features, classes, targets = problem.draw(seed, 0, count)
    return features.astype(float), classes, targets.astype(float)


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_the_slopes_of_the_losses(model: Model) -> None:
    x, classes, targets = draw_rows(replace(HIGGS, features=5), 40)
    y = targets if model == "linear" else classes.astype(float)
    rng = np.random.default_rng(1)
    weights = rng.standard_normal(arithmetic.count_weights(model, 5))
    found = arithmetic.gradient(model, weights, x, y)
    for at in rng.permutation(len(weights))[:20]:
        step = np.zeros_like(weights)
        step[at] = 1e-5
        ahead, behind = (arithmetic.loss(model, weights + sign * step, x, y) for sign in (1, -1))
        assert found[at] == pytest.approx((ahead - behind) / 2e-5, rel=1e-4, abs=1e-4)


def test_generated_rows_follow_the_planted_model() -> None:
    x, classes, targets = draw_rows(YEAR, 20_000)
    assert np.abs(x.mean(axis=0)).max() < 0.05
    assert np.abs(x.std(axis=0) - 1).max() < 0.05
    fitted = np.linalg.lstsq(x, targets, rcond=None)[0]
    assert np.abs(fitted - YEAR.plant_weights(3)).max() < 0.05
    x, classes, _ = draw_rows(HIGGS, 20_000)
    model = LogisticRegression(C=1e6, fit_intercept=False).fit(x, classes)
    assert np.abs(model.coef_[0] - HIGGS.plant_weights(3)).max() < 0.15


@pytest.fixture(scope="module")
def stored(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("stored"))
    write_problem(generate(spark, HIGGS, 9_000, 3, 2), HIGGS, folder)
    return folder


def run_in_threads(ranks: int, work: Callable[[int, Gather], Descent]) -> list[Descent]:
    """Run work(index, gather) in as many threads, whose gathers wait for each other."""
    barrier, rows = threading.Barrier(ranks), [np.zeros(0)] * ranks

    def run(index: int) -> Descent:
        def gather(row: Floats) -> Floats:
            rows[index] = row
            barrier.wait(30)
            gathered = np.stack(rows)
            barrier.wait(30)
            return gathered

        return work(index, gather)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def descend_in_parts(system: System, configuration: Configuration, x: Floats, y: Floats, ranks: int) -> list[Descent]:
    """What each rank comes to, with equal parts of the rows."""
    parts = np.array_split(np.arange(len(y)), ranks)

    def work(index: int, gather: Gather) -> Descent:
        own = parts[index]
        part = TaskRows(configuration, x[own], y[own], np.random.default_rng(index))
        return descend(system, part, np.zeros(x.shape[1]), gather)

    return run_in_threads(ranks, work)


def plain_descent(model: Model, x: Floats, y: Floats, steps: int) -> Floats:
    """Gradient descent from the textbook, on all rows: a0/sqrt(t), with the benchmark's a0 and decay."""
    step_size, decay = {"logistic": (1.0, 0.01), "linear": (0.1, 0.0)}[model]
    weights = np.zeros(x.shape[1])
    for step in range(1, steps + 1):
        score = x @ weights
        predicted = score if model == "linear" else 1 / (1 + np.exp(-score))
        weights = weights - step_size / step**0.5 * ((predicted - y) @ x / len(y) + decay * weights)
    return weights


@pytest.mark.parametrize("model", ["logistic", "linear"])
def test_all_reduce_is_gradient_descent_and_averaging_near_it(model: Model) -> None:
    x, classes, targets = draw_rows(HIGGS, 300)
    y = targets if model == "linear" else classes.astype(float)
    configuration, expected = Configuration(model, 300, 300, 60), plain_descent(model, x, y, 60)
    for descent in descend_in_parts("all-reduce", configuration, x, y, 3):
        np.testing.assert_allclose(descent.weights, expected, atol=1e-12)
        assert replace(descent, weights=np.zeros(0)).__dict__.items() >= {
            "mini_batches": 60, "updates": 60, "examples": 6_000, "converged": False,
        }.items()  # fmt: skip
    averaged = descend_in_parts("averaging", configuration, x, y, 3)
    assert all(np.array_equal(descent.weights, averaged[0].weights) for descent in averaged)
    assert (averaged[0].mini_batches, averaged[0].updates) == (60, 60 / LOCAL_STEPS)
    begin, end, ours = (arithmetic.loss(model, w, x, y) for w in (0 * expected, expected, averaged[0].weights))
    assert ours - end < 0.2 * (begin - end)


def test_averaging_weighs_each_model_by_the_rows_that_it_has_seen() -> None:
    """Then one step of every rank on its own part is one step on all rows, however unequal the parts."""
    x, _, y = draw_rows(HIGGS, 300)
    [descent, *_] = descend_in_parts("averaging", Configuration("linear", 300, 300, 1), x, y, 7)
    np.testing.assert_allclose(descent.weights, plain_descent("linear", x, y, 1), atol=1e-12)


def test_an_average_of_tasks_that_drew_no_rows_keeps_the_model() -> None:
    part = TaskRows(
        Configuration("linear", 10**9, 1, LOCAL_STEPS), np.ones((1, 2)), np.ones(1), np.random.default_rng(0)
    )
    assert descend("averaging", part, np.array([3.0, -2.0]), lambda row: np.stack([row, row])).weights.tolist() == [
        3,
        -2,
    ]


def test_averaging_on_one_part_takes_the_steps_of_gradient_descent() -> None:
    x, _, y = draw_rows(HIGGS, 200)
    [descent] = descend_in_parts("averaging", Configuration("linear", 200, 200, 25), x, y, 1)
    np.testing.assert_allclose(descent.weights, plain_descent("linear", x, y, 25), atol=1e-12)
    assert (descent.mini_batches, descent.updates) == (25, 3)  # after 10, 20 and the last


@pytest.mark.parametrize("system", ["all-reduce", "averaging"])
def test_a_descent_ends_at_the_first_update_below_the_tolerance(system: System) -> None:
    x, _, y = draw_rows(HIGGS, 200)
    [descent] = descend_in_parts(system, Configuration("linear", 200, 200, None, 1e-3), x, y, 1)
    apart = 1 if system == "all-reduce" else LOCAL_STEPS
    before, end, earlier = (plain_descent("linear", x, y, descent.mini_batches - back * apart) for back in (1, 0, 2))
    limit = apart * 1e-3 * max(1, float(np.linalg.norm(end)))
    assert descent.converged
    assert np.linalg.norm(end - before) < limit <= np.linalg.norm(before - earlier)
    [unfinished] = descend_in_parts(system, Configuration("linear", 200, 200, 40, 1e3), x, y, 1)
    assert (unfinished.mini_batches, unfinished.converged) == (40, False)  # a fixed length has no stop rule


def test_an_all_gather_is_in_order_and_ends_for_all_ranks() -> None:
    exchange, rounds = start_all_gather("127.0.0.1", 3), 40

    def work(index: int) -> list[Floats]:
        with exchange.connect(index) as rank:
            return [rank.all_gather(np.array([index, turn, 0.5])) for turn in range(rounds * (1 if index == 1 else 2))]

    with ThreadPoolExecutor(3) as pool:
        tasks = [pool.submit(work, index) for index in (2, 0, 1)]
        for turn, rows in enumerate(tasks[2].result(30)):
            np.testing.assert_array_equal(rows, [[index, turn, 0.5] for index in range(3)])
        for left in tasks[:2]:
            with pytest.raises((EOFError, OSError)):
                left.result(30)


def test_a_client_without_the_key_is_refused_by_an_all_gather() -> None:
    exchange = start_all_gather("127.0.0.1", 1)
    with pytest.raises(AuthenticationError), replace(exchange, key=b"guessed").connect(0):
        pass
    with exchange.connect(0) as rank:
        np.testing.assert_array_equal(rank.all_gather(np.ones(2)), np.ones((1, 2)))


def test_a_port_scan_ends_no_all_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_gather, "SILENCE_S", 1)
    exchange = start_all_gather("127.0.0.1", 1)
    socket.create_connection((exchange.host, exchange.port)).close()
    with socket.create_connection((exchange.host, exchange.port)) as garbage:
        garbage.sendall(b"GET / HTTP/1.0\r\n\r\n" * 20)
        # One that says nothing is given up.
        with socket.create_connection((exchange.host, exchange.port)), exchange.connect(0) as rank:
            np.testing.assert_array_equal(rank.all_gather(np.ones(2)), np.ones((1, 2)))


def test_configurations_are_those_of_the_thesis() -> None:
    rows: dict[Model, int] = {"logistic": 100_000, "linear": 50_000, "perceptron": 100_000}
    to_converge = [
        each for model, count in rows.items() for each in configurations_to_converge(model, count, (2000, 500))
    ]
    sizes = {(each.model, str(each.batch) if each.is_stochastic else "all") for each in to_converge}
    assert sizes == published.MINI_BATCHES.keys()
    timed = [each for model, count in rows.items() for each in configurations_of_fixed_length(model, count, 100)]
    assert [(each.model, each.batch, each.length) for each in timed] == [
        *(("logistic", size, 100) for size in (100_000, 1_000, 100)),
        *(("linear", size, 100) for size in (50_000, 500, 50)),
        ("perceptron", 100_000, 20),
    ]


def experiment_of(*command: str) -> Experiment:
    return experiment_from_flags(parse(build_parser(None), ["--output", "out", *command]))


def test_flags_change_the_full_and_the_quick_experiment() -> None:
    assert experiment_of() == Experiment()
    assert experiment_of("--quick") == QUICK
    assert experiment_of("--quick", "--repeats", "2") == replace(QUICK, repeats=2)
    assert experiment_of("--higgs", "HIGGS.csv") == replace(Experiment(), higgs="HIGGS.csv", higgs_rows=None)
    several = experiment_of("--sizes", "4000,9000", "--batches", "50,70,50", "--systems", "averaging,mllib")
    assert (several.sizes, several.batches, several.systems) == ((9000, 4000), (70, 50), ("mllib", "averaging"))


def test_arms_is_another_name_of_systems_also_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "benchmark.toml").write_text('arms = "ps-async"\nrepeats = 5\n')
    from_file = experiment_of("--config", str(tmp_path / "benchmark.toml"))
    assert (from_file.systems, from_file.repeats) == (("ps-async",), 5)
    assert experiment_of("--arms", "ps-sync").systems == ("ps-sync",)


def test_rows_that_could_not_be_loaded_are_the_error_of_their_runs() -> None:
    planned = PlannedRun(Configuration("logistic", 9000, 500), "mllib")
    execution: Any = SimpleNamespace(experiment=QUICK, meter=None)
    record = measure(execution, planned, MemoryError("no room\nfor rows"))
    assert (record.error, record.measurement) == ("no room for rows", None)
    stored: Any = SimpleNamespace(dataset=None, problem=HIGGS)
    cached = JobError("3 of 4 parts fit")  # of MLlib's runs alone
    assert measure(execution, planned, Setup(stored, np.zeros(0), None, cached)).error == "3 of 4 parts fit"


@pytest.mark.parametrize(("executors", "cpu"), [(None, 0.5), ("of a cluster", None)])
def test_the_load_of_the_drivers_host_is_none_of_executors(
    monkeypatch: pytest.MonkeyPatch, executors: str | None, cpu: float | None
) -> None:
    timings = RunTimings(9, 9, 90, True, 1.0, 0.1, None, cpu=0.5, load_s=1.0, start_s=1.0)
    monkeypatch.setattr("trainer.benchmark.systems.measure.run_system", lambda *_: timings)
    execution: Any = SimpleNamespace(executors=executors)
    setup: Any = SimpleNamespace(least=None)
    record = measure(execution, PlannedRun(Configuration("linear", 9000, 500, length=9), "mllib"), setup)
    assert record.measurement is not None, record.error
    assert record.measurement["cpu"] == cpu


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--output", "hdfs://host/x"], "must be a local folder"),
        (["--output", "a[1]"], r"--output a\[1\]: Spark reads a name with \[ as a pattern or a list"),
        (["--higgs", "a,b.csv"], "--higgs a,b.csv: Spark reads a name with , as"),
        (["--models", "forest"], "is not a list of logistic, linear, perceptron"),
        (["--tasks", "280,x"], "is not a list of whole numbers"),
        (["--higgs-rows", "10"], "--higgs-rows must be at least 4000"),
        (["--year-rows", "5000", "--year", "x.txt"], "leave one of them out"),
        (["--quick", "--sizes", "5000,100"], "--sizes must be at least 4000, got 100"),
        (["--mini-batches", "0"], "--mini-batches must be at least 1, got 0"),
    ],
)
def test_wrong_usage_is_refused_before_spark_starts(tmp_path: Path, wrong: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_benchmark(build_parser(None), ["--output", str(tmp_path / "out"), *wrong])
    assert not list(tmp_path.iterdir())


def test_wrong_usage_is_one_line_of_the_job(tmp_path: Path) -> None:
    done = run_job("benchmark.py", "--output", tmp_path / "out", "--repeats", "0")
    assert (done.code, done.err.strip().count("\n")) == (2, 0), done.err
    assert "--repeats must be at least 1, got 0" in done.err


@pytest.mark.parametrize(
    ("program", "prog", "said"),
    [
        ("/bin/sharding", PROG, "sharding benchmark"),
        ("__main__.py", PROG, "python -m trainer.benchmark"),
        ("benchmark.py", "benchmark.py", "benchmark.py"),
    ],
)
def test_a_refusal_names_the_command_that_was_typed(
    program: str, prog: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setitem(EXTRAS, "benchmark", ("no_such_module",))
    with pytest.raises(UsageError, match=f"^{said} needs no_such_module"):
        run_benchmark(build_parser(None, prog), ["--output", str(tmp_path / "out")])
    with pytest.raises(UsageError, match=f"; see {said} --help$"):
        run_benchmark(build_parser(None, prog), ["--outputs", str(tmp_path / "out")])
