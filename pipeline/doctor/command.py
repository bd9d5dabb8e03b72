"""``python -m pipeline doctor``: checks whether a run can succeed here, before it starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pipeline.core import command_line
from pipeline.core.program import execute
from pipeline.doctor.checks import as_json, format_checks, has_failed

WAIT_S = 60.0


def seconds(text: str) -> float:
    """Return the value of --wait. Raises ArgumentTypeError if it is out of range."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds up to 3600")
    return value


def main(argv: Sequence[str]) -> None:
    """Check versions, permissions, free space, clocks and Kerberos tickets; exit code 1 if a check fails."""
    flags = command_line.parser("python -m pipeline doctor", main.__doc__, "")
    flags.add_argument("--input", metavar="URI", help="input of a run, of which a byte is read")
    flags.add_argument("--output", metavar="URI", help="output of a run, where test files are written and deleted")
    flags.add_argument(
        "--master",
        metavar="MASTER",
        help="Spark master whose executors are checked too: local[2], spark://host:port or yarn",
    )
    flags.add_argument(
        "--wait",
        type=seconds,
        default=WAIT_S,
        metavar="SECONDS",
        help="seconds to wait for each answer (default: %(default)g)",
    )
    flags.add_argument("--json", action="store_true", help="print the checks as a JSON object")

    def run() -> int:
        args = command_line.parse(flags, argv)
        from pipeline.doctor.examine import Examination  # loads Spark

        checks = Examination(args.input, args.output, args.wait).examine(args.master)
        print(as_json(checks) if args.json else format_checks(checks))
        return 1 if has_failed(checks) else 0

    execute(run, interrupted="run it again")
