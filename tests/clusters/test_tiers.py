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
MODULES = sorted(TESTS.rglob("test_*.py"))


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


def timed_assertions(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of assertions on a clock's reading, function by function."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
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
            if isinstance(node, ast.Assert) and reads_clock(node.test, readings)
        )


@pytest.mark.full
def test_no_test_asserts_on_wall_clock_time() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}" for path in MODULES for line in timed_assertions(ast.parse(path.read_text()))
    }
    assert not found


def test_an_assertion_on_a_clock_is_found() -> None:
    text = "def test_x():\n    began = time.monotonic()\n    took = time.monotonic() - began\n    assert took < 3\n"
    assert list(timed_assertions(ast.parse(text))) == [4]
    assert not list(
        timed_assertions(ast.parse("def test_y():\n    until(lambda: time.monotonic() > 3)\n    assert f()\n"))
    )
