"""Text tables: columns line up, numbers at the right."""

from __future__ import annotations

import pytest

from pipeline.core.reporting.tables import table, two_column_table


def test_columns_fit_their_widest_cell() -> None:
    """Every column is as wide as its widest cell and numbers are at the right."""
    text = table([("random", "1,250", "0.5"), ("stratified", "7", "-")], ("strategy", "rows", "ratio"), right={1, 2})
    assert text.splitlines() == [
        "strategy     rows  ratio",
        "random      1,250    0.5",
        "stratified      7      -",
    ]


def test_no_line_ends_in_spaces() -> None:
    assert table([("a", "long"), ("bbb", "x")]).splitlines() == ["a    long", "bbb  x"]
    assert table([("a", "")]) == "a"


def test_a_table_without_rows_is_its_header() -> None:
    """A table without rows is its header and one without both is empty."""
    assert table([], ("name", "rows")) == "name  rows"
    assert table([]) == ""


def test_rows_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        table([("a", "b"), ("c",)])


def test_pairs_are_indented_in_two_columns() -> None:
    assert two_column_table([("rows", "7"), ("strategy", "random")]).splitlines() == [
        "  rows      7",
        "  strategy  random",
    ]
