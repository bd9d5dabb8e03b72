"""A start of a run on the hosts of a cluster: this process manages the run's folder and computes nothing."""

from __future__ import annotations

from contextlib import closing

from trainer.cluster.launcher import Launcher, share_roles
from trainer.cluster.run import ClusterRun
from trainer.launch.workers_request import Requests
from trainer.lifecycle.ends import announce
from trainer.lifecycle.interruption import RunInterruptedError, interruptible
from trainer.report.metrics import RunMetrics
from trainer.run_files import REPORT
from trainer.runlog.result import Result, read_result
from trainer.runlog.run_folder import Start
from trainer.start.decide import RunStart
from trainer.start.folder import locked_start


def train_on_cluster(
    start: RunStart, launcher: Launcher, hosts: int, requests: Requests, metrics: RunMetrics | None
) -> Result:
    """Train on a cluster until the run is over. Raises as ``train`` does.

    Args:
        start: the start.
        launcher: starts the parts.
        hosts: number of hosts, each of which gets a part of the roles.
        requests: may stop the run, which continues with other workers then.
        metrics: of this process, with --metrics-port.
    """
    context = start.context
    options = start.options
    parts = share_roles(context.config.processes.servers, context.num_workers, hosts)
    run = ClusterRun(context.config, options, launcher, parts, requests, metrics=metrics)
    cause = "failed"
    try:
        # The folder is changed only after run.start has found that the parts can train the run.
        with interruptible(run), locked_start(start, run.start, run.lose) as kind, closing(run):
            requests.meet()
            if kind is not Start.FINISHED:
                run.train()
        cause = "finished"
    except RunInterruptedError as error:
        cause = "interrupted"
        # A signal may have come since the error was raised, while the parts ended.
        error.changes = error.changes and not run.is_to_end
        raise
    finally:
        if metrics:
            metrics.end(cause)
    result = read_result(context.home)
    if kind is not Start.FINISHED:
        page = result.output / REPORT
        announce(result, options, page if options.report and page.exists() else None)
    return result
