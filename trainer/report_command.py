"""``sharding report PLACE``: make the report of a shard set or of a training run anew."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pipeline.core import command_line
from pipeline.core.command_line import Parser
from pipeline.core.errors import DataError
from pipeline.core.extras import require
from pipeline.core.shardset.manifest import open_committed
from pipeline.core.shardset.versions import NAME
from pipeline.core.storage.retries import unreadable_is_data_error
from pipeline.core.storage.store import configured_store
from trainer.home.place import place_of
from trainer.run_files import METRICS

INTERRUPTED = "the old report is unchanged; run the same command again"
EPILOG = """\
example: sharding report build/run

The report replaces report.html in the folder; a set's quality.json is replaced
too. Exit codes: 0 done, 2 wrong usage, 3 a missing or damaged set or run,
1 other errors."""


def parser() -> Parser:
    """Return the parser of the command."""
    result = command_line.parser("sharding report", "Make the report of a shard set or of a training run anew.", EPILOG)
    result.add_argument("place", metavar="PLACE", help="folder of a committed set or of a run, local, hdfs:// or s3://")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises UsageError, DataError and JobError."""
    args = command_line.parse(parser(), argv)
    print(f"report: {make_report(args.place)}")
    return 0


def make_report(uri: str) -> str:
    """Write the report of a set or a run again, and return its URI.

    A set is measured in this process, which reads every shard; a run is reported from its log. Raises DataError if there
    is neither, or if it is damaged."""
    place = place_of(uri)
    with unreadable_is_data_error(uri):
        is_run = (place / METRICS).exists()
        is_set = (place / NAME).exists()
    if is_run:
        require("trainer", "report")
        # Imported late, because this loads pandas and matplotlib, and a set needs no trainer.
        from trainer.report.page import write_report as write_run_report

        return str(write_run_report(place))
    if not is_set:
        raise DataError(f"{place} holds neither a committed shard set ({NAME}) nor a training run ({METRICS})")
    from pipeline.quality.report import write_report as write_set_report
    from pipeline.runs.report import REPORT, replace_below
    from pipeline.upkeep.verify import map_in_threads

    shards = open_committed(configured_store(), uri)
    write_set_report(shards, partial(replace_below, shards), map_in_threads)
    return f"{shards.uri}/{REPORT}"
