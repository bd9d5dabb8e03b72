"""``python -m pipeline strategies``: a line for every sharding strategy."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.core.command_line import list_summaries
from pipeline.strategies import STRATEGIES


def main(argv: Sequence[str]) -> None:
    """List the strategies, as --strategy takes them; shard --strategy NAME --help shows the options of each."""
    summaries = {name: kind.summary for name, kind in STRATEGIES.items()}
    list_summaries("python -m pipeline strategies", main.__doc__, summaries, argv)
