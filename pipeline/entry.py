"""``sharding COMMAND``: the commands of ``python -m pipeline`` and of the trainer, wherever it is installed.

Neither Spark nor torch is imported before the command is known. The command decides the exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from pipeline import __main__ as pipeline_commands
from pipeline.core import command_line
from pipeline.core.program import execute
from pipeline.core.provenance import installed_version

COMMANDS = {
    **{name: summary for name, (_, summary) in pipeline_commands.COMMANDS.items()},
    "train": "train a model on a committed shard set",
    "workers": "change the number of workers of a training run in progress",
    "simulate": "train in virtual time in a single process",
    "predict": "predict the class of every image with a trained model",
    "export": "write a trained model or a shard set for other programs: ONNX, Hugging Face Hub, WebDataset and others",
    "report": "make the report of a shard set or of a run anew",
    "runs": "compare training runs in a table and a figure",
    "topology": "show the matchings, weights and traffic of a topology of workers",
    "embed": "compute vectors of images, for --embedding of the sharding jobs",
    "benchmark": "compare Spark MLlib and the parameter server, per mini-batch and until convergence",
    "study": "train several configurations with many seeds, and compare them",
}
PROGRAMS = {
    "train": "trainer.__main__",
    "workers": "trainer.workers_command",
    "simulate": "trainer.simulate",
    "predict": "trainer.inference.__main__",
    "export": "trainer.export.__main__",
    "report": "trainer.report_command",
    "runs": "trainer.comparison.__main__",
    "topology": "trainer.topology.__main__",
    "embed": "trainer.embed.__main__",
    "benchmark": "trainer.benchmark.__main__",
    "study": "trainer.study.__main__",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code; every foreseen error is one line on stderr."""
    return command_line.run_chosen("sharding", COMMANDS, _run, argv, version=f"sharding {installed_version()}")


def _run(command: str, arguments: list[str]) -> NoReturn:
    if command in PROGRAMS:
        _run_trainer(command, arguments)
    pipeline_commands.run(command, arguments)


def _run_trainer(command: str, argv: Sequence[str]) -> NoReturn:
    """Run a command of the trainer, and exit with its code."""
    program: Any = import_module(PROGRAMS[command])
    execute(lambda: int(program.main(argv)), interrupted=program.INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
