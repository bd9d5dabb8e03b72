"""What a person sees of a run while it works: lines, Spark's pages, and why nothing moves."""

from __future__ import annotations

import sys
from contextlib import suppress
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from pipeline.spark import progress as module
from pipeline.spark.progress import DESCRIPTION, GROUP, PhaseLog
from tests.support.trainer_runs import until


def named(context: SparkContext) -> tuple[str | None, str | None]:
    return context.getLocalProperty(GROUP), context.getLocalProperty(DESCRIPTION)


def test_sparks_jobs_are_named_after_the_run_and_its_phase(spark: SparkSession) -> None:
    context = spark.sparkContext
    before = named(context)
    log = PhaseLog(context, quiet=True, title="stratified to /shards")
    with log.phase("scan"):
        assert named(context) == ("stratified to /shards", "scan: stratified to /shards")
        context.parallelize(range(4), 2).sum()
    assert named(context) == before
    with suppress(RuntimeError), log.phase("write"):
        raise RuntimeError("a phase that fails")
    assert named(context) == before
    context._jsc.sc().listenerBus().waitUntilEmpty()  # which tells the tracker
    assert len(context.statusTracker().getJobIdsForGroup("stratified to /shards")) == 1


def test_a_group_by_which_a_notebook_cancels_its_jobs_stays(spark: SparkSession) -> None:
    context = spark.sparkContext
    context.setJobGroup("mine", "my own")
    try:
        with PhaseLog(context, quiet=True, title="stratified").phase("scan"):
            assert named(context) == ("mine", "scan: stratified")
        assert named(context) == ("mine", "my own")
    finally:
        context.setLocalProperty(GROUP, None)  # type: ignore[arg-type]
        context.setLocalProperty(DESCRIPTION, None)  # type: ignore[arg-type]


STARVED = "no executor has started a task yet"


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([(3, 0, 0), (3, 0, 0)], ["0 of 12 tasks", STARVED]),
        ([(3, 0, 0), (3, 0, 2)], ["0 of 12 tasks", "0 of 12 tasks"]),
        ([(3, 0, 0), (4, 0, 0)], ["0 of 12 tasks", "0 of 12 tasks"]),
        ([(3, 5, 0), (3, 5, 0)], ["5 of 12 tasks", "5 of 12 tasks"]),
    ],
)
def test_a_long_phase_shows_its_progress_or_that_it_is_starved(
    looks: list[tuple[int, int, int]],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """looks: (stage, completed tasks, active ones) as Spark tells them, which is late."""
    said = StringIO()  # capsys would lose what another thread says while it is read
    monkeypatch.setattr(sys, "stderr", said)
    left = iter(looks)
    now: list[tuple[int, int, int]] = []

    def active_stages() -> list[int]:
        now[:] = [next(left, looks[-1])]
        return [now[0][0]]

    def stage_info(_: int) -> SimpleNamespace:
        return SimpleNamespace(numTasks=12, numCompletedTasks=now[0][1], numActiveTasks=now[0][2])

    tracker = SimpleNamespace(getActiveStageIds=active_stages, getStageInfo=stage_info)
    context: Any = SimpleNamespace(
        statusTracker=lambda: tracker, getLocalProperty=lambda _: None, setLocalProperty=lambda *_: None
    )
    monkeypatch.setattr(module, "FIRST_WORD_S", 0.02)
    log = PhaseLog(context)
    with log.phase("scan"):
        until(lambda: said.getvalue().count("\n") >= len(expected), "so many lines")
    for line, words in zip(said.getvalue().splitlines(), expected, strict=False):
        assert words in line
