"""The trainer's regressions against MLlib's and against a few lines of numpy: same mini-batches, same weights, same end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.mllib.classification import LogisticRegressionWithSGD
from pyspark.mllib.regression import LabeledPoint, LinearRegressionWithSGD

from pipeline.datasets.features import feature_batch
from pipeline.runs.request import Request
from pipeline.runs.shard import shard
from pipeline.spark.progress import PhaseLog
from pipeline.strategies.stratified import Stratified
from tests.support.tiers import only
from tests.support.trainer_runs import RunFolder, Training, train_here
from trainer.benchmark import arithmetic
from trainer.data.loading import load_worker
from trainer.data.opening import open_shards
from trainer.sampling.bernoulli import bernoulli
from trainer.simulate import main as simulate

ROWS, FEATURES, WORKERS, SEED = 403, 6, 3, 5  # rows that three workers cannot share evenly
TOLERANCE, RATE, DECAY = 1e-3, 1.0, 0.01
LEAST_RATE = 0.5
Vector = npt.NDArray[np.float64]


class Problem:
    """Planted weights, correlated features of unit variance, classes and real targets."""

    def __init__(self, root: Path, spark: Any) -> None:
        rng = np.random.default_rng(SEED)
        mix = np.linalg.cholesky(0.4 ** np.abs(np.subtract.outer(np.arange(FEATURES), np.arange(FEATURES))))
        self.features = (rng.standard_normal((ROWS, FEATURES)) @ mix.T).astype(np.float32)
        score = self.features @ np.linspace(-2, 2, FEATURES)
        self.labels = (rng.random(ROWS) < 1 / (1 + np.exp(-score))).astype(np.int32)
        self.targets = (score + rng.standard_normal(ROWS)).astype(np.float32)
        (root / "input").mkdir()
        table = pa.Table.from_batches([feature_batch(self.features, self.labels, self.targets)])
        pq.write_table(table, root / "input" / "part-0.parquet")
        self.shards = root / "shards"
        request = Request(input=str(root / "input"), output=str(self.shards), num_workers=WORKERS)
        shard(spark.sparkContext, request, Stratified(), PhaseLog(quiet=True))
        self.context = spark.sparkContext

    def points(self, *, real: bool) -> Any:
        values = self.targets if real else self.labels
        rows = [LabeledPoint(float(y), x.astype(float)) for x, y in zip(self.features, values, strict=True)]
        return self.context.parallelize(rows, 2).cache()


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory, spark: Any) -> Problem:
    return Problem(tmp_path_factory.mktemp("regressions"), spark)


Train = Callable[..., RunFolder]


@pytest.fixture
def train(problem: Problem, tmp_path: Path) -> Train:
    """A run to its end, as MLlib would do it: on real processes, or in virtual time, which is faster."""
    number = itertools.count()

    def run(*flags: object, virtual: bool = False) -> RunFolder:
        common = ("--servers", 1, "--sampling", "bernoulli", "--recipe", "inverse-sqrt", "--momentum", 0)
        quiet = ("--threads", 1, "--no-report", "--no-epoch-checkpoints", "--quiet", "--no-intercept")
        output = tmp_path / f"run-{next(number)}"
        if not virtual:
            return train_here(problem.shards, output, *common, *quiet, *flags)
        places = ("--shards", problem.shards, "--output", output)
        assert simulate([str(flag) for flag in (*places, *common, *quiet, *flags)]) == 0
        return RunFolder(output)

    return run


LOGISTIC = ("--model", "logistic", "--learning-rate", RATE, "--weight-decay", DECAY)
LINEAR = ("--model", "linear", "--learning-rate", LEAST_RATE, "--weight-decay", 0)


def iterations(problem: Problem, fit: Callable[[Problem], Any]) -> tuple[int, Vector]:
    """How many mini-batches MLlib needs, each one job, and where it ends."""
    group = fit.__name__
    problem.context.setJobGroup(group, "counted")
    model = fit(problem)
    problem.context._jsc.sc().listenerBus().waitUntilEmpty()  # which tells the tracker
    tracker = problem.context.statusTracker()
    names = [
        {info.name for stage in tracker.getJobInfo(job).stageIds if (info := tracker.getStageInfo(stage))}
        for job in tracker.getJobIdsForGroup(group)
    ]
    problem.context.setJobGroup("", "")
    return sum(any("treeAggregate at GradientDescent" in n for n in each) for each in names), model.weights.toArray()


def mllib_logistic(problem: Problem, steps: int = 2000, tolerance: float = TOLERANCE) -> Any:
    points = problem.points(real=False)
    return LogisticRegressionWithSGD.train(
        points, steps, RATE, 1.0, regParam=DECAY, regType="l2", convergenceTol=tolerance
    )


def mllib_linear(problem: Problem, steps: int = 2000, tolerance: float = TOLERANCE) -> Any:
    points = problem.points(real=True)
    return LinearRegressionWithSGD.train(points, steps, LEAST_RATE, 1.0, regParam=0.0, convergenceTol=tolerance)


FITS = [(LOGISTIC, mllib_logistic), (LINEAR, mllib_linear)]


@pytest.mark.parametrize(("flags", "fit"), only([(LINEAR, mllib_linear)], FITS))
def test_gradient_descent_has_mllibs_iterations_and_weights(
    problem: Problem, train: Train, flags: tuple[object, ...], fit: Callable[..., Any]
) -> None:
    """At the end, and on the way there, so that equal ends are not only those of the same optimum."""
    count, weights = iterations(problem, fit)
    run = train(*flags, "--protocol", "bsp", "--batch-size", ROWS, "--steps", 2000, "--tolerance", TOLERANCE)
    result = run.result()
    assert 10 < count < 2000
    assert (result["updates"], result["converged"]) == (count, True)
    np.testing.assert_allclose(run.vector(), weights, rtol=0, atol=1e-6)
    loaded = {event["worker"]: event["rows"] for event in run.events("loaded")}
    assert (sorted(loaded), sum(loaded.values())) == ([0, 1, 2], ROWS)
    [ended] = run.events("converged")
    assert result["seconds"] == pytest.approx(ended["seconds"], abs=0.05)  # of training, loading not among them
    for steps in (1, 2, 5, count // 2):
        early = train(*flags, "--protocol", "bsp", "--batch-size", ROWS, "--steps", steps, virtual=True)
        expected = fit(problem, steps, tolerance=0.0).weights.toArray()
        np.testing.assert_allclose(early.vector(), expected, rtol=0, atol=1e-6, err_msg=f"{steps} steps")


@pytest.mark.parametrize("flags", [LOGISTIC, LINEAR])
def test_sgd_uses_the_mean_over_the_rows_of_all_workers(
    problem: Problem, train: Train, flags: tuple[object, ...]
) -> None:
    steps, batch, seed = 60, 30, 9
    run = train(*flags, "--protocol", "bsp", "--batch-size", batch, "--steps", steps, "--seed", seed)
    real = "linear" in flags
    rate, decay = (LEAST_RATE, 0.0) if real else (RATE, DECAY)
    shards = open_shards(str(problem.shards))
    parts = [load_worker(shards, worker, targets=real) for worker in range(WORKERS)]
    w = np.zeros(FEATURES)
    for step in range(steps):
        total, count = np.zeros(FEATURES), 0
        for worker, rows in enumerate(parts):
            chosen = bernoulli(len(rows), batch / ROWS, step, seed, worker)
            x, y = rows.images_NCHW[chosen].reshape(-1, FEATURES).astype(float), rows.labels[chosen]
            score = x @ w
            total += x.T @ ((score if real else 1 / (1 + np.exp(-score))) - y)
            count += len(x)
        w -= rate / np.sqrt(step + 1) * (total / count + decay * w)
    np.testing.assert_allclose(run.vector(), w, rtol=0, atol=2e-6)
    assert run.result()["converged"] is False
    assert run.pushes()["examples"].sum() == pytest.approx(steps * batch, rel=0.1)


def objective(problem: Problem, weights: npt.NDArray[Any]) -> float:
    features, labels, weights = problem.features.astype(float), problem.labels.astype(float), weights.astype(float)
    total = arithmetic.loss("logistic", weights, features, labels)
    return total / ROWS + 0.5 * DECAY * float(weights @ weights)


@pytest.mark.full
def test_an_asynchronous_run_comes_as_near_to_the_optimum(problem: Problem, train: Train) -> None:
    flags = (*LOGISTIC, "--batch-size", ROWS, "--steps", 2000, "--tolerance", TOLERANCE)
    together, apart = train(*flags, "--protocol", "bsp"), train(*flags, "--protocol", "asp")
    assert apart.result()["converged"]
    assert apart.pushes()["staleness"].max() > 0
    start, end = objective(problem, np.zeros(FEATURES)), objective(problem, together.vector())
    assert objective(problem, apart.vector()) - end < 0.05 * (start - end)


@pytest.mark.parametrize("fraction", [0.01, 0.3])
def test_a_row_is_in_a_mini_batch_as_if_a_coin_was_thrown_for_it(fraction: float) -> None:
    """Counts against the binomial law: mean and variance of the size, and of how often each row is drawn."""
    rows, turns = 200, 4000
    drawn = np.zeros((turns, rows))
    for turn in range(turns):
        drawn[turn, bernoulli(rows, fraction, turn, 1, 0)] += 1
    assert drawn.max() == 1
    sizes = drawn.sum(axis=1)
    spread = rows * fraction * (1 - fraction)
    assert abs(sizes.mean() - rows * fraction) < 5 * np.sqrt(spread / turns)
    assert sizes.var() == pytest.approx(spread, rel=0.15)
    assert np.abs(drawn.mean(axis=0) - fraction).max() < 5 * np.sqrt(fraction * (1 - fraction) / turns)


def test_a_tolerance_is_refused_where_no_server_holds_the_whole_model(problem: Problem, tmp_path: Path) -> None:
    run = Training(
        problem.shards, tmp_path / "run", "--model", "logistic", "--steps", 5, "--tolerance", 0.1, "--servers", 2
    )
    assert run.wait() == 2
    assert "--servers 1" in run.said()
