"""The recorder of calls, by which `make test` knows which modules it executes."""

from __future__ import annotations

import ast
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.support.recorder import NAME, instrument

SOURCE = '''"""A module."""
from __future__ import annotations

class Shape:
    def area(self) -> int:
        """Return the area."""
        return square(2)

    def name(self) -> str:
        """Declared only."""
        ...

def square(side: int) -> int:
    def product() -> int:
        return side * side
    return product()

def unused() -> None:
    raise AssertionError
'''


def test_each_called_function_sets_its_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ast.parse(SOURCE)
    assert instrument(tree, 5) == ["Shape.area", "square", "unused"]
    recorder = ModuleType(NAME)
    calls = bytearray(8)
    monkeypatch.setattr(recorder, "CALLS", calls, raising=False)
    monkeypatch.setitem(sys.modules, NAME, recorder)
    names: dict[str, Any] = {}
    exec(compile(tree, "shape.py", "exec"), names)
    assert not any(calls)
    assert names["Shape"]().area() == 4
    assert calls == bytes([0, 0, 0, 0, 0, 1, 1, 0])
    assert names["Shape"].area.__doc__ == "Return the area."
