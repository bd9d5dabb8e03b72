"""``python -m pipeline formats``: a line for every format of --input."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.core.command_line import list_summaries
from pipeline.input.formats import FORMATS


def main(argv: Sequence[str]) -> None:
    """List the formats of --input, as --format takes them."""
    summaries = {name: kind.summary for name, kind in FORMATS.items()}
    list_summaries("python -m pipeline formats", main.__doc__, summaries, argv)
