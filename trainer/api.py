"""``trainer.train``: the Python API of the trainer, which its command line calls too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pipeline.core.errors import UsageError
from trainer.config import Config
from trainer.home.place import place_of
from trainer.launch.open_files import check_limit, raise_limit
from trainer.launch.processes import FORK_SERVER
from trainer.options import Options, Role
from trainer.plan import check_shares
from trainer.run_files import REPORT
from trainer.runlog.run_folder import RunRecord, Start, saved_generation, settled

if TYPE_CHECKING:
    from trainer.cluster.launcher import Launcher
    from trainer.runlog.result import Result


def train(
    config: Config, options: Options | None = None, *, launcher: Launcher | None = None, hosts: int = 1
) -> Result | None:
    """Train a model on committed shards, with workers, servers and an evaluator on this host; blocks until the end.

    Returns the result, read from the run's folder; None on a host without server 0, which leads the run. A finished run
    is not trained again. Processes are forked from a server process that imports torch once and stays for the next
    call; a program that calls this needs no ``if __name__ == "__main__"``.

    Args:
        config: the run.
        options: how this host takes part (default: all roles run here, and progress is printed).
        launcher: starts the processes on hosts of a cluster instead.
        hosts: number of these hosts.
    Raises:
        UsageError: an invalid value, or a folder with another run.
        DataError: damaged shards.
        JobError: the run failed, or was interrupted by Ctrl-C or SIGTERM; the same call with Options(resume=True)
            resumes it.
    """
    options = options or Options()
    config = pinned(config, overwrite=options.overwrite)
    if launcher:
        return _train_on(launcher, hosts, config, options)
    raise_limit()  # before the fork server starts, because its children inherit its limit
    with _settled(config, options) if options.has(Role("server", 0)) else nullcontext(Start.GO_ON) as start:
        if start is Start.FINISHED:
            from trainer.runlog.result import read_result  # loads pandas, which --help should not

            return read_result(place_of(config.run.output))
        from trainer.launch.run import run

        FORK_SERVER.ensure()
        FORK_SERVER.losses.clear()  # losses between two runs do not count
        return run(config, options)


def _train_on(launcher: Launcher, hosts: int, config: Config, options: Options) -> Result:
    """Train on a cluster. This process manages the run's folder and computes nothing."""
    from trainer.cluster.launcher import share_roles
    from trainer.cluster.run import ClusterRun
    from trainer.data.shards import open_shards
    from trainer.launch.ends import announce, interruptible
    from trainer.runlog.result import read_result

    parts = share_roles(config.processes.servers, open_shards(config.data.shards).num_workers, hosts)
    run = ClusterRun(config, options, launcher, parts)
    # The folder is changed only after run.start has found that the parts can train the run.
    with interruptible(run), _settled(config, options, run.start, run.lose) as start, closing(run):
        if start is not Start.FINISHED:
            run.train()
    result = read_result(place_of(config.run.output))
    if start is not Start.FINISHED:
        page = result.output / REPORT
        announce(result, options, page if options.report and page.exists() else None)
    return result


def pinned(config: Config, *, overwrite: bool = False) -> Config:
    """Return the configuration of a run on a growing set with the generation at which it begins.

    That is the newest one, or for a resumed run its original one. Other configurations are returned unchanged. Raises
    UsageError and DataError."""
    from pipeline.core.shardset.generations import generations
    from trainer.data.shards import open_shards

    made = generations(open_shards(config.data.shards)) if config.data.generation is None else []
    if config.data.follow and config.data.generation is None and not made:
        raise UsageError(f"--follow: {config.data.shards} was made at once, by no stream; leave it out")
    if not made:
        return config
    saved = None if overwrite else saved_generation(place_of(config.run.output))
    return replace(config, data=replace(config.data, generation=len(made) - 1 if saved is None else saved))


@contextmanager
def _settled(
    config: Config,
    options: Options,
    check: Callable[[RunRecord], RunRecord] | None = None,
    lost: Callable[[], object] = lambda: None,
) -> Iterator[Start]:
    """Yield the kind of start, with the run's folder prepared and locked. Raises as ``settled`` does."""
    from trainer.data.shards import open_pinned  # takes a second to load

    output = place_of(config.run.output)
    shards = open_pinned(config.data)
    if check is None:  # otherwise other hosts run the roles
        roles = options.roles_of(config.processes.servers, shards.num_workers)
        check_limit(roles, config.processes.servers, shards.num_workers)
    check_shares(config, shards.num_workers, shards.ratios)
    record = RunRecord.of(config, shards)
    check = check or partial(_check, options)
    with settled(output, record, resume=options.resume, overwrite=options.overwrite, check=check, lost=lost) as start:
        if start is Start.FINISHED and not options.silent:
            print(f"{output}: finished already, nothing to do; a larger --epochs or --steps with --resume goes on")
        if start is Start.FINISHED and options.report and not (output / REPORT).exists():
            from trainer.launch.ends import try_report  # its report failed before

            try_report(output)
        if start is Start.NEW and options.resume and not options.silent:
            print(f"{output}: holds no run to go on with, so one is started")
        yield start


def _check(options: Options, record: RunRecord) -> RunRecord:
    """Return the record of a run that this host can compute. Raises UsageError for others."""
    FORK_SERVER.ensure()
    from trainer.launch.run import check

    check(record.config, options)
    return record
