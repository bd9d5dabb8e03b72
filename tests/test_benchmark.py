"""The benchmark's pure parts against scikit-learn, closed forms and each other, and the job itself on a small problem."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
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
from sklearn.metrics import log_loss

from pipeline.benchmark import arithmetic
from pipeline.benchmark.command import flags, run_benchmark
from pipeline.benchmark.configurations import (
    HYPERPARAMETERS,
    SYSTEMS,
    Configuration,
    Model,
    System,
    configurations_of_fixed_length,
    configurations_to_converge,
)
from pipeline.benchmark.experiment import QUICK, Experiment, experiment_from_flags
from pipeline.benchmark.problems import HIGGS, YEAR, Problem, generate, read_csv, write_problem
from pipeline.benchmark.records import PlannedRun
from pipeline.benchmark.results import published
from pipeline.benchmark.results.report import render
from pipeline.benchmark.results.summary import Summary, summarise
from pipeline.benchmark.rows import compute_objective, find_optimum, open_rows, read_arrays
from pipeline.benchmark.systems import measure as measuring
from pipeline.benchmark.systems import mllib
from pipeline.benchmark.systems.all_gather import start_all_gather
from pipeline.benchmark.systems.descent import LOCAL_STEPS, Descent, Gather, Part, descend
from pipeline.benchmark.systems.measure import Setup, measure
from pipeline.command_line import parse
from pipeline.errors import DataError, JobError, UsageError
from tests.application import run_job

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


def test_generated_rows_have_unit_variance_and_follow_the_planted_model() -> None:
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


def test_both_sides_read_the_same_numbers(spark: SparkSession, stored: str) -> None:
    data = open_rows(spark.sparkContext, stored)
    features, classes = read_arrays(data, 0, data.rows, real=False)
    lines = sorted(line for path in Path(stored, "points").glob("part-*") for line in path.read_text().splitlines())
    read = [(float(label), json.loads(f"[{rest}")) for label, _, rest in (line[1:-1].partition(",[") for line in lines)]
    ours = sorted((y, x.astype(np.float32).tolist()) for x, y in zip(features, classes, strict=True))
    theirs = sorted((y, np.array(x, np.float32).tolist()) for y, x in read)
    assert len(ours) == 9_000
    assert ours == theirs


def test_the_optimum_is_where_scikit_learn_finds_it(spark: SparkSession, stored: str) -> None:
    data = open_rows(spark.sparkContext, stored)
    given = HYPERPARAMETERS["logistic"]
    best = find_optimum(spark.sparkContext, data, "logistic", given.decay, False)
    features, classes = read_arrays(data, 0, data.rows, real=False)
    model = LogisticRegression(C=1 / (given.decay * data.rows), fit_intercept=False, tol=1e-10, max_iter=1000)
    np.testing.assert_allclose(best, model.fit(features, classes).coef_[0], atol=1e-5)
    least, beside = (
        compute_objective(spark.sparkContext, data, "logistic", given, False, weights)
        for weights in (best, best + 0.01)
    )
    probabilities = model.predict_proba(features)
    expected = log_loss(classes, probabilities) + given.decay / 2 * float(model.coef_[0] @ model.coef_[0])
    assert least == pytest.approx(expected, rel=1e-6)
    assert beside > least


def test_a_real_file_is_standardised_and_one_of_another_shape_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    table = np.column_stack([rng.integers(1922, 2012, 500), 50 + 9 * rng.standard_normal((500, YEAR.features))])
    np.savetxt(tmp_path / "year.txt", table, "%.6g", ",")
    write_problem(read_csv(spark, YEAR, str(tmp_path / "year.txt")), YEAR, str(tmp_path / "year"))
    data = open_rows(spark.sparkContext, str(tmp_path / "year"))
    features, targets = read_arrays(data, 0, data.rows, real=True)
    _, classes = read_arrays(data, 0, data.rows, real=False)
    for values in (*features.T, targets):
        assert (values.mean(), values.std()) == pytest.approx((0, 1), abs=1e-5)
    assert classes.min() == 0
    with pytest.raises(DataError, match="91 columns, not a label and 28 features"):
        read_csv(spark, HIGGS, str(tmp_path / "year.txt"))
    (tmp_path / "torn.txt").write_text(",".join("1" * 91) + "\n" + ",".join(["1", "x", *"1" * 89]) + "\n")
    with pytest.raises(DataError, match="column 2 holds 1 fields that are no numbers"):
        read_csv(spark, YEAR, str(tmp_path / "torn.txt"))
    with pytest.raises(DataError, match=r"absent\.txt does not exist; check --year"):
        read_csv(spark, YEAR, str(tmp_path / "absent.txt"))


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
        part = Part(configuration, x[own], y[own], np.random.default_rng(index))
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
def test_all_reduce_is_gradient_descent_on_all_rows_and_averaging_comes_near(model: Model) -> None:
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


def test_averaging_on_one_part_takes_the_steps_of_gradient_descent() -> None:
    x, _, y = draw_rows(HIGGS, 200)
    [descent] = descend_in_parts("averaging", Configuration("linear", 200, 200, 25), x, y, 1)
    np.testing.assert_allclose(descent.weights, plain_descent("linear", x, y, 25), atol=1e-12)
    assert (descent.mini_batches, descent.updates) == (25, 3)  # after 10, 20 and the last


@pytest.mark.parametrize("system", ["all-reduce", "averaging"])
def test_a_descent_ends_at_the_first_update_that_moves_less_than_the_tolerance(system: System) -> None:
    x, _, y = draw_rows(HIGGS, 200)
    [descent] = descend_in_parts(system, Configuration("linear", 200, 200, None, 1e-3), x, y, 1)
    apart = 1 if system == "all-reduce" else LOCAL_STEPS
    before, end, earlier = (plain_descent("linear", x, y, descent.mini_batches - back * apart) for back in (1, 0, 2))
    limit = apart * 1e-3 * max(1, float(np.linalg.norm(end)))
    assert descent.converged
    assert np.linalg.norm(end - before) < limit <= np.linalg.norm(before - earlier)
    [unfinished] = descend_in_parts(system, Configuration("linear", 200, 200, 40, 1e3), x, y, 1)
    assert (unfinished.mini_batches, unfinished.converged) == (40, False)  # a fixed length has no stop rule


def test_an_all_gather_gives_every_row_to_every_rank_in_order_and_ends_for_all_when_one_leaves() -> None:
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
    return experiment_from_flags(parse(flags(None), ["--output", "out", *command]))


def test_flags_change_the_full_or_the_quick_experiment_and_nothing_else() -> None:
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


QUICK_FLAGS = ["--quick", "--year-rows", "4000", "--higgs-rows", "4096", "--models", "linear,perceptron"]
QUICK_FLAGS += ["--batches", "500", "--sizes", "5000", "--tasks", "3", "--mini-batches", "10"]
WORKERS = 2  # of the tests' Spark session, local[2]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job as a user starts it, on two models, with every system. What is timed is of no interest: no long warm-up."""
    output = tmp_path_factory.mktemp("benchmark") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mllib, "WARM_UP_RUNS", 1)
        patch.setattr(measuring, "WARM_UP_MINI_BATCHES", 4)
        done = run_job("benchmark.py", "--output", output, *QUICK_FLAGS)
    assert done.code == 0, done.err
    assert f"report: {output}/report.html" in done.out
    return output


@pytest.fixture(scope="module")
def results(quick: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((quick / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def summaries(results: dict[str, Any]) -> list[Summary]:
    return summarise(results["records"])


def test_the_job_measures_every_configuration_in_every_system(
    results: dict[str, Any], summaries: list[Summary]
) -> None:
    assert not [each.errors for each in summaries if each.errors]
    configurations: list[tuple[str, int, str, int | None]] = [
        *(("linear", 4000, size, None) for size in ("all", "500")),
        *(("linear", 4000, size, 10) for size in ("40", "4")),
        *(("linear", 5000, size, 10) for size in ("all", "50", "5")),
        ("perceptron", 4096, "all", None),
        ("perceptron", 5000, "all", 2),
    ]
    usual = [each for each in summaries if not each.tasks]
    assert {(each.model, each.rows, each.size, each.length, each.system) for each in usual} == {
        (*configuration, system) for configuration in configurations for system in SYSTEMS
    }
    with_tasks = [each for each in summaries if each.tasks]
    assert [(each.label, each.model, each.size, each.length) for each in with_tasks] == [
        ("mllib, 3 tasks", "linear", "500", 2),
        ("ps-sync, 3 workers, by socket", "linear", "500", 50),
    ]
    assert all(each.metrics["driver_s" if each.system == "mllib" else "server_s"].median > 0 for each in with_tasks)
    assert results["task_metrics"]["linear, 500 of 4,000"]["tasks"] >= 1
    assert results["task_metrics"]["linear, 500 of 4,000, 3 tasks, 2 times"]["tasks"] >= 3
    assert results["machine"]["cores"] >= 1


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_has_figures(summaries: list[Summary], system: System) -> None:
    mine = [each for each in summaries if each.system == system and not each.tasks]
    assert len(mine) == 9
    for each in mine:
        for metric in ("seconds", "compute_s", "load_s", "start_s", "cpu", "updates", "examples"):
            assert each.metrics[metric].median > 0, metric
        mini_batches, updates = (each.metrics[metric].median for metric in ("mini_batches", "updates"))
        assert each.length in (None, mini_batches)
        assert each.length or each.converged
        if system == "ps-async":  # a push is an update; the last mini-batch may be cut short
            assert WORKERS * mini_batches <= updates < WORKERS * (mini_batches + 1)
        else:
            apart = LOCAL_STEPS if system == "averaging" else 1
            assert (updates - 1) * apart < mini_batches <= updates * apart


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_ends_near_the_optimum(summaries: list[Summary], system: System) -> None:
    """The optimum of the same rows by numpy's least squares; of the perceptron what all but that system reach."""
    features, _, targets = draw_rows(YEAR, 4000, seed=0)
    residuals = targets - features @ np.linalg.lstsq(features, targets, rcond=None)[0]
    least, start = float(residuals @ residuals) / 8000, float(targets @ targets) / 8000
    converged = [each for each in summaries if each.length is None and each.system == system]
    for each in converged:
        if each.model == "linear":
            loss, gap = each.metrics["loss"].median, each.metrics["gap"].median
            assert loss - gap == pytest.approx(least, rel=1e-6)
            assert -1e-6 < gap < 0.2 * (start - least)
    [perceptron] = [each for each in converged if each.model == "perceptron"]
    [mllib] = [each for each in summaries if (each.model, each.system, each.length) == ("perceptron", "mllib", None)]
    assert perceptron.metrics["loss"].median == pytest.approx(mllib.metrics["loss"].median, rel=0.02)


@pytest.mark.parametrize("model", ["linear", "perceptron"])
def test_gradient_descent_is_the_same_in_every_synchronous_system(summaries: list[Summary], model: Model) -> None:
    same = [
        each
        for each in summaries
        if (each.model, each.size, each.length) == (model, "all", None)
        and each.system in ("mllib", "ps-sync", "all-reduce")
    ]
    assert len(same) == 3
    assert len({each.metrics["mini_batches"].median for each in same}) == 1
    losses = [each.metrics["loss"].median for each in same]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)


def test_files_hold_every_run_and_the_rows_of_a_size_are_deleted(quick: Path, results: dict[str, Any]) -> None:
    table = list(csv.DictReader((quick / "results.csv").open()))
    assert len(table) == len(results["records"]) == 9 * len(SYSTEMS) + 2
    for line, record in zip(table, results["records"], strict=True):
        assert line["system"] == record["system"]
        assert float(line["seconds"]) == record["measurement"]["seconds"]
    assert sorted(path.name for path in (quick / "data").iterdir()) == ["higgs-like", "year-like"]


def test_the_report_stands_alone_and_shows_what_failed(quick: Path, results: dict[str, Any]) -> None:
    page = (quick / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page
    for text in ("to converge", "3,104", "all-reduce", "140 nodes"):
        assert text in page
    broken = deepcopy(results)
    broken["records"][0].update(error="the trainer's own line", measurement=None, loss=None, gap=None)
    assert "failed: the trainer&#39;s own line" in render(broken)


def test_measured_runs_are_kept_and_those_of_another_experiment_are_not_mixed_in(quick: Path) -> None:
    before = (quick / "results.csv").read_text()
    again = run_job("benchmark.py", "--output", quick, *QUICK_FLAGS, "--arms", ",".join(SYSTEMS))
    assert again.code == 0, again.err
    assert (quick / "results.csv").read_text() == before
    other = run_job("benchmark.py", "--output", quick, *QUICK_FLAGS, "--seed", "1")
    assert other.code == 2
    assert "--overwrite" in other.err


def test_rows_that_could_not_be_loaded_are_the_error_of_their_runs() -> None:
    planned = PlannedRun(Configuration("logistic", 9000, 500), "mllib")
    execution: Any = SimpleNamespace(experiment=QUICK, meter=None)
    record = measure(execution, planned, MemoryError("no room\nfor rows"))
    assert (record.error, record.measurement) == ("no room for rows", None)
    stored: Any = SimpleNamespace(dataset=None, problem=HIGGS)
    cached = JobError("3 of 4 parts fit")  # of MLlib's runs alone
    assert measure(execution, planned, Setup(stored, np.zeros(0), None, cached)).error == "3 of 4 parts fit"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--output", "hdfs://host/x"], "must be a local folder"),
        (["--models", "forest"], "is not a list of logistic, linear, perceptron"),
        (["--tasks", "280,x"], "is not a list of whole numbers"),
        (["--higgs-rows", "10"], "--higgs-rows must be at least 4000"),
        (["--year-rows", "5000", "--year", "x.txt"], "leave one out"),
        (["--quick", "--sizes", "5000,100"], "--sizes must be at least 4000, got 100"),
        (["--mini-batches", "0"], "--mini-batches must be at least 1, got 0"),
    ],
)
def test_wrong_usage_is_refused_before_spark_starts(tmp_path: Path, wrong: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_benchmark(parse(flags(None), ["--output", str(tmp_path / "out"), *wrong]))
    assert not list(tmp_path.iterdir())


def test_wrong_usage_is_one_line_of_the_job(tmp_path: Path) -> None:
    done = run_job("benchmark.py", "--output", tmp_path / "out", "--repeats", "0")
    assert (done.code, done.err.strip().count("\n")) == (2, 0), done.err
    assert "--repeats must be at least 1, got 0" in done.err
