"""What the tiers promise of themselves: no test asserts how long something takes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.clusters.machine import ROOT

TESTS = ROOT / "tests"
CLOCKS = {
    f"time.{name}{unit}" for name in ("monotonic", "perf_counter", "process_time", "time") for unit in ("", "_ns")
}
ARITHMETIC = {"abs", "float", "int", "max", "min", "round"}
MODULES = sorted(TESTS.rglob("*.py"))
LOGGED = {"seconds", "time", "step_s", "read_s"}  # columns and keys of the logs of a run that hold times
REAL = ("training", "clusters", "campaigns")  # folders of tests whose runs are not in virtual time
# Assertions that compare times and cannot fail because a machine is slow, and why.
EXEMPT = {
    'result["seconds"] == pytest.approx(ended["seconds"], abs=0.05)': "two files have the same time of the same event",
}


def reads_clock(node: ast.AST, names: set[str]) -> bool:
    """True if an expression is made of a clock's reading: a call of the module time, or a name that holds one.

    Arguments of other functions are not looked at: a name made unique by a clock is no reading."""
    if isinstance(node, ast.Call):
        function = ast.unparse(node.func)
        if function in CLOCKS or function not in ARITHMETIC:
            return function in CLOCKS
    if isinstance(node, ast.Name):
        return node.id in names
    return any(reads_clock(part, names) for part in ast.iter_child_nodes(node))


def compares_logged_times(node: ast.AST) -> bool:
    """True if an expression compares or subtracts times from the log of a run, such as pushes["seconds"]."""
    times = [part for part in ast.walk(node) if isinstance(part, ast.Subscript) and is_logged_time(part.slice)]
    operations = (part for part in ast.walk(node) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub))
    return len(times) > 1 or any(is_logged_time(part) for each in operations for part in ast.walk(each))


def is_logged_time(key: ast.AST) -> bool:
    return isinstance(key, ast.Constant) and key.value in LOGGED


def timed_assertions(tree: ast.Module, *, real: bool = False) -> Iterator[int]:
    """Yield the lines of assertions on a clock's reading, function by function. real: also on times that runs log."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        readings: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and reads_clock(node.value, readings):
                readings |= {
                    name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)
                }
        yield from (
            node.lineno
            for node in ast.walk(function)
            if isinstance(node, ast.Assert)
            and (reads_clock(node.test, readings) or (real and compares_logged_times(node.test)))
            and ast.unparse(node.test).replace("'", '"') not in EXEMPT
        )


@pytest.mark.full
def test_no_test_asserts_on_wall_clock_time() -> None:
    """Look at the tests, and at what they share: tests/support, campaigns and benchmarks."""
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in MODULES
        for line in timed_assertions(ast.parse(path.read_text()), real=path.relative_to(TESTS).parts[0] in REAL)
    }
    assert not found


def test_an_assertion_on_a_clock_is_found() -> None:
    text = "def test_x():\n    began = time.monotonic()\n    took = time.monotonic() - began\n    assert took < 3\n"
    assert list(timed_assertions(ast.parse(text))) == [4]
    assert not list(
        timed_assertions(ast.parse("def test_y():\n    until(lambda: time.monotonic() > 3)\n    assert f()\n"))
    )


def test_an_assertion_on_logged_times_is_found_in_real_runs() -> None:
    tree = ast.parse('def test_x():\n    assert pushes["seconds"][4] - pushes["seconds"][3] > 1\n')
    assert list(timed_assertions(tree, real=True)) == [2]
    assert not list(timed_assertions(tree)), "virtual time does not depend on the machine"
    assert not list(timed_assertions(ast.parse('def test_y():\n    assert result["seconds"] > 0\n'), real=True))
