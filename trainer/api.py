"""``trainer.train``: the Python API of the trainer, which its command line calls too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from pipeline.core import console
from pipeline.core.metrics_file import check_metrics_file
from trainer.config import Config
from trainer.home.place import place_of
from trainer.launch.workers_request import Requests
from trainer.options import Options, Role

if TYPE_CHECKING:
    from trainer.cluster.launcher import Launcher
    from trainer.report.metrics import RunMetrics
    from trainer.runlog.result import Result

BY_HAND = "its hosts are started by hand: end it, and start it with --resume --workers on one host"


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
    # Here, because they load pyarrow and the transport, which --help should not.
    from trainer.start.changes import start_until_end
    from trainer.start.decide import check_encryption, decide_start, print_start
    from trainer.start.here import train_here
    from trainer.start.on_cluster import train_on_cluster

    options = options or Options()
    home = place_of(config.run.output)
    requests = Requests(home, BY_HAND if options.addresses else "")
    check_encryption(config, has_several_hosts=launcher is not None or bool(options.addresses))

    def start(options: Options) -> Result | None:
        """Train until the end of the run, or until its workers are to change."""
        decided = decide_start(config, home, options)
        print_start(decided)
        if launcher:
            return train_on_cluster(decided, launcher, hosts - requests.departed_hosts, requests, metrics)
        return train_here(decided, requests, metrics)

    with served_metrics(options) as metrics:
        return start_until_end(start, options, requests)


@contextmanager
def served_metrics(options: Options) -> Iterator[RunMetrics | None]:
    """Serve the metrics of a run on the host that leads it, and write their file at its end. Yields them, or None.

    None without --metrics-port and --metrics-file. A file that cannot be written costs a warning. Raises UsageError."""
    if not (options.metrics_port or options.metrics_file) or not options.has(Role("server", 0)):
        yield None
        return
    if options.metrics_file:
        check_metrics_file(options.metrics_file)
    # Here, because they load the transport and tqdm, which --help should not.
    from trainer.report.metrics import RunMetrics, serve_metrics, write_metrics
    from trainer.report.progress import LOGGER

    metrics = RunMetrics()
    with ExitStack() as stack:
        if options.metrics_port:
            address = stack.enter_context(serve_metrics(metrics, options.metrics_port))
            if not options.silent:
                console.say(LOGGER, f"metrics: {address}")
        try:
            yield metrics
        finally:
            if options.metrics_file and metrics.output:
                try:
                    write_metrics(metrics, options.metrics_file)
                except (OSError, ValueError) as error:
                    console.say(LOGGER, f"warning: --metrics-file {options.metrics_file}: {error}", level="warning")
