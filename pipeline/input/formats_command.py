"""``python -m pipeline formats``: a line for every format of --input."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.core import command_line
from pipeline.core.reporting.tables import two_column_table
from pipeline.input.formats import FORMATS


def main(argv: Sequence[str]) -> None:
    """List the formats of --input, as --format takes them."""
    flags = command_line.parser("python -m pipeline formats", main.__doc__, "")

    def run() -> int:
        command_line.parse(flags, argv)
        print(two_column_table([(name, kind.summary) for name, kind in FORMATS.items()]))
        return 0

    command_line.execute(run, interrupted="run it again")
