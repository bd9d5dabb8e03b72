"""The metrics of a run for Prometheus, an optional package: an HTTP endpoint that a server scrapes, and a file of its end.

The numbers come from the status and the log, which the leading process reads for its progress line anyway: workers and
servers do no work for them. The names follow Prometheus's conventions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import UsageError
from pipeline.core.extras import require
from pipeline.core.provenance import CREDENTIALS, HIDDEN
from trainer.exchange import EXCHANGES, Exchange
from trainer.exchange.neighbours import NeighbourExchange
from trainer.plan import FLOAT_BYTES
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.evaluation import EvaluationEvent
from trainer.runlog.kinds.peers import ConsensusEvent
from trainer.runlog.kinds.run import RestartEvent, RollbackEvent, StageEvent, StartEvent
from trainer.runlog.kinds.training import TrainEvent
from trainer.transport.addresses import bracketed
from trainer.transport.status import NOT_READY, RunStatus

if TYPE_CHECKING:
    from trainer.config import Config, RunFacts

Totals = dict[str, dict[str, int]]
PREFIX = "sharding_training"
EVERYWHERE = "0.0.0.0"
STATES = ("starting", "running", "finished", "interrupted", "failed")
ROLES = ("worker", "server", "evaluator", "fork server", "host")  # processes that a run starts again

# name, help, value of a status ("its"): None if it is not measured yet
GAUGES: tuple[tuple[str, str, Callable[[RunStatus], float | None]], ...] = (
    ("version", "Updates of the parameters so far; a roll-back makes it smaller.", lambda its: its.version),
    ("epoch", "Global epochs so far.", lambda its: its.epoch),
    ("epochs", "Global epochs of the whole run.", lambda its: its.epochs),
    ("pushes_planned", "Accepted pushes of the whole run; with downpour, their mini-batches.", lambda its: its.total),
    ("time_seconds", "Training time so far, over all starts of the run.", lambda its: its.seconds),
    ("workers_present", "Workers that take part at present.", lambda its: its.alive),
    ("workers", "Workers of the run.", lambda its: its.num_workers),
    ("loss", "Mean loss of the examples of the last second.", lambda its: its.loss),
    ("accuracy_ratio", "Share of these examples that were predicted correctly.", lambda its: its.accuracy),
    ("staleness_mean_updates", "Mean staleness of the pushes of the last second.", lambda its: its.staleness_mean),
    ("staleness_max_updates", "Greatest staleness of the pushes of the last second.", lambda its: its.staleness_max),
    ("evaluation_loss", "Loss on the evaluation rows, newest evaluation.", lambda its: its.eval_loss),
    ("evaluation_accuracy_ratio", "Accuracy on the evaluation rows, newest evaluation.", lambda its: its.eval_accuracy),
    ("evaluation_epoch", "Epoch of the newest evaluation.", lambda its: its.eval_epoch),
)


def parse_endpoint(text: str) -> tuple[str, int]:
    """Parse a port, or an address of this host and a port, such as ``127.0.0.1:9400``. Raises UsageError."""
    match = re.fullmatch(r"(?:(\[[\da-fA-F:]+\]|[\w.-]+):)?(\d{1,5})", text)
    if not match or int(match[2]) > 65_535:
        raise UsageError(f"--metrics-port {text!r} is not a port from 0 to 65535, or an address and a port")
    return (match[1] or EVERYWHERE).strip("[]"), int(match[2])


class RunMetrics:
    """The metrics of the runs of one process: what a scrape gets at any moment.

    A counter begins at 0 with the process, as Prometheus expects. It counts what has been computed, so work that is
    repeated after a roll-back counts again; the gauge of the version says how far the run is."""

    def __init__(self) -> None:
        self._status = NOT_READY
        self._state = STATES[0]
        # What the run had at the last look, so that only later work counts. None: not known before the next look.
        self._accepted: int | None = None
        self._version: int | None = None
        self._sent_bytes: int | None = None  # of an exchange among neighbours
        self._about: dict[str, str] = {}
        self._facts: RunFacts | None = None
        self._push_bytes = 0.0  # that a worker sends per push
        self._push_is_update = False
        self._counts: Counter[str] = Counter()
        self._restarts: Counter[str] = Counter({role: 0 for role in ROLES})
        self._reported: dict[int, Totals] = {}  # the newest totals by attempt of the leading host

    def begin(self, config: Config, facts: RunFacts, stage: int = 0) -> None:
        """Set the identity of the run that starts, or continues with other workers.

        stage: number of the stage in which it continues; the log will name only the stages that begin later."""
        self._about = {
            "output": CREDENTIALS.sub(f"{HIDDEN}@", config.run.output),
            "model": config.model.name,
            "exchange": config.exchange.name,
            "protocol": config.protocol.name,
        }
        self._facts = facts
        self._set_exchange(config.stage_configs()[stage].exchange)
        # A push of several mini-batches is an update of its own, and the status counts its mini-batches as accepted.
        self._push_is_update = config.protocol.most_local_steps() > 1
        self._status = NOT_READY
        self._state = "running"
        self._accepted = self._version = self._sent_bytes = None
        self._reported = {}

    def _set_exchange(self, exchange: Exchange) -> None:
        """Set the bytes per push of an exchange. Neighbours send models, which their own event counts."""
        if self._facts:
            vectors = exchange.pushed_vectors_per_gradient(self._facts.num_workers)
            has_pushes = not isinstance(exchange, NeighbourExchange)
            self._push_bytes = vectors * self._facts.elements * FLOAT_BYTES if has_pushes else 0.0

    @property
    def output(self) -> str:
        """The output of the run; "" before it begins."""
        return self._about.get("output", "")

    def update(self, status: RunStatus) -> None:
        """Take over a status of server 0."""
        if not status.ready:
            return
        updates = _growth(self._version, status.version)
        pushes = updates if self._push_is_update else _growth(self._accepted, status.accepted)
        self._counts["pushes"] += pushes
        self._counts["updates"] += updates
        self._counts["sent_bytes"] += round(pushes * self._push_bytes)
        self._accepted = status.accepted
        self._version = status.version
        self.show(status)

    def show(self, status: RunStatus) -> None:
        """Take over the gauges of a status, without counting."""
        if status.ready:
            self._status = status

    def totals(self) -> Totals:
        """Return the counters, as the leading host of a cluster reports them to the process that serves them."""
        return {"counts": dict(self._counts), "restarts": dict(self._restarts)}

    def add_totals(self, attempt: int, totals: Totals) -> None:
        """Add the growth of the leading host's counters. attempt: number of its start, with which they begin at 0."""
        before = self._reported.get(attempt, {})
        for name, counter in (("counts", self._counts), ("restarts", self._restarts)):
            counter.update(Counter(totals.get(name)) - Counter(before.get(name)))
        self._reported[attempt] = totals

    def add(self, event: LogEvent) -> None:
        """Take over an event of the run's log."""
        match event:
            # A new run has done nothing yet; a resumed one has, which its first status says.
            case StartEvent() if event.resumed_from is None:
                self._accepted = self._version = self._sent_bytes = 0
            case TrainEvent():
                self._counts["images"] += sum(worker["images"] or 0 for worker in event.workers)
            case EvaluationEvent():
                self._counts["evaluations"] += 1
            case RestartEvent():
                self.count_restart(event.role)
            case RollbackEvent():
                self._counts["rollbacks"] += 1
            case StageEvent():
                self._set_exchange(EXCHANGES[event.exchange]())
            case ConsensusEvent():
                self._counts["sent_bytes"] += _growth(self._sent_bytes, event.sent_bytes)
                self._sent_bytes = event.sent_bytes

    def count_restart(self, role: str) -> None:
        """Count a process that was started again. Unknown roles count as one, so that labels stay few."""
        self._restarts[role if role in ROLES else "other"] += 1

    def end(self, state: str) -> None:
        """Set the state with which the run has ended."""
        self._state = state

    def collect(self) -> Iterator[Any]:
        """Yield the families of metrics; the library calls this for every scrape, in a thread of its own."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        # Before the start of a run, for example while its folder is prepared, there is nothing but the state.
        if self._about:
            yield InfoMetricFamily(PREFIX, "The run that this process leads.", value=self._about)
        state = GaugeMetricFamily(f"{PREFIX}_state", "1 for the present state of the run.", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(name == self._state))
        yield state
        status = self._status
        for name, text, value_of in GAUGES if status.ready else ():
            value = value_of(status)
            if value is not None:
                yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=self._counts[name])
        restarts = CounterMetricFamily(f"{PREFIX}_restarts", "Processes that were started again.", labels=["role"])
        for role, count in sorted(self._restarts.items()):
            restarts.add_metric([role], count)
        yield restarts


COUNTERS: Mapping[str, str] = {
    "pushes": "Accepted pushes of gradients, or steps of workers with models of their own.",
    "updates": "Updates of the parameters.",
    "images": "Trained examples, as the log counts them about every second.",
    "evaluations": "Evaluations of checkpoints.",
    "rollbacks": "Returns of all servers to a checkpoint.",
    "sent_bytes": "Bytes of the gradients or models that workers have sent.",
}


def _growth(before: int | None, now: int) -> int:
    """Return by how much a number has grown; 0 if the earlier one is unknown, or greater, as before a roll-back."""
    return 0 if before is None else max(0, now - before)


@contextmanager
def serve_metrics(metrics: RunMetrics, endpoint: tuple[str, int]) -> Iterator[str]:
    """Yield the address at which metrics can be scraped within the ``with`` block.

    Raises UsageError if the package is missing or the port cannot be bound.

    endpoint: address and port; port 0: any free one."""
    require("metrics", "--metrics-port")
    from prometheus_client import CollectorRegistry, start_http_server

    host, port = endpoint
    registry = CollectorRegistry()  # without the library's own metrics of the process and of Python
    registry.register(metrics)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise UsageError(
            f"--metrics-port: {host}:{port} cannot be bound: {error.strerror or error}; choose another port"
        ) from None
    try:
        yield f"http://{bracketed(host)}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def write_metrics(metrics: RunMetrics, path: Path) -> None:
    """Replace the file of a run's metrics, atomically. Raises OSError.

    Each has the label ``output``, because the collector reads the files of several runs at once."""
    from prometheus_client import CollectorRegistry, write_to_textfile

    registry = CollectorRegistry()
    registry.register(_WithOutput(metrics))
    write_to_textfile(str(path), registry)


class _WithOutput:
    """Metrics of a run with the label ``output`` each."""

    def __init__(self, metrics: RunMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Any]:
        """Yield the families of metrics."""
        for family in self._metrics.collect():
            labels = {"output": self._metrics.output}
            family.samples = [sample._replace(labels=labels | sample.labels) for sample in family.samples]
            yield family
