"""Which of a test's parameters the default tier runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def only(chosen: Any, values: Iterable[Any]) -> list[Any]:
    """Return the values as parameters of which only the chosen ones run by default; the others are for the full tier.

    chosen: a list of some of the values. A value may be a tuple, for several names."""
    values = list(values)
    assert all(value in values for value in chosen), f"{chosen} are not all among {values}"
    return [value if value in chosen else _full(value) for value in values]


def _full(value: Any) -> Any:
    return pytest.param(*value if isinstance(value, tuple) else [value], marks=pytest.mark.full)
