"""What the benchmark's records come to: findings in words, and the cost model of many nodes. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.benchmark.command import print_summaries
from trainer.benchmark.configurations import Model, System
from trainer.benchmark.results.cost_model import (
    Cluster,
    ServerCosts,
    SparkCosts,
    TimedMiniBatch,
    fit_server,
    fit_spark,
)
from trainer.benchmark.results.findings import write_findings
from trainer.benchmark.results.forecast import average_gaps, collect_timings, fit_cost_models
from trainer.benchmark.results.report import render
from trainer.benchmark.results.summary import METRICS, judge_goals, summarise


def record(
    model: Model,
    rows: int,
    batch: int,
    length: int | None,
    system: System,
    ms: float,
    load_s: float = 1.0,
    tasks: int | None = None,
) -> dict[str, Any]:
    """A run of 100 mini-batches, all of whose other metrics are 1."""
    measurement = dict.fromkeys(METRICS, 1.0) | {"converged": True, "load_s": load_s}
    measurement |= {"compute_s": ms / 1e3, "seconds": ms / 10, "mini_batches": 100}
    identity = {"model": model, "rows": rows, "batch": batch, "length": length, "system": system, "tasks": tasks}
    return {**identity, "error": "", "loss": None, "gap": None, "measurement": measurement}


def failed(found: dict[str, Any], error: str) -> dict[str, Any]:
    return {**found, "error": error, "measurement": None}


def test_findings_say_where_mllib_is_the_faster_one() -> None:
    table = [
        record("linear", 9000, 500, None, "mllib", 30, load_s=9),
        record("linear", 9000, 500, None, "ps-sync", 2, load_s=3),
        record("linear", 9000, 500, None, "all-reduce", 0.5),
        record("perceptron", 9000, 9000, 20, "mllib", 40),
        record("perceptron", 9000, 9000, 20, "ps-sync", 80),
        record("perceptron", 9000, 9000, 20, "ps-async", 50),
    ]
    found = write_findings(summarise(table))
    # 3 + 1 against 0.2 + 1 seconds
    assert "on average 3.3 times as long as the better server, and at least 3.3 times." in found[0]
    assert found[1] == (
        "Rows read into memory per second, linear: MLlib 1,000, the trainer 3,000, Spark tasks with numpy 9,000."
    )
    assert (
        "MLlib is faster than both servers in 1 of 2 configurations: perceptron, 9,000 of 9,000 rows (0.80)."
        in found[3]
    )
    assert "60 times as fast as MLlib (all-reduce" in found[4]
    assert write_findings([]) == []


def test_failed_and_unconverged_runs_count_for_no_goal(capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration that failed or did not converge counts for no goal."""
    mllib, server = record("linear", 9000, 500, None, "mllib", 30), record("linear", 9000, 500, None, "ps-sync", 2)
    unfinished = {**server, "measurement": {**server["measurement"], "converged": False}}
    least, average = judge_goals(summarise([mllib, server]))
    assert (least.speedup, average.speedup) == (15, 15)
    assert (least.is_met, average.is_met) == (False, True)  # 16 and 8.23 in the thesis
    for other in (failed(server, "no room for rows"), unfinished):
        assert [goal.speedup for goal in judge_goals(summarise([mllib, other]))] == [None, None]
    print_summaries(summarise([mllib, failed(server, "no room for rows"), {**unfinished, "batch": 50}]))
    header, first, second, third, *goals = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "model"
    assert first.split() == ["linear", "9,000", "500", "mllib", "100", "3.00", "30.00", "1.00"]
    assert second.endswith("failed: no room for rows")
    assert third.split() == ["linear", "9,000", "50", "ps-sync", "100+", "0.20", "2.00", "-"]
    assert all("not measured" in goal for goal in goals)


seconds = st.floats(1e-9, 1e-2)
HERE, THERE = (Cluster(cores, 280, 2, has_network=cores > 2) for cores in (2, 280))


@settings(max_examples=50, deadline=None)
@given(seconds, seconds, seconds, seconds)
def test_fitting_finds_the_costs_that_made_the_samples(job: float, launch: float, scan: float, row: float) -> None:
    true = SparkCosts(job + 1e-3, 1e-4, launch, scan / 1e3, row / 1e3)
    sizes = [(1000, 1000, 2), (1000, 10, 2), (9000, 90, 2), (500, 500, 2), (1000, 10, 280)]
    samples = [
        TimedMiniBatch(n, b, tasks, true.mini_batch_s(n, b, 28, replace(HERE, tasks=tasks))) for n, b, tasks in sizes
    ]
    found = fit_spark(samples, 2, 1e-4)
    for n, b in ((2000, 20), (100_000, 100_000)):
        ours, theirs = (costs.mini_batch_s(n, b, 28, THERE) for costs in (found, true))
        assert ours == pytest.approx(theirs, rel=1e-3)
    server = ServerCosts(job, 1e-4, row / 1e3, scan / 1e3)
    two = replace(HERE, tasks=2)
    again = fit_server([TimedMiniBatch(n, b, 2, server.mini_batch_s(n, b, 28, two)) for n, b, _ in sizes], 2, 1e-4)
    for n in (300, 10_000):
        ours, theirs = (costs.mini_batch_s(n, 300, 28, THERE) for costs in (again, server))
        assert ours == pytest.approx(theirs, rel=1e-3)


def test_more_nodes_help_until_messages_are_all_there_is() -> None:
    spark = SparkCosts(job=8e-3, task=6e-4, launch=3e-3, scan=2e-8, row=1e-7)
    server = ServerCosts(step=1e-3, push=1e-4, row=1e-7, draw=1e-7)
    by_nodes = [spark.mini_batch_s(10**9, 10**6, 28, Cluster(nodes, nodes, 2)) for nodes in (10, 100, 1000, 10_000)]
    assert by_nodes[0] > by_nodes[1]
    assert by_nodes[3] > by_nodes[2]  # a task costs the driver 0.3 ms, and there are 10,000
    for workers in (1, 10, 280):
        on = Cluster(2 * workers, workers, 2)
        assert server.mini_batch_s(10**9, 500, 28, on) > server.asynchronous_s(10**9, 500, 28, on)
    crowded, roomy = (server.split(9000, 500, 28, Cluster(cores, 8, 2))["workers"] for cores in (2, 8))
    assert crowded > 3.9 * roomy  # four workers take turns on a core


def test_as_many_tasks_as_cores_tell_no_cost_of_a_task() -> None:
    """A run with --tasks equal to the machine's cores has no second point for the driver's cost of one task more."""
    table = [record("linear", 9000, 500, 20, "mllib", 30, tasks=tasks) for tasks in (None, 2)]
    assert collect_timings(summarise(table), "linear", cores=2).task == 0.0


SPARK = SparkCosts(job=2e-2, task=7e-4, launch=3e-3, scan=3e-8, row=1e-7)
SERVER = ServerCosts(step=1e-3, push=2e-4, row=1e-7, draw=2e-7)


def records_of_costs() -> list[dict[str, Any]]:
    """Return timed mini-batches as SPARK and SERVER make them, except for twice the time of MLlib's 70 tasks."""
    table = []
    for rows_, tasks in (
        (10_000, None),
        (100_000, None),
        (1_000_000, None),
        (100_000, 280),
        (100_000, 70),
        (100_000, 8),
    ):
        on = replace(HERE, tasks=tasks or 2)
        for batch in (rows_, 500):
            spent = 1e3 * SPARK.mini_batch_s(rows_, batch, 28, on), 1e3 * SERVER.mini_batch_s(rows_, batch, 28, on)
            table.append(
                record("logistic", rows_, batch, 20, "mllib", spent[0] * (2 if tasks == 70 else 1), tasks=tasks)
            )
            table[-1]["measurement"]["driver_s"] = 1e-2 + 7e-4 * on.tasks
            if on.tasks <= 8:
                table.append(record("logistic", rows_, batch, 20, "ps-sync", spent[1], tasks=tasks))
                table[-1]["measurement"]["server_s"] = 2e-4
    return table


def test_the_cost_model_is_validated_on_what_it_was_not_fitted_to() -> None:
    """Mini-batches that the model itself made are predicted exactly, and those that it did not make with their error."""
    table = records_of_costs()
    slow = record("logistic", 100_000, 500, 20, "ps-sync", 1e3, tasks=2)  # over sockets: not among those over memory
    slow["measurement"]["server_s"] = 2e-4
    [found] = fit_cost_models(summarise([*table, slow]), 2)
    for got, true in ((found.spark, SPARK), (found.server, SERVER)):
        assert vars(got) == pytest.approx(vars(true), rel=1e-6)
    assert found.largest_error < 1e-9
    errors = {each.name: each.error for each in found.validations}
    assert errors.pop("mllib, 500 of 100,000 rows, 70 tasks") == pytest.approx(-0.5)
    assert errors.pop("mllib, 100,000 of 100,000 rows, 70 tasks") == pytest.approx(-0.5)
    assert errors.pop("ps-sync, 500 of 100,000 rows, 2 workers") < -0.99
    assert {"mllib, 500 of 1,000,000 rows, 2 tasks", "ps-sync, 500 of 100,000 rows, 8 workers"} <= errors.keys()
    assert all(abs(error) < 1e-6 for error in errors.values())
    a_node, a_core = average_gaps([found]) or (0, 0)
    assert a_node > a_core > 1
    without_tasks = [each for each in summarise(table) if not each.tasks]
    assert not fit_cost_models(without_tasks, 2), "what a task costs is unknown"


MACHINE = {"cores": 2, "parallelism": 2, "python": "3.11"}
TASK_METRICS = dict.fromkeys(("stages", "wall_ms", "tasks", "run_ms", "deserialise_ms", "result_bytes"), 3.0)


def page_of(records: list[dict[str, Any]], servers_on: str = "the driver's host", **task_metrics: Any) -> str:
    machine = MACHINE | {"servers_on": servers_on}
    return render({"records": records, "machine": machine, "experiment": {"seed": 0}, "task_metrics": task_metrics})


@pytest.mark.usefixtures("undrawn")
def test_the_report_has_a_fitted_cost_model_and_failed_runs() -> None:
    """Render the page with and without a cost model, with failed and partly failed runs, and with several sizes."""
    goal = [record("linear", 9000, 500, None, "mllib", 90), record("linear", 9000, 500, None, "ps-sync", 2)]
    again = failed(goal[1], "a lost <worker>")
    alone = failed(goal[1] | {"system": "averaging"}, "no room")
    timed = failed(goal[1] | {"system": "averaging", "length": 20}, "no time")
    page = page_of([*goal, again, alone, timed, *records_of_costs()], linear=TASK_METRICS, empty={})
    assert "280 cores with one MLlib task each, an MLlib driver with 2 cores" in page
    assert "outside the fit" in page
    assert "Time of one mini-batch by number of rows" in page
    assert page.count("(failed once or more: a lost &lt;worker&gt;)") == 2
    assert (page.count("failed: no room"), page.count("failed: no time")) == (2, 1)
    assert "MLlib takes <b>45.0 times</b> as long to converge" in page
    assert "<td>linear</td>" in page
    few = page_of(goal)
    assert "No task metrics were recorded." in few
    assert "Not fitted: with few rows" in few
    assert "not measured (the thesis" in page_of([])
    assert "140 nodes" in few


@pytest.mark.usefixtures("undrawn")
def test_the_report_of_a_cluster_claims_nothing_of_one_host() -> None:
    """The driver's host shows no load of executors, and servers and workers on several hosts share no memory."""
    runs = [record("linear", 9000, 500, None, system, 30) for system in ("mllib", "ps-sync")]
    here = page_of(runs)
    assert "on the same 2 cores" in here
    assert "messages over shared memory." in here
    assert "busy share of the cores of the driver's host" in here
    assert "100 %" in here
    for run in runs:
        run["measurement"] |= {"cpu": None, "server_s": None}
    there = page_of(runs, "executors")
    assert "on the same executors" in there
    assert "over sockets between hosts" in there
    assert "Cores busy: not measured" in there
    assert "Not fitted: it needs the CPU time of the server" in there
    assert "100 %" not in there


def test_a_finding_compares_reading_with_the_size_of_mini_batches() -> None:
    table = [
        record("linear", rows, batch, 20, "ps-sync", 2)
        for rows, batch in ((9000, 9000), (9000, 900), (9000, 90), (80, 8))
    ]
    for run in table:
        run["measurement"]["read_s"] = 2e-6 * run["batch"]
    expected = (
        "Reading mini-batches of 900 rows, linear: 10.0 times as long as of 90 in the synchronous server (10.0 times as many"
        " rows); MLlib reads all rows for a mini-batch of any size."
    )
    assert expected in write_findings(summarise(table))
    assert not [text for text in write_findings(summarise(table[:2])) if text.startswith("Reading")]
