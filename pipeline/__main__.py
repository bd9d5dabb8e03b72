"""``python -m pipeline COMMAND``: the commands that need no spark-submit.

A command is a module with ``main(argv) -> None`` that raises pipeline.core.errors; COMMANDS names them all.
Exit codes: 0 done, 1 the run failed or was interrupted, 2 the command line is wrong, 3 the data is.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from pipeline.core.command_line import run_chosen
from pipeline.core.program import execute

COMMANDS = {
    "fetch": ("pipeline.datasets.cifar", "download CIFAR-10 or CIFAR-100 to a local folder, HDFS or S3"),
    "sample": ("pipeline.datasets.synthetic", "write a small generated data set in CIFAR-10's binary layout"),
    "derive": ("pipeline.datasets.derive", "write a smaller or badly ordered copy of a data set, for studies"),
    "shard": ("pipeline.runs.command", "shard images by any strategy, by default on all cores of this machine"),
    "reshard": ("pipeline.runs.reshard_command", "divide a committed set among another number of workers"),
    "assign": ("pipeline.runs.assign_command", "assign images to workers by any strategy, without writing shards"),
    "materialize": ("pipeline.runs.materialize_command", "write the shards of an assignment"),
    "compare": ("pipeline.runs.compare", "shard an input by every strategy, and compare the sets"),
    "stream": ("pipeline.stream.command", "shard a stream of files or messages, by generations"),
    "plan": ("pipeline.runs.plan_command", "estimate the time and memory of a sharding run before it starts"),
    "formats": ("pipeline.input.formats_command", "list the formats of --input"),
    "strategies": ("pipeline.strategies.strategies_command", "list the strategies of --strategy"),
    "doctor": ("pipeline.doctor.command", "check versions, permissions, free space, clocks and Kerberos tickets"),
    "inspect": ("pipeline.upkeep.contents", "show the contents of a committed set"),
    "verify": ("pipeline.upkeep.verify", "compare the files of a committed set with its manifest"),
    "clean": ("pipeline.upkeep.clean", "list and delete the leftovers of killed runs"),
    "zip": ("pipeline.spark.package", "write pipeline and trainer as one zip file, for spark-submit --py-files"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code; every foreseen error is one line on stderr."""
    summaries = {name: summary for name, (_, summary) in COMMANDS.items()}
    return run_chosen("python -m pipeline", summaries, run, argv)


def run(command: str, arguments: list[str]) -> NoReturn:
    """Run a command of this package, and exit with its code."""
    module, _ = COMMANDS[command]

    def main() -> int:
        import_module(module).main(arguments)  # imported late: a command loads only what it uses
        return 0

    execute(main, interrupted="run the command again to continue")


if __name__ == "__main__":
    sys.exit(main())
