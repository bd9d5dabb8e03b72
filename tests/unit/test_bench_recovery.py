"""The figures of ``make bench-recovery``, from the lines of a log."""

from __future__ import annotations

import pytest

from tests.benchmarks.recovery import Line, _beat_gaps, _first_steps, _seconds

OLD, NEW = 10, 20  # processes of worker 0, before and after the fault
BEGIN = 100.0


def line(kind: str, worker: int, number: int, at: float, pid: int | None = None) -> Line:
    """A line of the log, ``at`` seconds after the fault. pid: by default one of its own for each worker."""
    return Line(kind, worker, NEW + worker if pid is None else pid, number, BEGIN + at)


def test_neighbours_recover_from_the_view_without_the_lost() -> None:
    lines = [
        line("step", 1, 5, 0.1),
        line("view", 1, 6, 0.2),
        line("view", 2, 6, 0.3),
        line("step", 1, 6, 0.4),
        line("step", 2, 6, 0.5),
        line("view", 0, 7, 0.6),
        line("view", 1, 7, 0.6),
        line("step", 1, 7, 0.9),
        line("step", 2, 6, 0.9),
        line("step", 0, 7, 1.0),
        line("step", 1, 7, 9.0),
    ]
    assert _first_steps(lines[:3], 0) == {}
    assert _first_steps(lines, 0).keys() == {0, 1, 2}
    expected = {"rejoin": 0.3, "back": 1.0, "freeze": 0.5, "pause": 0.5}
    assert _seconds(lines, 0, BEGIN) == pytest.approx(expected)


def test_all_reduce_recovers_from_the_last_join_request() -> None:
    lines = [
        line("join", 1, 5, 0.1),
        line("join", 2, 5, 0.1),
        line("join", 1, 6, 0.3),
        line("join", 2, 6, 0.3),
        line("join", 0, 6, 0.4),
        line("step", 1, 6, 0.5),
        line("step", 2, 6, 0.6),
    ]
    assert _first_steps(lines, 0) == {}, "the new process has not stepped"
    lines += [line("step", 0, 6, 0.7)]
    expected = {"rejoin": 0.2, "back": 0.7, "freeze": 0.6, "pause": 0.6}
    assert _seconds(lines, 0, BEGIN) == pytest.approx(expected)


def test_heartbeats_of_two_processes_have_no_gap_between_them() -> None:
    beats = [line("beat", 0, 1, at, pid) for at, pid in ((0.0, OLD), (0.5, OLD), (3.0, NEW), (3.75, NEW))]
    assert _beat_gaps([*beats, line("step", 0, 1, 3.8, NEW)]) == [0.5, 0.75]
