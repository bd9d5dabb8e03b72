"""The supervisor of one host's part of a run: starts and restarts its roles, shows progress, and cleans up at the end.

It has no state beyond the checkpoints: after any kill, its own included, the same command with --resume continues the
run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from socket import socket
from typing import Any, NoReturn

from pipeline.core.errors import DataError, DivergenceError, JobError, UsageError, error_class
from trainer.config import Config, RunFacts
from trainer.home.folders import Folders
from trainer.home.segments import SupersededError
from trainer.home.work import WorkFolder
from trainer.launch.child import Child
from trainer.launch.control import Control
from trainer.launch.disk_watch import DiskWatch
from trainer.launch.end_watch import EndWatch
from trainer.launch.fork_server import FORK_SERVER, ProcessKilledError
from trainer.launch.leaving import wait_for_checkpoint, wait_for_leader
from trainer.launch.overseer import Overseer, Terminal
from trainer.launch.restarts import Restarts, pause_s
from trainer.launch.role_log import RoleLog
from trainer.launch.role_progress import RoleProgress
from trainer.leader.next_stage import find_continuation
from trainer.lifecycle.interruption import RunInterruptedError, describe_interruption
from trainer.options import Kind, Options, Role
from trainer.plan import plan
from trainer.report.metrics import RunMetrics
from trainer.run_files import LOGS, METRICS
from trainer.runlog.event_tail import EventTail
from trainer.runlog.events import log_event
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.run import RollbackEvent, WarningEvent
from trainer.runlog.read import iter_events
from trainer.server.endpoint import Endpoint
from trainer.transport.addresses import hold
from trainer.transport.agreement import Agreement
from trainer.transport.messages.supervisors import AskStatus, WorkerLoss
from trainer.transport.sockets import Secret
from trainer.transport.status import RunStatus

POLL_S = 0.2
LINGER_S = 10.0
LEADER = Role("server", 0)
EVALUATOR = Role("evaluator")


class Supervisor:
    """The supervisor of one host: starts and watches its roles until the run is over.

    Args:
        config, facts, options: the run, and how this host takes part in it.
        addresses: one address per server.
        secret: the token of the run.
        work: this host's work folder.
        roles: roles of this host.
        listeners: sockets that already listen for servers of this host, by server index (default: bound here for addresses
            of this host alone).
        overseer: receives progress and may end this part (default: the terminal).
        metrics: receives the status and the events too, with --metrics-port.

    Setting ``interrupted`` makes ``run`` leave a checkpoint and raise RunInterruptedError.
    """

    def __init__(
        self,
        config: Config,
        facts: RunFacts,
        options: Options,
        addresses: Sequence[str],
        secret: Secret,
        work: WorkFolder,
        roles: Sequence[Role],
        *,
        listeners: Mapping[int, socket] | None = None,
        overseer: Overseer | None = None,
        metrics: RunMetrics | None = None,
    ) -> None:
        self.work = work
        self.folders = work.folders
        self.config = config
        self.facts = facts
        self.options = options
        self.addresses = list(addresses)
        self.secret = secret
        # One per server, kept open so that nothing else takes the address while a server restarts. None for an address
        # that the server binds itself.
        own = listeners or {}
        self.listeners = [own[i].dup() if i in own else hold(address) for i, address in enumerate(addresses)]
        self.roles = list(roles)
        self.control = Control(addresses[0], secret, Agreement.from_config(config, facts))
        self.children: dict[Role, Child] = {}
        self.waiting: dict[Role, float] = {}  # when each failed role is restarted (monotonic seconds)
        self.restarts = Restarts()
        self.progress = RoleProgress(self.folders.checkpoints)
        self._causes: dict[Role, str] = {}  # why each role that is not yet restarted has ended
        self.ended_roles: set[Role] = set()  # roles that have ended with exit code 0
        self.interrupted = False
        self.changes = False  # whether the run stops here to continue with other workers
        self.workers = [role.index for role in self.roles if role.kind == "worker"]
        self.plan = plan(config, facts, workers_here=len(self.workers))
        self.events = EventTail(self.folders.work / METRICS)
        self.overseer = overseer or Terminal(quiet=options.quiet or options.silent)
        self.board = _board(options, self.folders)
        self.metrics = metrics
        if metrics:
            # Hosts with nothing but workers may not reach the checkpoints.
            continuation = find_continuation(config, facts, self.folders.checkpoints) if LEADER in self.roles else None
            metrics.begin(config, facts, continuation.stage if continuation else 0)
        self.disk = DiskWatch(self.folders, self.overseer.message)
        self.end_watch = EndWatch(config, facts, self.folders)
        self._was_silent = False  # whether server 0 was silent at the last look, which is reported once

    def run(self) -> None:
        """Run this host's roles until the run is over for it. Raises JobError if the run fails or is interrupted."""
        self._wait_to_be_admitted()
        for role in self.roles if not self._is_over() else ():
            self._start(role)
        while not self._is_over():
            self._obey_interruption()
            self._look_after()
            self._check_progress()
        self._wait_for_the_rest()
        self._check_progress()

    def close(self, cause: str = "closed") -> None:
        """Kill the roles that still run, and close all connections. ``run`` must have ended before.

        cause: why the run ends, for the logs of these roles."""
        for role, child in self.children.items():
            child.kill()
            self._log_of(role).add(f"ends with the run: {cause}")
        for listener in filter(None, self.listeners):
            listener.close()
        self.control.close()
        self.overseer.close()
        if self.board:
            self.board.close()

    def _wait_to_be_admitted(self) -> None:
        """Wait until server 0 has accepted this host's configuration and token, if another host leads.

        Until then nothing is started, so that a rejected host changes nothing of the run."""
        while not (LEADER in self.roles or self.control.is_admitted or self._is_over()):
            self._obey_interruption()
            time.sleep(POLL_S / 4)
            self._check_progress()

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start(self, role: Role) -> None:
        """Start a role's process now, or later if it could not be forked. Raises JobError if that failed too often."""
        log = self._log_of(role).path
        log.parent.mkdir(parents=True, exist_ok=True)
        # Before the process can write a line: its last line is the cause of its end.
        cause = self._causes.pop(role, None)
        self._log_of(role).add(f"starts again, after: {cause}" if cause else "starts")
        try:
            self.children[role] = self._child(role, log)
        except ProcessKilledError as error:
            self.overseer.message(f"{error}; tried again{self._schedule(role, str(error), log)}")

    def _schedule(self, role: Role, cause: str, log: Path) -> str:
        """Schedule the restart of a role that has failed, and return the pause before it in words, "" if there is none.

        Raises JobError after too many failures. cause, log: as of ``_count``."""
        pause = pause_s(self._count(f"{role} failed", self.progress.measure(role), cause, log))
        self.waiting[role] = time.monotonic() + pause
        return f" in {pause:g} s" if pause else ""

    def _log_of(self, role: Role) -> RoleLog:
        return RoleLog(self.folders.work / LOGS / f"{role}.log", str(role))

    def _child(self, role: Role, log: Path) -> Child:
        """Start and return a process for a role. Raises ProcessKilledError."""
        name = str(role)
        run = self.config, self.facts
        if role.kind == "server":
            endpoint = Endpoint(role.index, self.addresses, self.secret, self.listeners[role.index], self.folders)
            return Child(name, log, self.config.exchange.server, *run, endpoint)
        if role.kind == "worker":
            share = self.plan.threads_per_worker, self.workers.index(role.index), self.folders
            return Child(name, log, "trainer.worker.process", *run, role.index, self.addresses, self.secret, *share)
        return Child(name, log, "trainer.evaluation.process", self.config, self.folders, self.facts.shards)

    def _look_after(self) -> None:
        """Wait up to POLL_S for an event; restart processes that have ended, and kill those that hang."""
        connection.wait([child.sentinel for child in self.children.values()], POLL_S)
        self._keep_fork_server()
        for role, child in list(self.children.items()):
            has_ended = child.exit_code() is not None
            cause = child.cause() if has_ended else self._hang_of(role, child)
            if cause is not None:
                child.kill()
                self._ended(role, child, cause)
        for role in [role for role, at in self.waiting.items() if at <= time.monotonic()]:
            del self.waiting[role]
            self._start(role)

    def _hang_of(self, role: Role, child: Child) -> str | None:
        """Return why a process must be killed, or None.

        The worker timeout is for workers that have joined, because others wait for them. It is neither for the evaluator
        nor for a worker that has not joined yet, whose heartbeats can stop for seconds while CUDA is loaded."""
        has_joined = role.kind == "worker" and child.has_started
        timeout_s = self.config.worker_timeout_s if has_joined else self.config.heartbeat_timeout_s
        return child.hangs(timeout_s, self.config.processes.stall_timeout_s)

    def _keep_fork_server(self) -> None:
        """Restart the fork server if it died. Its children keep running, but the next start needs it."""
        name = "the process that the others are forked from"
        again = "started again"
        try:
            FORK_SERVER.ensure()
        except OSError:  # without free file descriptors or processes
            again = "the next round tries to start it again"
        while FORK_SERVER.losses:
            cause = FORK_SERVER.losses.pop()
            self._count(f"{name} ended", self.progress.furthest, cause, self.folders.work / LOGS)
            log_event(self.folders.work, "restart", role="fork server", index=0, cause=cause)
            self.overseer.message(f"{name}: {cause}; {again}")

    def _ended(self, role: Role, child: Child, cause: str) -> None:
        """Handle a process that has ended or was killed: remove it, and schedule its restart unless its role is done.

        Raises the process's UsageError or DataError, which a restart would repeat, and JobError after too many
        failures.

        cause: why it ended, for messages and the log."""
        del self.children[role]
        code = child.exit_code()
        self._log_of(role).add("has ended: nothing is left to do" if code == 0 else f"has ended: {cause}")
        if code == 0:
            self.ended_roles.add(role)
            self.control.tell(AskStatus())  # the run may be over
            return
        if code in (UsageError.exit_code, DataError.exit_code):  # a restart would fail in the same way
            raise error_class(code)(f"{role}: {cause}")
        pause = self._schedule(role, cause, child.log)
        if role.kind == "worker":  # other workers need not wait for the heartbeat timeout
            self.control.tell(WorkerLoss(role.index))
        self._causes[role] = cause
        log_event(self.folders.work, "restart", role=role.kind, index=role.index, cause=cause)
        self.overseer.message(f"{role}: {cause}; started again{pause}")

    def _count(self, event: str, progress: int, cause: str, log: Path) -> int:
        """Count a failure and return how many there were in a row without progress. Raises JobError if too many.

        Args:
            event: the subject and verb of the message, such as "worker-2 failed". Each text has its own count.
            progress: a number that grows with progress (see Restarts).
            cause: the cause of this failure, for the message.
            log: the file that the message refers to.
        """
        failures = self.restarts.failed(event, progress)
        if failures > self.config.processes.max_restarts:
            where = self.folders.home_place(log)
            raise JobError(f"{event} {failures} times in a row without progress, last: {cause}; see {where}")
        return failures

    # --- the end ------------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        """Return whether this host has nothing left to do but wait for the last answers. Raises DivergenceError."""
        status = self.control.status
        if status.diverged:
            raise DivergenceError(f"the run diverged: {status.diverged} (see {self.folders.home / METRICS})")
        if status.finished:
            return True
        if LEADER in self.roles:
            return False
        # Another host leads. This one is done when its workers and evaluator are, whatever the leader reports. With a
        # server it is not, because that may still have to write its slice of the last checkpoint.
        has_server = any(role.kind == "server" for role in self.roles)
        own_roles_have_ended = not has_server and set(self.roles) <= self.ended_roles
        return own_roles_have_ended or (self.control.is_silent() and self.end_watch.has_ended(time.monotonic()))

    def _wait_for_the_rest(self) -> None:
        """Wait until this host's evaluator is done, and at most LINGER_S for workers to receive their last answer.

        This host's servers can stop then. Raises RunInterruptedError if the run is interrupted."""
        end = time.monotonic() + LINGER_S
        while self._runs("evaluator") or (time.monotonic() < end and self._is_awaited()):
            self._obey_interruption()
            self._look_after()
            self._check_progress()

    def _runs(self, kind: Kind) -> bool:
        """Return whether a role of a kind runs on this host or waits for its restart."""
        return any(role.kind == kind for role in (*self.children, *self.waiting))

    def _is_awaited(self) -> bool:
        """Return whether workers, here or elsewhere, may still wait for an answer."""
        return self.control.status.remaining > 0 or self._runs("worker")

    def _obey_interruption(self) -> None:
        """End this host's part if the run is interrupted or is to continue with other workers."""
        if self.interrupted or self.changes:
            self._leave_checkpoint()

    def _leave_checkpoint(self) -> NoReturn:
        """Have a checkpoint written if this host has servers, then raise RunInterruptedError, which says how to resume."""
        root = self.folders.checkpoints
        if self.disk.is_stuck:  # server 0 already keeps trying to write the last checkpoint
            trouble = self._disk_trouble() or "not all was written"
            raise RunInterruptedError(f"interrupted: {self.disk.describe(trouble)}")
        if LEADER in self.roles:
            wait_for_checkpoint(self.control, root, self.facts)
        elif self.control.is_admitted and any(role.kind == "server" for role in self.roles):
            wait_for_leader(self.control, root, self.facts)
        raise RunInterruptedError(describe_interruption(root), changes=self.changes and not self.interrupted)

    # --- progress and messages ----------------------------------------------------------------------------------------

    def _check_progress(self) -> None:
        """Obey the overseer, read the status and the new events of the log, and report progress and problems.

        Called in every round of the supervisor.

        Raises SupersededError if another start leads the run, or the overseer does not want this part any more;
        JobError if the run rolls back too often or cannot be written for too long."""
        self.work.check()
        self._obey_overseer()
        fresh = self.control.ask()
        self._tell_of_silence()
        # Restarts are judged by the clocks, evaluations and roll-backs in the log.
        for event in self.events.new():
            self._note(event)
        if self._is_trained():
            self.disk.note_trained(self._disk_trouble(), time.monotonic())
        else:
            self.disk.stop_waiting()
            if fresh:
                self.disk.note_training(self._disk_trouble())
        if fresh and self.control.status.ready and not self.disk.is_stuck:
            self.progress.reach(self.control.status.version)
            self._show(self.control.status)

    def _obey_overseer(self) -> None:
        """Note how the overseer wants this part to end, if it does. Raises SupersededError if at once."""
        action = self.overseer.wanted()
        if action == "leave":
            raise SupersededError("this part of the run is not wanted any more")
        self.interrupted |= action == "checkpoint"
        # A trained run ends soon, with the workers that it has.
        self.changes |= action == "change" and not self._is_trained()

    def _note(self, event: LogEvent) -> None:
        """Note an event of the log, and pass it on. Raises JobError after too many roll-backs without progress."""
        self.progress.note(event)
        match event:
            case WarningEvent():
                self.overseer.message(event.message)
            case RollbackEvent() if LEADER in self.roles:
                self.progress.reach(event.from_version)
                progress = self.progress.furthest
                self._count("the run went back to a checkpoint", progress, event.cause or "-", self.events.path)
        if self.board:
            self.board.add(event)
        if self.metrics:
            self.metrics.add(event)

    def _show(self, status: RunStatus) -> None:
        """Show a new status, with the last evaluation."""
        evaluated_status = replace(status, **self.progress.evaluation)
        # First, because an overseer on a cluster reports the counters.
        if self.metrics:
            self.metrics.update(evaluated_status)
        self.overseer.update(evaluated_status)

    def _disk_trouble(self) -> str | None:
        """Return why a checkpoint, the log, an evaluation or a model cannot be written, as text; None if all can."""
        evaluator = self.children.get(EVALUATOR)
        return self.control.status.trouble or self.work.trouble or (evaluator.trouble if evaluator else None)

    def _is_trained(self) -> bool:
        """Return whether training is done and at most the last files of the run are still to be written."""
        return self.control.status.finished or self.control.status.trained

    def _tell_of_silence(self) -> None:
        """Report once that server 0 does not answer; again only after it has answered in between."""
        silent = self.control.is_silent()
        if silent and not self._was_silent and LEADER not in self.roles:
            self.overseer.message(f"server 0 does not answer at {self.addresses[0]}; waiting for it")
        self._was_silent = silent


def _board(options: Options, folders: Folders) -> Any:
    """Return a TensorBoard writer; None without --tensorboard.

    If the run's folder is remote, the work folder has no board yet, so that the log so far is written to it first."""
    if not options.tensorboard:
        return None
    from trainer.report.tensorboard import TensorBoardWriter

    board = TensorBoardWriter(folders.work)
    # A killed start may have logged events that it did not write to the board. The first event purges the old board.
    for event in () if folders.is_local else iter_events(folders.work / METRICS):
        board.add(event)
    return board
