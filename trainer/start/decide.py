"""The decision about a start, before the run's folder is locked: its rows, and its workers."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.core.errors import UsageError
from trainer.config import Config
from trainer.context import RunContext
from trainer.data.bare_shards import describe_bare
from trainer.exchange.all_reduce import adds_by_torch
from trainer.home.place import Place
from trainer.options import Options
from trainer.regroup import confirm, describe_cohorts, regrouped
from trainer.runlog.run_record import SavedRun, saved_run


@dataclass(frozen=True)
class RunStart:
    """A start of a run on real processes.

    Attributes:
        requested: the run that the start asks for, pinned to the generation of its set.
        context: the same run with the history of its shares and the cohorts of its workers, as it is trained.
        options: how this host takes part.
    """

    requested: RunContext
    context: RunContext
    options: Options

    def confirm(self, saved: SavedRun) -> None:
        """Raise UsageError if the run has changed since the decision.

        saved: the run in the folder, which is locked now."""
        confirm(self.context, regrouped(self.requested, saved, self.options.workers, self.options))


def decide_start(config: Config, home: Place, options: Options) -> RunStart:
    """Open the set of a run, and decide with which rows and workers a start begins or continues it.

    Args:
        config: the run.
        home: its folder.
        options: how this host takes part.
    Raises:
        UsageError: an invalid value, or a run that the start cannot continue.
        DataError: damaged shards, or a damaged folder.
    """
    context = RunContext.open(config, home)
    saved = saved_run(home, overwrite=options.overwrite)
    requested = context.pinned(saved)
    context = regrouped(requested, saved, options.workers, options)
    if options.addresses and context.config.data.mix != config.data.mix:
        raise UsageError(
            f"--mix {config.data.mix}: hosts that are started by hand may see different checkpoints; give the shares so far,"
            f" '{context.config.data.mix}'"
        )
    _check_workers(context, options)
    return RunStart(requested, context, options)


def check_encryption(config: Config, *, has_several_hosts: bool) -> None:
    """Raise UsageError if gradients between hosts should be encrypted by an exchange that does not."""
    if has_several_hosts and adds_by_torch(config.exchange) and config.processes.encryption == "on":
        raise UsageError(
            "--collective torch does not encrypt gradients between hosts: give --encryption off too, on networks that you"
            " trust, or --collective mesh"
        )


def print_start(start: RunStart) -> None:
    """Print what is special about a run, unless the options say quiet: changed workers, shards without a manifest."""
    context = start.context
    if start.options.quiet or start.options.silent:
        return
    if context.config.cohorts.entries:
        print(describe_cohorts(context), flush=True)
    if context.shards.is_bare:
        print(describe_bare(context.shards), flush=True)


def _check_workers(context: RunContext, options: Options) -> None:
    """Raise UsageError if a start asks for workers that it cannot have."""
    cohorts = context.config.cohorts
    # Each host would choose a checkpoint for itself.
    if cohorts.entries and options.addresses:
        raise UsageError(
            f"{context.home} has changed its workers or its mini-batch, last at version {cohorts.present.version},"
            " which hosts that are started by hand cannot agree on: leave out --addresses and --roles"
        )
    if options.workers not in (None, context.num_workers):
        # Resharding reads a manifest.
        command = "shard" if context.shards.is_bare else "reshard"
        raise UsageError(
            f"--workers {options.workers}: a run begins with a worker per shard, {context.num_workers}; with --resume it"
            f" continues with another number, and sharding {command} --workers {options.workers} makes other shards"
        )
