"""Which tests `make test-fast` leaves out, and which of them share a process."""

from __future__ import annotations

import subprocess

import pytest

from tests.clusters import spark_submit
from tests.clusters.fixtures import group_of, rank_of
from tests.selection import starts


def submits() -> None:
    spark_submit("job.py")


def submits_in_a_helper() -> None:
    submits()


def submits_later() -> None:
    def run() -> None:
        submits_in_a_helper()

    run()


def runs_a_command() -> None:
    subprocess.run(["true"], check=True)


@pytest.mark.parametrize("function", [submits, submits_in_a_helper, submits_later])
def test_a_function_that_reaches_spark_submit_is_slow(function: object) -> None:
    assert starts(function, {})


def test_a_function_that_starts_a_small_command_is_not_slow() -> None:
    assert not starts(runs_a_command, {})


def test_tests_that_share_a_cluster_or_a_measurement_share_a_process_and_come_first() -> None:
    names = ["tests/test_on_hdfs.py::test_a", "tests/test_on_yarn.py::test_b", "tests/test_fetch.py::test_on_hdfs_c"]
    assert {group_of(name) for name in names} == {"on hdfs"}
    benchmark = [group_of(f"tests/test_benchmark.py::test_{name}") for name in "ab"]
    assert benchmark[0] == benchmark[1] != group_of("tests/test_benchmark_summary.py::test_a")
    assert group_of("tests/test_gram.py::test_a") != group_of("tests/test_gram.py::test_b")
    order = [
        "tests/test_on_standalone.py::test_a",
        names[2],
        "tests/test_readme.py::test_a",
        "tests/test_gram.py::test_a",
    ]
    assert sorted(reversed(order), key=rank_of) == order
