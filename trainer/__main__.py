"""``python -m trainer``: train a model on committed shards with worker, server and evaluator processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline import command_line
from trainer.config import Config
from trainer.flags import config_of, flags, options_of
from trainer.launch.processes import preload
from trainer.options import Options, Role
from trainer.plan import check_shares
from trainer.runlog.run_folder import Run, Start, settle

INTERRUPTED = "the same command with --resume goes on from the last checkpoint"


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit code. Raises UsageError, DataError and JobError."""
    args = command_line.parse(flags(), argv)
    config, options = config_of(args), options_of(args)
    if options.has(Role("server", 0)) and _is_finished(config, options):
        return 0
    preload()
    from trainer.launch.supervisor import run

    return run(config, options)


def _is_finished(config: Config, options: Options) -> bool:
    """Whether there is nothing left to do; if there is, the folder is ready for it. Raises UsageError and DataError."""
    from trainer.data.shards import open_shards  # takes a second to load

    output = Path(config.output)
    shards = open_shards(config.shards)
    options.roles_of(config.servers, shards.num_workers)
    check_shares(config, shards.num_workers)
    start = settle(output, Run.of(config, shards), resume=options.resume, overwrite=options.overwrite)
    if start is Start.FINISHED:
        print(f"{output}: finished already, nothing to do; a larger --epochs or --steps with --resume goes on")
    if start is Start.NEW and options.resume:
        print(f"{output}: holds no run to go on with, so one is started")
    return start is Start.FINISHED


if __name__ == "__main__":
    command_line.execute(main, interrupted=INTERRUPTED)
