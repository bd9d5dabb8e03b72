"""The benchmark's pure parts against scikit-learn, closed forms and each other, and the job itself on a small problem."""

from __future__ import annotations

import csv
import json
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

from pipeline.benchmark import arithmetic, published, rows, summary
from pipeline.benchmark.averaging import LOCAL_STEPS, descend
from pipeline.benchmark.cells import SETTINGS, Cell, of_a_length, to_converge
from pipeline.benchmark.command import flags, run_benchmark
from pipeline.benchmark.meeting import hub
from pipeline.benchmark.problems import HIGGS, YEAR, Problem, from_csv, generated, store
from pipeline.benchmark.report import render
from pipeline.benchmark.run import Loaded, Row, _measure
from pipeline.command_line import parse
from pipeline.errors import DataError, JobError, UsageError
from tests.application import run_job

Floats = npt.NDArray[np.float64]
MODELS = list(SETTINGS)


def data_of(problem: Problem, count: int) -> tuple[Floats, npt.NDArray[np.int32], Floats]:
    features, classes, targets = problem.draw(3, 0, count)
    return features.astype(float), classes, targets.astype(float)


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_the_slopes_of_the_losses(model: Any) -> None:
    x, classes, targets = data_of(replace(HIGGS, features=5), 40)
    y = targets if model == "linear" else classes.astype(float)
    rng = np.random.default_rng(1)
    weights = rng.standard_normal(arithmetic.num_weights(model, 5))
    found = arithmetic.gradient(model, weights, x, y)
    for at in rng.permutation(len(weights))[:20]:
        step = np.zeros_like(weights)
        step[at] = 1e-5
        ahead, behind = (arithmetic.loss(model, weights + sign * step, x, y) for sign in (1, -1))
        assert found[at] == pytest.approx((ahead - behind) / 2e-5, rel=1e-4, abs=1e-4)


def test_generated_rows_have_unit_variance_and_follow_the_planted_model() -> None:
    x, classes, targets = data_of(YEAR, 20_000)
    assert np.abs(x.mean(axis=0)).max() < 0.05
    assert np.abs(x.std(axis=0) - 1).max() < 0.05
    fitted = np.linalg.lstsq(x, targets, rcond=None)[0]
    assert np.abs(fitted - YEAR.weights(3)).max() < 0.05
    x, classes, _ = data_of(HIGGS, 20_000)
    model = LogisticRegression(C=1e6, fit_intercept=False).fit(x, classes)
    assert np.abs(model.coef_[0] - HIGGS.weights(3)).max() < 0.15


@pytest.fixture(scope="module")
def stored(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("stored"))
    store(generated(spark, HIGGS, 9_000, 3, 2), HIGGS, folder)
    return folder


def test_both_sides_read_the_same_numbers(spark: SparkSession, stored: str) -> None:
    data = rows.stored(spark.sparkContext, stored)
    features, classes = rows.arrays(data, 0, data.rows, real=False)
    lines = sorted(line for path in Path(stored, "points").glob("part-*") for line in path.read_text().splitlines())
    read = [(float(label), json.loads(f"[{rest}")) for label, _, rest in (line[1:-1].partition(",[") for line in lines)]
    ours = sorted((y, x.astype(np.float32).tolist()) for x, y in zip(features, classes, strict=True))
    theirs = sorted((y, np.array(x, np.float32).tolist()) for y, x in read)
    assert len(ours) == 9_000
    assert ours == theirs


def test_the_optimum_is_where_scikit_learn_finds_it(spark: SparkSession, stored: str) -> None:
    data = rows.stored(spark.sparkContext, stored)
    decay = SETTINGS["logistic"].decay
    best = rows.optimum(spark.sparkContext, data, "logistic", decay, False)
    features, classes = rows.arrays(data, 0, data.rows, real=False)
    model = LogisticRegression(C=1 / (decay * data.rows), fit_intercept=False, tol=1e-10, max_iter=1000)
    np.testing.assert_allclose(best, model.fit(features, classes).coef_[0], atol=1e-5)
    cell = Cell("logistic", data.rows, data.rows)
    least = rows.objective(spark.sparkContext, data, cell, False, best)
    assert least < rows.objective(spark.sparkContext, data, cell, False, best + 0.01)


def test_a_real_file_is_standardised_and_one_of_another_shape_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    table = np.column_stack([rng.integers(1922, 2012, 500), 50 + 9 * rng.standard_normal((500, YEAR.features))])
    np.savetxt(tmp_path / "year.txt", table, "%.6g", ",")
    store(from_csv(spark, YEAR, str(tmp_path / "year.txt")), YEAR, str(tmp_path / "year"))
    data = rows.stored(spark.sparkContext, str(tmp_path / "year"))
    features, targets = rows.arrays(data, 0, data.rows, real=True)
    _, classes = rows.arrays(data, 0, data.rows, real=False)
    for values in (*features.T, targets):
        assert (values.mean(), values.std()) == pytest.approx((0, 1), abs=1e-5)
    assert classes.min() == 0
    with pytest.raises(DataError, match="91 columns, not a label and 28 features"):
        from_csv(spark, HIGGS, str(tmp_path / "year.txt"))
    (tmp_path / "torn.txt").write_text(",".join("1" * 91) + "\n" + ",".join(["1", "x", *"1" * 89]) + "\n")
    with pytest.raises(DataError, match="column 2 holds 1 fields that are no numbers"):
        from_csv(spark, YEAR, str(tmp_path / "torn.txt"))
    with pytest.raises(DataError, match=r"absent\.txt does not exist; check --year"):
        from_csv(spark, YEAR, str(tmp_path / "absent.txt"))


def together(tasks: int, work: Callable[[int, Callable[[Floats], Floats]], Any]) -> list[Any]:
    """Run work(index, gather) in as many threads, whose gathers meet."""
    barrier, told, results = threading.Barrier(tasks), [np.zeros(0)] * tasks, [None] * tasks

    def run(index: int) -> None:
        def gather(row: Floats) -> Floats:
            told[index] = row
            barrier.wait(30)
            found = np.stack(told)
            barrier.wait(30)
            return found

        results[index] = work(index, gather)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(tasks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("model", ["logistic", "linear"])
def test_all_reduce_is_gradient_descent_on_all_rows_and_averaging_comes_near(model: Any) -> None:
    x, classes, targets = data_of(HIGGS, 300)
    y = targets if model == "linear" else classes.astype(float)
    cell = Cell(model, 300, 300, 60)
    parts = np.array_split(np.arange(300), 3)
    start, rng = np.zeros(HIGGS.features), np.random.default_rng(0)

    def run(local_steps: int) -> list[Any]:
        return together(3, lambda i, gather: descend(cell, x[parts[i]], y[parts[i]], start, rng, gather, local_steps))

    expected = start
    for turn in range(1, 61):
        slope = arithmetic.gradient(model, expected, x, y) / 300 + cell.settings.decay * expected
        expected = expected - cell.settings.step / np.sqrt(turn) * slope
    for weights, mini_batches, examples, converged in run(1):
        np.testing.assert_allclose(weights, expected, atol=1e-12)
        assert (mini_batches, examples, converged) == (60, 6_000, False)
    begin, end = (arithmetic.loss(model, w, x, y) for w in (start, expected))
    averaged = run(LOCAL_STEPS)
    assert all(np.array_equal(result[0], averaged[0][0]) for result in averaged)
    assert arithmetic.loss(model, averaged[0][0], x, y) - end < 0.2 * (begin - end)


def test_a_hub_hands_every_row_to_every_task_in_order_and_ends_them_all_when_one_leaves() -> None:
    place, rounds = hub("127.0.0.1", 3), 40

    def work(index: int) -> list[Floats]:
        with place.join(index) as seat:
            return [seat.gather(np.array([index, turn, 0.5])) for turn in range(rounds if index == 1 else 2 * rounds)]

    with ThreadPoolExecutor(3) as pool:
        tasks = [pool.submit(work, index) for index in (2, 0, 1)]
        for turn, told in enumerate(tasks[2].result(30)):
            np.testing.assert_array_equal(told, [[index, turn, 0.5] for index in range(3)])
        for left in tasks[:2]:
            with pytest.raises((EOFError, OSError)):
                left.result(30)


def test_a_stranger_is_not_let_into_a_hub() -> None:
    place = hub("127.0.0.1", 1)
    with pytest.raises(AuthenticationError), replace(place, key=b"guessed").join(0):
        pass
    with place.join(0) as seat:
        np.testing.assert_array_equal(seat.gather(np.ones(2)), np.ones((1, 2)))


def test_cells_are_those_of_the_thesis() -> None:
    counts: dict[Any, int] = {"logistic": 100_000, "linear": 50_000, "perceptron": 100_000}
    found = [cell for model, count in counts.items() for cell in to_converge(model, count, (2000, 500))]
    sizes = {(cell.model, str(cell.batch) if cell.is_stochastic else "all") for cell in found}
    assert sizes == published.MINI_BATCHES.keys()
    fixed = [cell for model, count in counts.items() for cell in of_a_length(model, count, 100)]
    assert [(cell.model, cell.batch, cell.mini_batches) for cell in fixed] == [
        *(("logistic", size, 100) for size in (100_000, 1_000, 100)),
        *(("linear", size, 100) for size in (50_000, 500, 50)),
        ("perceptron", 100_000, 20),
    ]


FLAGS = ["--quick", "--year-rows", "4000", "--higgs-rows", "4096", "--models", "linear,perceptron", "--batches", "500"]
FLAGS += ["--sizes", "5000", "--tasks", "3", "--mini-batches", "10", "--arms", "mllib,ps-sync,all-reduce"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job as a user starts it, on two learners and three arms."""
    output = tmp_path_factory.mktemp("benchmark") / "out"
    done = run_job("benchmark.py", "--output", output, *FLAGS)
    assert done.code == 0, done.err
    assert f"report: {output}/report.html" in done.out
    return output


def test_the_job_measures_every_cell_in_every_arm(quick: Path) -> None:
    result = json.loads((quick / "results.json").read_text())
    found = summary.lines(result["rows"])
    assert not [line.errors for line in found if line.errors]
    cells = [("linear", 4000, size, None) for size in ("all", "500")]
    cells += [("linear", 4000, size, 10) for size in ("40", "4")]
    cells += [("linear", 5000, size, 10) for size in ("all", "50", "5")]
    cells += [("perceptron", 4096, "all", None), ("perceptron", 5000, "all", 2)]
    many = [line for line in found if line.tasks]
    assert [(line.who, line.model, line.size, line.length) for line in many] == [
        ("mllib, 3 tasks", "linear", "500", 2),
        ("ps-sync, 3 workers, by socket", "linear", "500", 50),
    ]
    assert all(line.figures["driver_s" if line.arm == "mllib" else "server_s"].median > 0 for line in many)
    found = [line for line in found if not line.tasks]
    assert {(line.model, line.rows, line.size, line.length, line.arm) for line in found} == {
        (*cell, arm) for cell in cells for arm in ("mllib", "ps-sync", "all-reduce")
    }
    for model in ("linear", "perceptron"):  # gradient descent: the same whoever does it
        whole = [line for line in found if (line.model, line.size, line.length) == (model, "all", None)]
        assert len({line.figures["mini_batches"].median for line in whole}) == 1
        losses = [line.figures["loss"].median for line in whole]
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)
    for line in found:
        assert line.figures["seconds"].median > 0
        assert line.figures["load_s"].median > 0
        assert line.length in (None, line.figures["mini_batches"].median)
        if line.model == "linear" and not line.length:
            assert -1e-6 < line.figures["gap"].median < 0.1
    table = list(csv.DictReader((quick / "results.csv").open()))
    assert len(table) == len(result["rows"]) == 29
    assert result["machine"]["cores"] >= 1
    # a size's rows are deleted after it
    assert sorted(path.name for path in (quick / "data").iterdir()) == ["higgs-like", "year-like"]
    assert result["parts"]["linear, 500 of 4,000"]["tasks"] >= 1
    assert result["parts"]["linear, 500 of 4,000, 3 tasks, 2 times"]["tasks"] >= 3


def test_the_report_stands_alone_and_shows_what_failed(quick: Path) -> None:
    page = (quick / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page
    for text in ("to converge", "3,104", "all-reduce", "140 nodes"):
        assert text in page
    result = json.loads((quick / "results.json").read_text())
    result["rows"][0].update(error="the trainer's own line", outcome=None, loss=None, gap=None)
    assert "failed: the trainer&#39;s own line" in render(result)


def test_rows_that_are_there_are_kept_and_those_of_another_plan_are_not_mixed_in(quick: Path) -> None:
    before = (quick / "results.csv").read_text()
    again = run_job("benchmark.py", "--output", quick, *FLAGS)
    assert again.code == 0, again.err
    assert (quick / "results.csv").read_text() == before
    other = run_job("benchmark.py", "--output", quick, *FLAGS, "--seed", "1")
    assert other.code == 2
    assert "--overwrite" in other.err


def test_a_set_that_could_not_be_loaded_is_the_error_of_its_runs() -> None:
    asked = Row("logistic", 9000, 500, None, "mllib", 0)
    nothing: Any = None
    done = _measure(nothing, Cell("logistic", 9000, 500), asked, MemoryError("no room\nfor rows"))
    assert done == replace(asked, error="no room for rows")
    loaded = Loaded(nothing, np.zeros(0), None, JobError("3 of 4 parts fit"))
    bench: Any = SimpleNamespace(plan=SimpleNamespace(seed=0), meter=None)
    stored: Any = SimpleNamespace(data=None, problem=HIGGS)
    done = _measure(bench, Cell("logistic", 9000, 500), asked, replace(loaded, stored=stored))
    assert done == replace(asked, error="3 of 4 parts fit")  # of MLlib's runs alone


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--output", "hdfs://host/x"], "must be a local folder"),
        (["--models", "forest"], "is not a list of logistic, linear, perceptron"),
        (["--tasks", "280,x"], "is not a list of whole numbers"),
        (["--higgs-rows", "10"], "--higgs-rows must be at least 4000"),
        (["--year-rows", "5000", "--year", "x.txt"], "leave one out"),
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
