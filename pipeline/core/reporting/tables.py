"""Text tables for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(
    rows: Sequence[Sequence[str]], header: Sequence[str] = (), *, right: Collection[int] = (), indent: str = ""
) -> str:
    """Cells as aligned columns, two spaces apart, one line a row; the header, where given, is the first line.

    right: the columns, counted from 0, that are aligned to the right, as numbers are. Raises ValueError where rows
    differ in length."""
    lines = [header, *rows] if header else list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def aligned_cell(column: int, cell: str) -> str:
        return cell.rjust(widths[column]) if column in right else cell.ljust(widths[column])

    return "\n".join(indent + "  ".join(aligned_cell(*item) for item in enumerate(line)).rstrip() for line in lines)


def aligned(lines: Sequence[tuple[str, str]]) -> str:
    """(name, text) pairs as a table of two columns, indented."""
    return table(lines, indent="  ")
