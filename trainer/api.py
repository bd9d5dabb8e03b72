"""``trainer.train``: the Python API of the trainer, which its command line calls too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pipeline.core.errors import JobError, UsageError
from trainer.config import Config
from trainer.context import RunContext
from trainer.exchange.all_reduce import adds_by_torch
from trainer.exchange.neighbours import NeighbourExchange
from trainer.home.work import working
from trainer.launch.open_files import check_limit, raise_limit
from trainer.launch.processes import FORK_SERVER
from trainer.launch.workers_request import Requests
from trainer.options import Options, Role
from trainer.plan import check_shares
from trainer.regroup import confirm, describe_cohorts, regrouped
from trainer.run_files import REPORT
from trainer.runlog.run_folder import RunRecord, Start, saved_run, settled

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
    by_hand = "its hosts are started by hand: end it, and start it with --resume --workers on one host"
    requests = Requests(RunContext.from_config(config).home, by_hand if options.addresses else "")
    while True:
        try:
            return _train(config, options, requests, launcher=launcher, hosts=hosts)
        except JobError as error:
            following = _continued(error, options, requests)
            if following is None:
                raise
            options = following


def _continued(error: JobError, options: Options, requests: Requests) -> Options | None:
    """Return the options with which a run continues whose workers are to change; None if it has ended.

    Args:
        error: the error with which this start has ended.
        options: its options.
        requests: the requests of other workers.
    """
    from trainer.launch.supervisor import RunInterruptedError  # loads the transport, which --help should not

    saved = saved_run(requests.home)
    present = saved.num_workers if saved else None
    if isinstance(error, RunInterruptedError) and error.changes:
        request = requests.take()
        return replace(
            options,
            resume=True,
            overwrite=False,
            workers=request.workers if request else present,
            batch_size_given=False,
        )
    if not isinstance(error, UsageError) or requests.tried is None:
        return None
    # The start that should have these workers has changed nothing.
    requests.refuse(str(error))
    if not options.silent:
        print(f"the workers stay as they are: {error}", file=sys.stderr, flush=True)
    return replace(options, workers=present)


def _train(
    config: Config, options: Options, requests: Requests, *, launcher: Launcher | None, hosts: int
) -> Result | None:
    """Train until the end, or until the workers are to change. Returns and raises as ``train``."""
    has_several_hosts = launcher is not None or bool(options.addresses)
    if has_several_hosts and adds_by_torch(config.exchange) and config.processes.encryption == "on":
        raise UsageError(
            "--collective torch does not encrypt gradients between hosts: give --encryption off too, on networks that you"
            " trust, or --collective mesh"
        )
    context = RunContext.from_config(config).pinned(overwrite=options.overwrite).mixed(overwrite=options.overwrite)
    if options.addresses and context.config.data.mix != config.data.mix:
        raise UsageError(
            f"--mix {config.data.mix}: hosts that are started by hand may see different checkpoints; give the shares so far,"
            f" '{context.config.data.mix}'"
        )
    look = partial(regrouped, context, options.workers, options)
    context = look()
    _check_workers(context, options)
    if context.config.cohorts.entries and not (options.quiet or options.silent):
        print(describe_cohorts(context), flush=True)
    if context.shards.is_bare and not (options.quiet or options.silent):
        from trainer.data.bare_shards import describe_bare

        print(describe_bare(context.shards), flush=True)
    if launcher:
        return _train_on(launcher, hosts, context, options, look, requests)
    raise_limit()  # before the fork server starts, because its children inherit its limit
    leads = options.has(Role("server", 0))
    with _locked_start(context, options, look) if leads else nullcontext(Start.GO_ON) as start:
        requests.meet()
        if start is Start.FINISHED:
            from trainer.runlog.result import read_result  # loads pandas, which --help should not

            return read_result(context.home)
        from trainer.launch.run import run

        FORK_SERVER.ensure()
        FORK_SERVER.losses.clear()  # losses between two runs do not count
        with working(context.home, leads=leads) as work:
            return run(context, options, work, requests)


def _check_workers(context: RunContext, options: Options) -> None:
    """Raise UsageError if a start asks for workers that it cannot have."""
    config = context.config
    # Each host would choose a checkpoint for itself.
    if config.cohorts.entries and options.addresses:
        raise UsageError(
            f"{context.home} has changed its workers or its mini-batch, last at version {config.cohorts.present.version},"
            " which hosts that are started by hand cannot agree on: leave out --addresses and --roles"
        )
    num_workers = config.num_workers(context.shards.num_workers)
    if options.workers not in (None, num_workers):
        raise UsageError(
            f"--workers {options.workers}: a run begins with a worker per shard, {num_workers}; with --resume it continues"
            f" with another number, and jobs/reshard.py --workers {options.workers} makes other shards"
        )


def _train_on(
    launcher: Launcher,
    hosts: int,
    context: RunContext,
    options: Options,
    look: Callable[[], RunContext],
    requests: Requests,
) -> Result:
    """Train on a cluster. This process manages the run's folder and computes nothing. Raises as ``train`` does.

    Args:
        launcher: starts the parts.
        hosts: number of hosts, each of which gets a part of the roles.
        context, options, look: see ``_locked_start``.
        requests: may stop the run, which continues with other workers then.
    """
    from trainer.cluster.launcher import share_roles
    from trainer.cluster.run import ClusterRun
    from trainer.launch.ends import announce, interruptible
    from trainer.runlog.result import read_result

    num_workers = context.config.num_workers(context.shards.num_workers)
    parts = share_roles(context.config.processes.servers, num_workers, hosts)
    run = ClusterRun(context.config, options, launcher, parts, requests)
    # The folder is changed only after run.start has found that the parts can train the run.
    with interruptible(run), _locked_start(context, options, look, run.start, run.lose) as start, closing(run):
        requests.meet()
        if start is not Start.FINISHED:
            run.train()
    result = read_result(context.home)
    if start is not Start.FINISHED:
        page = result.output / REPORT
        announce(result, options, page if options.report and page.exists() else None)
    return result


@contextmanager
def _locked_start(
    context: RunContext,
    options: Options,
    look: Callable[[], RunContext],
    check: Callable[[RunRecord], RunRecord] | None = None,
    on_lost: Callable[[], object] = lambda: None,
) -> Iterator[Start]:
    """Yield the kind of start, with the run's folder prepared and locked. Prints why nothing is trained, if so.

    Args:
        context, options: the run, and how this host takes part.
        look: returns the context again, as the folder is when it is called.
        check: called before the folder is changed; returns the record of the run, or raises if it cannot be trained
            (default: check on this host).
        on_lost: called if another start takes the folder, because this one was frozen and considered dead.

    Raises:
        UsageError, DataError, JobError: as in ``train``.
    """
    config = context.config
    output = context.home
    shards = context.shards
    num_workers = config.num_workers(shards.num_workers)
    if check is None:  # otherwise other hosts run the roles
        roles = options.roles_of(config.processes.servers, num_workers)
        check_limit(roles, config.processes.servers, num_workers)
    check_shares(config, num_workers, shards.ratios_of(num_workers))
    config.exchange.check(num_workers, config.run.seed)
    if isinstance(config.exchange, NeighbourExchange):
        from trainer.leader.peer_members import check_view  # loads the transport, which --help should not

        check_view(config.exchange, num_workers, config.run.seed)
    record = RunRecord.from_config(config, shards)
    check_run = check or partial(_check, context, options)

    def check_all(record: RunRecord) -> RunRecord:
        confirm(context, look)
        return check_run(record)

    with settled(
        output, record, resume=options.resume, overwrite=options.overwrite, check=check_all, on_lost=on_lost
    ) as start:
        if start is Start.FINISHED and not options.silent:
            print(f"{output}: finished already, nothing to do; a larger --epochs or --steps with --resume continues")
        if start is Start.FINISHED and options.report and not (output / REPORT).exists():
            from trainer.launch.ends import try_report  # its report failed before

            try_report(output)
        if start is Start.NEW and options.resume and not options.silent:
            print(f"{output} holds no run to resume; a new run starts")
        yield start


def _check(context: RunContext, options: Options, record: RunRecord) -> RunRecord:
    """Return the unchanged record of a run that this host can train.

    Raises UsageError, DataError or JobError if it cannot."""
    FORK_SERVER.ensure()
    from trainer.launch.run import check

    check(context, options)
    return record
