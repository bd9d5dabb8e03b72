"""A start of a run on this host, with all roles or with those that the options name."""

from __future__ import annotations

from contextlib import nullcontext

from trainer.home.work import working
from trainer.launch.fork_server import FORK_SERVER
from trainer.launch.open_files import check_limit, raise_limit
from trainer.launch.run import check, read_secret, run
from trainer.launch.supervisor import LEADER
from trainer.launch.workers_request import Requests
from trainer.report.metrics import RunMetrics
from trainer.runlog.result import Result, read_result
from trainer.runlog.run_folder import Start
from trainer.runlog.run_record import RunRecord
from trainer.start.decide import RunStart
from trainer.start.folder import locked_start
from trainer.transport.addresses import check_addresses


def train_here(start: RunStart, requests: Requests, metrics: RunMetrics | None) -> Result | None:
    """Train on this host until its part of the run is over. Returns and raises as ``train`` does.

    requests: may stop the run, which continues with other workers then. metrics: of this process, with
    --metrics-port."""
    context = start.context
    servers = context.config.processes.servers
    raise_limit()  # before the fork server starts, because its children inherit its limit
    roles = start.options.roles_of(servers, context.num_workers)
    # Before any process of a role starts: the number of connections grows with the workers, and without descriptors a
    # server would fail in the middle of the run.
    check_limit(roles, servers, context.num_workers)
    # Before an old run in the folder is deleted.
    if start.options.addresses:
        check_addresses(start.options.addresses, servers)
    secret = read_secret(context.config, start.options)

    def check_here(record: RunRecord) -> RunRecord:
        FORK_SERVER.ensure()
        check(context, start.options)
        return record

    leads = LEADER in roles
    with locked_start(start, check_here) if leads else nullcontext(Start.RESUME) as kind:
        requests.meet()
        if kind is Start.FINISHED:
            return read_result(context.home)
        FORK_SERVER.ensure()
        FORK_SERVER.losses.clear()  # losses between two runs do not count
        with working(context.home, leads=leads) as work:
            return run(context, roles, start.options, secret, work, requests, metrics)
