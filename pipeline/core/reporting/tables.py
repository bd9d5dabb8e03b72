"""Text tables for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pipeline.core.console import printable


def table(
    rows: Sequence[Sequence[str]], header: Sequence[str] = (), *, right: Collection[int] = (), indent: str = ""
) -> str:
    """Return cells as aligned columns, two spaces apart, with one line per row. Raises ValueError for unequal rows.

    Control characters are escaped.

    Args:
        rows: the cells, row by row.
        header: cells of the first line; without a header if empty.
        right: columns, counted from 0, to align to the right, as for numbers.
        indent: text before each line.
    """
    lines = [list(map(printable, line)) for line in ([header, *rows] if header else rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def aligned_cell(column: int, cell: str) -> str:
        return cell.rjust(widths[column]) if column in right else cell.ljust(widths[column])

    return "\n".join(indent + "  ".join(aligned_cell(*item) for item in enumerate(line)).rstrip() for line in lines)


def two_column_table(lines: Sequence[tuple[str, str]]) -> str:
    """Return (name, text) pairs as an indented table of two columns."""
    return table(lines, indent="  ")
