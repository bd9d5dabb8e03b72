"""The part of one host in a run, as every launcher starts it.

It finds the other parts through the rendezvous. Its supervisor starts and watches its processes, and is replaced by a
new one whenever a server has moved."""

from __future__ import annotations

import os
import platform
import signal
import socket as sockets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.core.errors import JobError, UsageError
from pipeline.core.import_path import variables
from pipeline.core.program import unforeseen
from pipeline.core.storage.store import SETTINGS
from trainer.cluster.launcher import LaunchArguments, PartExecution, visible
from trainer.cluster.rendezvous import CHANGE, CHECKPOINT, DONE, GO, LEAVE, Answer, AttemptLostError, Line
from trainer.config import RunFacts
from trainer.context import RunContext
from trainer.home.segments import SupersededError
from trainer.home.work import WorkFolder, working
from trainer.launch.fork_server import FORK_SERVER
from trainer.launch.open_files import check_limit, raise_limit
from trainer.launch.overseer import Wanted
from trainer.launch.run import check, prepare, supervise
from trainer.launch.supervisor import Supervisor
from trainer.lifecycle.interruption import RunInterruptedError
from trainer.lifecycle.row_storage import host_reads, row_storage
from trainer.options import Options
from trainer.report.metrics import RunMetrics
from trainer.run_files import CONFIG
from trainer.transport.addresses import bracketed, interface_towards
from trainer.transport.sockets import Secret
from trainer.transport.status import RunStatus

POLL_S = 0.05
BACKLOG = 4096
HANGUP_S = 1.0  # how long after SIGHUP a SIGTERM may come, which says that the whole host is to end


def run_part(values: Mapping[str, Any], slot: PartExecution) -> tuple[int, str]:
    """Take part until the run is over or another attempt has replaced this one; blocks.

    Returns the exit code and, if it is not 0, the error message. Raises AttemptLostError if another attempt may
    succeed: the rendezvous does not answer, or a disk or store fails. Raises DataError for launch arguments of another
    version.

    values: the launch arguments of the part in JSON; slot: the number of the attempt, and its resources."""
    arguments = LaunchArguments.from_json(values)
    secret = Secret(arguments.token)
    raise_limit()
    with _environment(arguments, slot), _listening(arguments) as listeners:
        addresses = {index: address_of(listener) for index, listener in listeners.items()}
        line = Line(arguments.rendezvous, secret, arguments.part.index, slot.attempt, addresses, platform.node())
        try:
            host = _Host(arguments, slot, secret, listeners, line)
            code, text = _outcome(host)
            host.tell_totals()
            line.tell(end=(code, text))
            # The starting process needs this report; a new attempt can repeat it.
            if not line.flush():
                raise AttemptLostError("nobody heard how this part ended")
        finally:
            FORK_SERVER.end()
            line.close()
    return code, text


def _outcome(host: _Host) -> tuple[int, str]:
    """Take part in the run, and return the exit code and the error message of the part's end.

    Raises AttemptLostError if another attempt may succeed."""
    try:
        host.take_part()
    except AttemptLostError:
        # A JobError too, but it ends only this attempt and must not be reported as the end of the run.
        raise
    except JobError as error:
        return error.exit_code, str(error)
    except OSError as error:
        # A disk or a store may fail on this host only, or only for a while. The launcher starts another attempt.
        host.line.say(f"{' '.join(str(error).split())}; this host is started again")
        host.line.flush()
        raise AttemptLostError(str(error)) from error
    except Exception as error:
        text, code = unforeseen(error)
        return code, text
    return 0, ""


class _Host:
    """An attempt of a part, as it runs on its host.

    Attributes:
        part: the roles of this host.
        slot: the number of the attempt, and its resources.
        secret: the run's token, for the connections to servers.
        listeners: the listening sockets of this host's servers, by server index.
        line: the connection to the rendezvous.
        config, shards, options: the run and the digest of its set, from the launch arguments.
        edition: number of the address table that was used last, 0 before the first.
        metrics: counters of the whole run since this attempt began, on the leading host; None on others.
    """

    def __init__(
        self,
        arguments: LaunchArguments,
        slot: PartExecution,
        secret: Secret,
        listeners: dict[int, sockets.socket],
        line: Line,
    ) -> None:
        self.part = arguments.part
        self.slot = slot
        self.listeners = listeners
        self.line = line
        self.config = arguments.config
        self.shards = arguments.shards
        # The line to the rendezvous stays encrypted: its messages are small.
        self.secret = replace(secret, encryption=self.config.processes.encryption)
        self.options = Options(silent=True, report=arguments.report, tensorboard=arguments.tensorboard)
        self.edition = 0
        self.metrics = RunMetrics() if self.part.leads else None

    def tell_totals(self) -> None:
        """Report the counters of the leading host to the starting process, which has no log of its own."""
        if self.metrics:
            self.line.tell(totals=self.metrics.totals())

    def take_part(self) -> None:
        """Obey the commands of the rendezvous until the run is over. Raises JobError if it fails or is interrupted.

        The processes are started once the addresses of all servers are known, and again whenever a server has moved."""
        FORK_SERVER.ensure()  # before SIGTERM is handled, because it inherits a signal that is ignored
        with departing_at_sigterm(self.line):
            self._obey()

    def _obey(self) -> None:
        """Obey the commands of the rendezvous, as ``take_part`` does."""
        context = RunContext.from_config(self.config, digest=self.shards)
        if self.part.leads:
            self.line.tell(facts=check(context, self.options).to_json())
        while True:
            answer = self.line.answer()
            if answer.wanted in (LEAVE, DONE):
                return
            if answer.wanted in (CHECKPOINT, CHANGE):
                raise RunInterruptedError(
                    "interrupted; --resume continues from the last checkpoint, where there is one"
                )
            # The first addresses, or new ones after a server has moved; the supervisor with the old ones has ended.
            if answer.wanted == GO and answer.facts and answer.edition > self.edition:
                self.edition = answer.edition
                if self._go(context, answer, answer.facts) and self.part.leads:
                    return
            time.sleep(POLL_S)

    def _go(self, context: RunContext, answer: Answer, facts: dict[str, Any]) -> bool:
        """Train with an address table, and return as ``_supervise``. Raises JobError.

        After False, the next answer of the rendezvous says what to do.

        context: the run; answer: the answer with the table; facts: the facts of the run."""
        home = context.home
        if isinstance(home, Path) and not (home / CONFIG).exists():
            raise UsageError(
                f"--output {home} is not a folder that {platform.node()} shares with the host that started the run: give"
                " hdfs:// or s3://, or a folder that all hosts mount"
            )
        scratch = Path(self.slot.scratch) if self.slot.scratch else None
        with working(home, leads=self.part.leads, scratch=scratch) as work:
            return self._supervise(context, answer, RunFacts.from_json(facts), work)

    def _supervise(self, context: RunContext, answer: Answer, facts: RunFacts, work: WorkFolder) -> bool:
        """Start and watch this host's processes; on the leading host, write the first checkpoint before.

        Returns True once the run is over for this host, and False if the processes were ended earlier, because a
        server has moved, the command has changed, or a later start leads the run. Raises JobError.

        context: the run; answer: the answer with the address table; facts: the facts of the run; work: this host's work
        folder."""
        check_limit(self.part.roles, self.config.processes.servers, facts.num_workers)
        # ``check`` only read the folder. Now that all parts are here, the first checkpoint may be written.
        if self.part.leads:
            prepare(context, work.folders, computes=True, home=work.folders.home, write=True)
        reads = host_reads(self.config, facts, context.shards, self.part.roles)
        leads, index = self.part.leads, self.part.index
        try:
            # A line per host would hide other messages, where nothing is special.
            more = {"say": self.line.say} if leads else {}
            with row_storage(self.config, context.shards, reads, work, leads=leads, part=index, **more) as storage:
                supervisor = Supervisor(
                    self.config,
                    facts,
                    self.options,
                    answer.addresses,
                    self.secret,
                    work,
                    self.part.roles,
                    listeners=self.listeners,
                    overseer=_Caller(self, answer.edition),
                    metrics=self.metrics,
                )
                if storage and (leads or work.folders.rows):
                    self.line.say(f"rows {storage}")
                supervise(supervisor)
        # AttemptLostError is a SupersededError too, but with it the whole attempt ends, not only this supervisor.
        except AttemptLostError:
            raise
        except SupersededError:
            return False
        return True


@contextmanager
def departing_at_sigterm(line: Line) -> Iterator[None]:
    """Have SIGTERM, which this host alone gets when it is to end, tell the rendezvous so. The part itself continues.

    If all processes of a host get SIGTERM, Spark's daemon ends, and sends SIGHUP to the part, perhaps before the part gets
    its SIGTERM. SIGHUP alone ends the part: then only its executor ends, and Spark starts the part on another one.

    A no-op outside the main thread, which alone can handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def depart(number: int, frame: object) -> None:
        line.departs = True

    def hang_up(number: int, frame: object) -> None:
        # Without waiting here: if both signals were pending, the handler of SIGTERM runs after this one.
        signal.setitimer(signal.ITIMER_REAL, HANGUP_S)

    def end_unless_departing(number: int, frame: object) -> None:
        if not line.departs:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGHUP)

    handlers = {signal.SIGTERM: depart}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup has it ignored
        handlers |= {signal.SIGHUP: hang_up, signal.SIGALRM: end_unless_departing}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        if signal.SIGALRM in handlers:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


class _Caller:
    """A supervisor's overseer that forwards progress to the rendezvous, and returns its commands.

    It wants "leave" if the command is neither to train nor to write a checkpoint, or once the addresses are no longer
    those of ``edition``, the table with which the supervisor began."""

    def __init__(self, host: _Host, edition: int) -> None:
        self.host = host
        self.line = host.line
        self.edition = edition

    def wanted(self) -> Wanted:
        answer = self.line.answer()
        if answer.wanted == CHECKPOINT:
            return "checkpoint"
        if answer.wanted == CHANGE:
            return "change"
        return "go" if answer.wanted == GO and answer.edition == self.edition else "leave"

    def update(self, status: RunStatus) -> None:
        self.line.tell(status=status.to_json())
        self.host.tell_totals()

    def message(self, text: str) -> None:
        self.line.say(text)

    def close(self) -> None:
        """Keep the line open, because it outlives the supervisor."""


def _environment(arguments: LaunchArguments, slot: PartExecution) -> AbstractContextManager[None]:
    """Set the environment that the part's processes inherit, and restore it: a cluster may reuse this process."""
    settings = {}
    if slot.devices is not None:
        settings["CUDA_VISIBLE_DEVICES"] = visible(slot.devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if arguments.store:
        settings[SETTINGS] = arguments.store
    return variables(settings)


@contextmanager
def _listening(arguments: LaunchArguments) -> Iterator[dict[int, sockets.socket]]:
    """Yield a listening socket per server of the part, by server index, on the interface towards the rendezvous.

    Each has a free port, which stays reserved while its server is restarted."""
    family, own = interface_towards(arguments.rendezvous)
    listeners: dict[int, sockets.socket] = {}
    try:
        for role in arguments.part.roles:
            if role.kind == "server":
                listeners[role.index] = sockets.create_server((own, 0), family=family, backlog=BACKLOG)
        yield listeners
    finally:
        for listener in listeners.values():
            listener.close()


def address_of(listener: sockets.socket) -> str:
    number, port = listener.getsockname()[:2]
    return f"tcp://{bracketed(number)}:{port}"
