"""Text tables for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(
    rows: Sequence[Sequence[str]], header: Sequence[str] = (), *, right: Collection[int] = (), indent: str = ""
) -> str:
    """Return cells as aligned columns, two spaces apart, with one line per row. Raises ValueError for unequal rows.

    Args:
        rows: the cells, row by row.
        header: cells of the first line; without a header if empty.
        right: columns, counted from 0, to align to the right, as for numbers.
        indent: text before each line.
    """
    lines = [header, *rows] if header else list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def aligned_cell(column: int, cell: str) -> str:
        return cell.rjust(widths[column]) if column in right else cell.ljust(widths[column])

    return "\n".join(indent + "  ".join(aligned_cell(*item) for item in enumerate(line)).rstrip() for line in lines)


def two_column_table(lines: Sequence[tuple[str, str]]) -> str:
    """Return (name, text) pairs as an indented table of two columns."""
    return table(lines, indent="  ")
