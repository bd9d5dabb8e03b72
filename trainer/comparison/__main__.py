"""``sharding runs RUN ...``: compare training runs in a table and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from pipeline.core import command_line, console
from pipeline.core.command_line import Parser
from pipeline.core.errors import DataError, UsageError
from pipeline.core.extras import require
from pipeline.core.json_values import build
from pipeline.core.reporting.tables import table
from pipeline.core.storage.retries import unreadable_is_data_error
from pipeline.core.storage.uri import local_folder
from trainer.home.place import place_of
from trainer.run_files import CONFIG, METRICS, PUSHES
from trainer.runlog.run_record import RunRecord, read_record

if TYPE_CHECKING:
    from trainer.comparison.measurements import Measurements

LOGGER = "sharding.runs"
MIXED = "real or virtual second"
INTERRUPTED = "nothing is lost; run the same command again"
SAME_BY_NATURE = {"--output"}  # differs between any two runs
EPILOG = """\
example: sharding runs build/run build/run-bsp --output build/runs

Runs may be unfinished. Exit codes: 0 done, 2 wrong usage, 3 a missing or
damaged run, 1 other errors."""


@dataclass(frozen=True)
class ComparedRun:
    """A run of the comparison.

    Attributes:
        label: its folder, as it was given.
        record: its configuration and shards.
        measurements: what it has reached so far.
    """

    label: str
    record: RunRecord
    measurements: Measurements


def parser() -> Parser:
    """Return the parser of the command."""
    result = command_line.parser("sharding runs", "Compare training runs in a table and a figure.", EPILOG)
    result.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs, local, hdfs:// or s3://")
    # Every time of the table is that to a goal which all runs reach, unless a flag sets it.
    reached = "to which times are measured (default: the best that all runs with any reach)"
    result.add_argument("--loss", type=float, metavar="FLOAT", help=f"training loss {reached}")
    result.add_argument(
        "--accuracy", type=command_line.share, metavar="SHARE", help=f"evaluation accuracy, from 0 to 1, {reached}"
    )
    result.add_argument(
        "--output",
        metavar="DIR",
        help="local folder for comparison.png and comparison.json (default: only the terminal)",
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises UsageError and DataError."""
    args = command_line.parse(parser(), argv)
    require("trainer", "runs")
    if args.loss is not None and not isfinite(args.loss):
        raise UsageError(f"--loss must be a finite number, got {args.loss}")
    if len({str(place_of(run)) for run in args.runs}) < len(args.runs):
        raise UsageError("a run is given twice: name each folder once")
    folder = local_folder(args.output, "--output") if args.output else None
    # Imported late, because --help needs neither pandas nor matplotlib.
    from trainer.comparison.measurements import highest_common_accuracy, lowest_common_loss, with_times
    from trainer.comparison.presentation import PICTURE, Goals, describe, write_comparison

    runs = [read_run(run) for run in args.runs]
    measured = [run.measurements for run in runs]
    goals = Goals(
        lowest_common_loss(measured) if args.loss is None else args.loss,
        highest_common_accuracy(measured) if args.accuracy is None else args.accuracy,
    )
    timed = [with_times(run, *goals) for run in measured]
    print(describe(timed, goals, subject="run", clock="training time"))
    unit = unit_of_time(runs)
    if unit == MIXED:
        virtual = ", ".join(run.label for run in runs if run.record.simulated is not None)
        console.say(
            LOGGER, f"note: times and images/s of {virtual} are in virtual time, those of the other runs in real time"
        )
    print(describe_differences(runs))
    if folder:
        write_comparison(folder, timed, goals, unit_of_time=unit)
        print(f"picture: {folder / PICTURE}")
    return 0


def unit_of_time(runs: Sequence[ComparedRun]) -> str:
    """Return the unit of the figure's times, of runs in real time, in virtual time or in either."""
    is_virtual = {run.record.simulated is not None for run in runs}
    return MIXED if len(is_virtual) > 1 else "virtual second" if is_virtual == {True} else "second"


def read_run(uri: str) -> ComparedRun:
    """Read the configuration and the log of a run, finished or not. Raises DataError if it is missing or damaged."""
    from trainer.comparison.measurements import measure
    from trainer.runlog.read import read_pushes
    from trainer.runlog.result import Result, summarise
    from trainer.runlog.thinned import thinned_log

    place = place_of(uri)
    with unreadable_is_data_error(uri):
        try:
            record = read_record(place)
        except FileNotFoundError:
            raise DataError(f"{place} has no {CONFIG}: it is not the folder of a run") from None
        except (KeyError, TypeError, ValueError, UsageError) as error:  # UsageError: a value of another version
            raise DataError(f"{place / CONFIG} is damaged, or of another version ({error})") from None
        # From the log and not from result.json, which an unfinished run does not have.
        events = thinned_log(place / METRICS)
        summary = summarise(events, read_pushes(place / PUSHES))
    result = build(Result, summary | {"output": place})
    return ComparedRun(uri, record, measure(uri, record.config, result, events))


def describe_differences(runs: Sequence[ComparedRun]) -> str:
    """Return a table of the settings that differ between runs, a row per setting and a column per run."""
    settings = [_settings(run.record) for run in runs]
    names = list(dict.fromkeys(name for each in settings for name in each))
    rows = [(name, *(each.get(name, "-") for each in settings)) for name in names]
    different = [row for row in rows if len(set(row[1:])) > 1]
    if not different:
        return "The runs have the same settings."
    return table(different, ("setting", *(run.label for run in runs)), right=(), indent="  ")


def _settings(record: RunRecord) -> dict[str, str]:
    """Return the settings of a run by name: of its shards, and every flag that has a value."""
    from trainer.report.settings import flags_in_words

    flags = flags_in_words(record.config.to_json(), record.simulated or {})
    shards = {
        "workers": str(record.num_workers),
        "rows": f"{record.rows:,}",
        "digest of the shards": record.shards[:12],
    }
    return shards | {row.flag: str(row.value) for row in flags if row.flag not in SAME_BY_NATURE}
