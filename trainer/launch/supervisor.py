"""The supervisor of one host's part of a run: starts and restarts its roles, shows progress, and cleans up at the end.

It has no state beyond the checkpoints: after any kill, its own included, the same command with --resume continues the
run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from socket import socket
from typing import Any, NoReturn

from pipeline.core.errors import DivergenceError
from trainer.config import Config, RunFacts
from trainer.home.folders import Folders
from trainer.home.segments import SupersededError
from trainer.home.work import WorkFolder
from trainer.launch.control import Control
from trainer.launch.disk_watch import DiskWatch
from trainer.launch.end_watch import EndWatch
from trainer.launch.leaving import wait_for_checkpoint, wait_for_leader
from trainer.launch.overseer import Overseer, Terminal
from trainer.launch.role_processes import POLL_S, RoleProcesses
from trainer.leader.next_stage import find_continuation
from trainer.lifecycle.interruption import RunInterruptedError, describe_interruption
from trainer.options import Options, Role
from trainer.plan import plan
from trainer.report.metrics import RunMetrics
from trainer.run_files import METRICS
from trainer.runlog.event_tail import EventTail
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.run import RollbackEvent, WarningEvent
from trainer.runlog.read import iter_events
from trainer.transport.agreement import Agreement
from trainer.transport.sockets import Secret
from trainer.transport.status import RunStatus

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
        listeners: see RoleProcesses.
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
        self.roles = list(roles)
        self.control = Control(addresses[0], secret, Agreement.from_config(config, facts))
        self.interrupted = False
        self.changes = False  # whether the run stops here to continue with other workers
        self.workers = [role.index for role in self.roles if role.kind == "worker"]
        self.plan = plan(config, facts, workers_here=len(self.workers))
        self.events = EventTail(self.folders.work / METRICS)
        self.overseer = overseer or Terminal(quiet=options.quiet or options.silent)
        self.processes = RoleProcesses(
            config,
            facts,
            self.folders,
            addresses,
            secret,
            listeners=listeners,
            workers=self.workers,
            threads=self.plan.threads_per_worker,
            message=self.overseer.message,
            tell=self.control.tell,
        )
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
            self.processes.start(role)
        while not self._is_over():
            self._obey_interruption()
            self.processes.look_after()
            self._check_progress()
        self._wait_for_the_rest()
        self._check_progress()

    def close(self, cause: str = "closed") -> None:
        """Kill the roles that still run, and close all connections. ``run`` must have ended before.

        cause: why the run ends, for the logs of these roles."""
        self.processes.close(cause)
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
        own_roles_have_ended = not has_server and set(self.roles) <= self.processes.ended_roles
        return own_roles_have_ended or (self.control.is_silent() and self.end_watch.has_ended(time.monotonic()))

    def _wait_for_the_rest(self) -> None:
        """Wait until this host's evaluator is done, and at most LINGER_S for workers to receive their last answer.

        This host's servers can stop then. Raises RunInterruptedError if the run is interrupted."""
        end = time.monotonic() + LINGER_S
        while self.processes.are_running("evaluator") or (time.monotonic() < end and self._is_awaited()):
            self._obey_interruption()
            self.processes.look_after()
            self._check_progress()

    def _is_awaited(self) -> bool:
        """Return whether workers, here or elsewhere, may still wait for an answer."""
        return self.control.status.remaining > 0 or self.processes.are_running("worker")

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
        # Only the leading host knows the checkpoint that the others end with: it may not be written yet.
        named_root = root if LEADER in self.roles else None
        raise RunInterruptedError(describe_interruption(named_root), changes=self.changes and not self.interrupted)

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
            self.processes.progress.reach(self.control.status.version)
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
        self.processes.progress.note(event)
        match event:
            case WarningEvent():
                self.overseer.message(event.message)
            # Counted once for all hosts.
            case RollbackEvent() if LEADER in self.roles:
                progress = self.processes.progress
                progress.reach(event.from_version)
                self.processes.count_failure(
                    "the run went back to a checkpoint", progress.furthest, event.cause or "-", self.events.path
                )
        if self.board:
            self.board.add(event)
        if self.metrics:
            self.metrics.add(event)

    def _show(self, status: RunStatus) -> None:
        """Show a new status, with the last evaluation."""
        evaluated_status = replace(status, **self.processes.progress.evaluation)
        # First, because an overseer on a cluster reports the counters.
        if self.metrics:
            self.metrics.update(evaluated_status)
        self.overseer.update(evaluated_status)

    def _disk_trouble(self) -> str | None:
        """Return why a checkpoint, the log, an evaluation or a model cannot be written, as text; None if all can."""
        evaluator = self.processes.children.get(EVALUATOR)
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
