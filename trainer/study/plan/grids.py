"""Grids of a plan: a table whose values are lists stands for one table per combination of them. Pure.

    [variants."stripes-w{warmup_epochs}-i{interval}"]
    repartition = "importance"
    warmup_epochs = [10, 20]
    interval = [1, 5, 30]

is six variants, from ``stripes-w10-i1`` to ``stripes-w20-i30``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from pipeline.core.errors import UsageError

PLACEHOLDER = re.compile(r"\{([a-z0-9_]+)\}")
MOST = 1000  # tables of one grid; more are probably a mistake, and would take years to train


def expand_grids(tables: Mapping[str, Mapping[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    """Return tables by name, in which every grid is replaced by its tables, in place.

    The value that is listed last in the file changes first, as in nested loops.

    Args:
        tables: flags by the names of tables.
        kind: of the tables, such as "variants", for messages.

    Raises:
        UsageError: a list is empty, the name of a grid lacks the placeholder of a list, two tables have equal names, or
            a grid is larger than 1,000 tables.
    """
    expanded: dict[str, dict[str, Any]] = {}
    for name, keys in tables.items():
        for one_name, one_keys in _tables_of(name, keys, f"[{kind}.{name}]"):
            if one_name in expanded:
                raise UsageError(f"[{kind}.{name}]: there are two tables [{kind}.{one_name}]")
            expanded[one_name] = one_keys
    return expanded


def _tables_of(name: str, keys: Mapping[str, Any], place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the flags of every table for which a table of a plan stands: itself if it has no list."""
    lists = {key: value for key, value in keys.items() if isinstance(value, list)}
    empty = next((key for key, values in lists.items() if not values), None)
    if empty:
        raise UsageError(f"{place}: {empty} = [] lists no value")
    unnamed = next((key for key in lists if key not in PLACEHOLDER.findall(name)), None)
    if unnamed:
        raise UsageError(
            f"{place}: {unnamed} lists several values, so the name must contain {{{unnamed}}}, and be quoted"
        )
    if (size := math.prod(map(len, lists.values()))) > MOST:
        raise UsageError(f"{place}: its lists combine to {size:,} tables; at most {MOST:,} are possible")
    # A table without lists has one combination of no values, and so stands for itself.
    for values in product(*lists.values()):
        single_values = dict(zip(lists, values, strict=True))
        yield _filled(name, single_values), dict(keys) | single_values


def _filled(name: str, single_values: Mapping[str, Any]) -> str:
    """Return a name with values in place of their keys; unknown placeholders stay."""

    def text(match: re.Match[str]) -> str:
        value = single_values.get(match[1], match[0])
        return str(value).lower() if isinstance(value, bool) else str(value)

    return PLACEHOLDER.sub(text, name)
