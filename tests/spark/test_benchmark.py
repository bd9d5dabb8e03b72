"""The benchmark's pure parts against scikit-learn, closed forms and each other, and the job itself on a small problem."""

from __future__ import annotations

import csv
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from pipeline.core.errors import DataError
from tests.support.application import run_job
from trainer.benchmark import experiment
from trainer.benchmark import run as benchmark_run
from trainer.benchmark.configurations import (
    HYPERPARAMETERS,
    SYSTEMS,
    Configuration,
    Model,
    System,
    configurations_of_fixed_length,
)
from trainer.benchmark.problems import BLOCK_ROWS, HIGGS, YEAR, generate, read_csv, write_problem
from trainer.benchmark.results.report import render
from trainer.benchmark.results.summary import SystemSummary, summarise
from trainer.benchmark.rows import compute_objective, find_optimum, open_rows, read_arrays
from trainer.benchmark.systems import measure as measuring
from trainer.benchmark.systems import mllib
from trainer.benchmark.systems.descent import LOCAL_STEPS
from trainer.benchmark.systems.executors import Executors, find_executors

pytestmark = pytest.mark.timeout(900)  # of the job with every system: three minutes, more beside other tests


@pytest.fixture(scope="module")
def stored(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("stored"))
    write_problem(generate(spark, HIGGS, 9_000, 3, 2), HIGGS, folder)
    return folder


@pytest.mark.full
def test_both_sides_read_the_same_numbers(spark: SparkSession, stored: str) -> None:
    data = open_rows(spark.sparkContext, stored)
    features, classes = read_arrays(data, 0, data.rows, real=False)
    lines = sorted(line for path in Path(stored, "points").glob("part-*") for line in path.read_text().splitlines())
    read = [(float(label), json.loads(f"[{rest}")) for label, _, rest in (line[1:-1].partition(",[") for line in lines)]
    ours = sorted((y, x.astype(np.float32).tolist()) for x, y in zip(features, classes, strict=True))
    theirs = sorted((y, np.array(x, np.float32).tolist()) for y, x in read)
    assert len(ours) == 9_000
    assert ours == theirs


@pytest.mark.full
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


@pytest.mark.full
def test_a_real_file_is_standardised_and_another_shape_refused(spark: SparkSession, tmp_path: Path) -> None:
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


def test_only_a_cluster_has_executors_to_train_on(spark: SparkSession) -> None:
    assert find_executors(spark.sparkContext) is None
    assert Executors(spark.sparkContext).count() == 1  # the driver computes itself


TINY = ("--systems", "mllib,ps-sync,averaging", "--models", "linear", "--year-rows", 4000, "--batches", 4000)


def test_the_job_sets_mllib_beside_the_servers(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measure one model in three systems, in few mini-batches after a short warm-up: the times do not matter here."""
    monkeypatch.setattr(experiment, "QUICK", replace(experiment.QUICK, tolerance=0.5, mini_batches=4))
    monkeypatch.setattr(benchmark_run, "configurations_of_fixed_length", leave_out_hundredth)
    monkeypatch.setattr(mllib, "WARM_UP_RUNS", 1)
    monkeypatch.setattr(measuring, "WARM_UP_MINI_BATCHES", 4)
    done = run_job("benchmark.py", "--output", tmp_path, *TINY, "--quick")
    assert done.code == 0, done.err
    assert_measured(tmp_path)


def assert_measured(output: Path) -> None:
    """Fail unless every run of TINY has a measurement, and the report is whole."""
    records = json.loads((output / "results.json").read_text())["records"]
    assert {record["system"] for record in records} == {"mllib", "ps-sync", "averaging"}
    assert not [record["error"] for record in records if record["error"]]
    assert all(record["measurement"] for record in records)
    assert (output / "report.html").read_text().rstrip().endswith("</html>")


# The defaults with one of two mini-batches, and what they leave out, but for the logistic regression, which all systems
# compute as they do the linear one.
SIZE = 5000
QUICK_FLAGS = [
    "--quick",
    "--higgs-rows",
    "4096",
    "--models",
    "linear,perceptron",
    "--batches",
    "2000",
    "--sizes",
    f"{SIZE}",
    "--tasks",
    "3",
]
SYNCHRONOUS: tuple[System, ...] = ("mllib", "ps-sync", "all-reduce")
CONFIGURATIONS = 6  # without those of --tasks
ROWS = {"linear": 8_000, "perceptron": 4_096}
WORKERS = 2  # of the tests' Spark session, local[2]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job as a user starts it, with two models and every system."""
    output = tmp_path_factory.mktemp("benchmark") / "out"
    run_benchmark(output, QUICK_FLAGS)
    return output


def leave_out_hundredth(model: Model, rows: int, length: int) -> list[Configuration]:
    """Return the configurations with all rows and with a thousandth of them in a mini-batch.

    On the rows of --sizes a regression has the last of these alone."""
    configurations = configurations_of_fixed_length(model, rows, length)
    return configurations[-1:] if rows == SIZE else configurations[:1] + configurations[2:]


def run_benchmark(output: Path, flags: list[str]) -> None:
    """Run the job. What is timed is of no interest: no long warm-up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark_run, "configurations_of_fixed_length", leave_out_hundredth)
        patch.setattr(mllib, "WARM_UP_RUNS", 1)
        patch.setattr(measuring, "WARM_UP_MINI_BATCHES", 4)
        done = run_job("benchmark.py", "--output", output, *flags)
    assert done.code == 0, done.err
    assert f"report: {output}/report.html" in done.out


def read_results(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def results(quick: Path) -> dict[str, Any]:
    return read_results(quick)


@pytest.fixture(scope="module")
def summaries(results: dict[str, Any]) -> list[SystemSummary]:
    return summarise(results["records"])


@pytest.mark.full
def test_the_job_measures_every_configuration_in_every_system(
    results: dict[str, Any], summaries: list[SystemSummary]
) -> None:
    assert not [each.errors for each in summaries if each.errors]
    configurations: list[tuple[str, int, str, int | None]] = [
        ("perceptron", ROWS["perceptron"], "all", None),
        ("perceptron", SIZE, "all", 4),
    ]
    configurations += [("linear", ROWS["linear"], size, None) for size in ("all", "2000")]
    configurations += [("linear", ROWS["linear"], "8", 20)]
    configurations += [("linear", SIZE, "5", 20)]
    usual = [each for each in summaries if not each.tasks]
    assert {(each.model, each.rows, each.size, each.length, each.system) for each in usual} == {
        (*configuration, system) for configuration in configurations for system in SYSTEMS
    }
    with_tasks = [each for each in summaries if each.tasks]
    assert [(each.label, each.model, each.size, each.length) for each in with_tasks] == [
        (label, "linear", "2000", length)
        for label, length in (("mllib, 3 tasks", 4), ("ps-sync, 3 workers, by socket", 100))
    ]
    assert all(each.metrics["driver_s" if each.system == "mllib" else "server_s"].median > 0 for each in with_tasks)
    assert results["task_metrics"]["linear, 2,000 of 8,000"]["tasks"] >= 1
    assert results["task_metrics"]["linear, 2,000 of 8,000, 3 tasks, 4 times"]["tasks"] >= 3
    assert results["machine"]["cores"] >= 1


@pytest.mark.full
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_has_figures(summaries: list[SystemSummary], system: System) -> None:
    mine = [each for each in summaries if each.system == system and not each.tasks]
    assert len(mine) == CONFIGURATIONS
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


@pytest.mark.full
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_ends_near_the_optimum(summaries: list[SystemSummary], system: System) -> None:
    """The optimum of the same rows by numpy's least squares; of the perceptron what all but that system reach."""
    sizes = [min(BLOCK_ROWS, ROWS["linear"] - first) for first in range(0, ROWS["linear"], BLOCK_ROWS)]
    drawn = [YEAR.draw(0, block, size) for block, size in enumerate(sizes)]
    features, targets = (np.concatenate([part[field] for part in drawn]).astype(float) for field in (0, 2))
    residuals = targets - features @ np.linalg.lstsq(features, targets, rcond=None)[0]
    least, start = (float(values @ values) / (2 * ROWS["linear"]) for values in (residuals, targets))
    converged = [each for each in summaries if each.length is None and each.system == system]
    for each in converged:
        if each.model == "linear":
            loss, gap = each.metrics["loss"].median, each.metrics["gap"].median
            assert loss - gap == pytest.approx(least, rel=1e-6)
            assert -1e-6 < gap < 0.2 * (start - least)
    [perceptron] = [each for each in converged if each.model == "perceptron"]
    [mllib] = [each for each in summaries if (each.model, each.system, each.length) == ("perceptron", "mllib", None)]
    assert perceptron.metrics["loss"].median == pytest.approx(mllib.metrics["loss"].median, rel=0.02)


@pytest.mark.full
@pytest.mark.parametrize("model", list(ROWS))
def test_gradient_descent_is_the_same_in_every_synchronous_system(summaries: list[SystemSummary], model: Model) -> None:
    same = [
        each
        for each in summaries
        if (each.model, each.size, each.length) == (model, "all", None) and each.system in SYNCHRONOUS
    ]
    assert len(same) == 3
    assert len({each.metrics["mini_batches"].median for each in same}) == 1
    losses = [each.metrics["loss"].median for each in same]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)


@pytest.mark.full
def test_files_hold_every_run_and_the_rows_of_a_size_are_deleted(quick: Path, results: dict[str, Any]) -> None:
    table = list(csv.DictReader((quick / "results.csv").open()))
    assert len(table) == len(results["records"]) == CONFIGURATIONS * len(SYSTEMS) + 2
    for line, record in zip(table, results["records"], strict=True):
        assert line["system"] == record["system"]
        assert float(line["seconds"]) == record["measurement"]["seconds"]
    assert sorted(path.name for path in (quick / "data").iterdir()) == ["higgs-like", "year-like"]


@pytest.mark.full
def test_the_report_stands_alone_and_shows_what_failed(quick: Path, results: dict[str, Any]) -> None:
    page = (quick / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page
    for text in ("to converge", "3,104", "all-reduce", "140 nodes"):
        assert text in page
    broken = deepcopy(results)
    broken["records"][0].update(error="the trainer's own line", measurement=None, loss=None, gap=None)
    assert "failed: the trainer&#39;s own line" in render(broken)


@pytest.mark.full
def test_measured_runs_are_kept_and_no_other_experiment_added(quick: Path) -> None:
    before = (quick / "results.csv").read_text()
    run_benchmark(quick, [*QUICK_FLAGS, "--arms", ",".join(SYSTEMS)])
    assert (quick / "results.csv").read_text() == before
    other = run_job("benchmark.py", "--output", quick, *QUICK_FLAGS, "--seed", "1")
    assert other.code == 2
    assert "--overwrite" in other.err
