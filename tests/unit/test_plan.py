"""The plan of a run against the bytes, files and tasks of real ones, and its page."""

from __future__ import annotations

import json

import pytest

from pipeline.__main__ import main
from pipeline.runs import plan as plan_module
from pipeline.runs import plan_command
from pipeline.runs.plan import Shape, plan, warnings
from pipeline.strategies.class_cluster import ClassCluster
from pipeline.strategies.distribution_aware import DistributionAware

Capture = pytest.CaptureFixture[str]


def test_the_largest_sizes_are_planned_and_what_does_not_fit_is_said() -> None:
    large = plan(Shape(10**9, 10_000, 3072, 100, 200, 50, 1000))
    assert large.spills
    assert large.driver_bytes < 4 << 30
    assert warnings(large, 2 << 30) == []
    lines = warnings(plan(Shape(10**6, 100_000, 150_528, 10, 70_000, 50, 4)), 1 << 30)
    text = "\n".join(lines)
    for sign in ("70,000 clusters exceed the limit", "a task of pca needs", "about 10 rows"):
        assert sign in text


def test_a_large_manifest_is_told_in_decimal_units() -> None:
    large = plan(Shape(10**9, 1_000_000, 3072))
    (line,) = (line for line in warnings(large, 2 << 30) if "the manifest has" in line)
    assert line == f"the manifest has {large.manifest_bytes / 1e6:.0f} MB, which every reader reads completely"


def test_a_class_too_large_for_a_task_is_reported_before_a_run() -> None:
    """A class that no task holds is said before a run of submodular."""
    small = plan(Shape(50_000, 8, 3072, components=64, blocks=8))
    assert [phase.name for phase in small.phases] == ["scan", "pca", "project", "blocks", "write"]
    (blocks,) = (phase for phase in small.phases if phase.name == "blocks")
    assert blocks.tasks == 10
    assert 4 * 5000**2 < blocks.task_bytes < 10 * 5000**2 + plan_module.PYTHON_TASK
    assert warnings(small, 2 << 30) == []
    large = plan(Shape(1_000_000, 8, 3072, components=64, blocks=8))
    assert [phase.tasks for phase in large.phases if phase.name == "blocks"] == [100]
    assert warnings(large, 2 << 30) == []
    (line,) = warnings(large, 400 << 20)
    assert line.startswith("a task of blocks needs 0.6 GB, but has 0.4: ")


def test_hashing_is_planned_without_a_clustering() -> None:
    small = plan(Shape(50_000, 12, 3072, clusters=256, functions=8))
    assert [phase.name for phase in small.phases] == ["scan", "functions", "hash", "buckets", "assign", "write"]
    assert warnings(small, 2 << 30) == []
    lines = warnings(plan(Shape(10**7, 12, 3072, clusters=300_000, functions=40)), 2 << 30)
    assert lines[0] == "300,000 buckets exceed the limit of 262,144"


def test_tasks_follow_rows_times_workers() -> None:
    by_name = {phase.name: phase for phase in plan(Shape(10**6, 1000, 3072, cores=16)).phases}
    assert by_name["spill"].tasks >= 16
    assert by_name["gather"].tasks >= 12


def test_the_page(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_command, "measure_rates", lambda: plan_command.Rates(1e11, 3e10, 1e9, 5e8))
    flags = ["--rows", "1e9", "--workers", "10000", "--image", "3x32x32", "--clusters", "200", "--cores", "64"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", *flags])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for sign in (
        "1,000,000,000 rows, 3.1 TB",
        "range of workers",
        "pca",
        "kmeans x 52",
        "on 64 cores as fast as this machine's",
    ):
        assert sign in out
    assert json.dumps(out).isascii()


@pytest.mark.parametrize(
    ("strategy", "components"),
    [("distribution_aware", DistributionAware().components), ("class_cluster", ClassCluster().components)],
)
def test_the_plan_has_the_components_of_the_strategy(
    strategy: str, components: float, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_command, "measure_rates", lambda: plan_command.Rates(1e11, 3e10, 1e9, 5e8))
    pages = []
    for flags in ([], ["--components", f"{components:.0f}"]):
        with pytest.raises(SystemExit) as ended:
            main(["plan", "--rows", "50000", "--workers", "12", "--strategy", strategy, *flags])
        assert ended.value.code == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1]


def test_a_task_has_gigabytes_of_1000_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass the memory of a task on in the unit that shard uses."""
    monkeypatch.setattr(plan_command, "measure_rates", lambda: plan_command.Rates(1e11, 3e10, 1e9, 5e8))
    sizes: list[int] = []
    monkeypatch.setattr(plan_command, "format_plan", lambda estimate, rates, size: sizes.append(size))
    with pytest.raises(SystemExit):
        main(["plan", "--rows", "50000", "--workers", "12", "--task-memory-gb", "1.5"])
    assert sizes == [1_500_000_000]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rows", "0", "--workers", "2"], "is not a whole number of 1 or more"),
        (["--rows", "many", "--workers", "2"], "is not a number"),
        (["--rows", "10", "--workers", "12"], "12 workers are more than 10 rows"),
        (["--rows", "10", "--workers", "2", "--strategy", "best"], "'best' is unknown; choose one of"),
        (["--rows", "10", "--workers", "2", "--image", "32"], "is not CHANNELSxHEIGHTxWIDTH"),
    ],
)
def test_what_cannot_be_planned_is_one_line(flags: list[str], said: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *flags])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()[-1]) < 300
