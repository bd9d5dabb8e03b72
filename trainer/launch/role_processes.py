"""The processes of a host's roles: started, watched, and started again after they have ended or were killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from socket import socket

from pipeline.core.errors import DataError, JobError, UsageError, error_class
from trainer.config import Config, RunFacts
from trainer.home.folders import Folders
from trainer.launch.child import Child
from trainer.launch.fork_server import FORK_SERVER, ProcessKilledError
from trainer.launch.restarts import Restarts, pause_s
from trainer.launch.role_log import RoleLog
from trainer.launch.role_progress import RoleProgress
from trainer.options import Kind, Role
from trainer.run_files import LOGS
from trainer.runlog.events import log_event
from trainer.server.endpoint import Endpoint
from trainer.transport.addresses import hold
from trainer.transport.messages.supervisors import AskStatus, WorkerLoss
from trainer.transport.sockets import Secret

POLL_S = 0.2


class RoleProcesses:
    """The processes of a host's roles.

    Args:
        config, facts, folders: the run.
        addresses: one address per server.
        secret: the token of the run.
        listeners: sockets that already listen for servers of this host, by server index (default: bound here for addresses
            of this host alone).
        workers: numbers of this host's workers.
        threads: threads of each worker.
        message: shows a line.
        tell: sends a message to server 0.

    Attributes:
        children: the running processes.
        ended_roles: roles that have ended with exit code 0.
        progress: of the roles, by which failures in a row are counted.
    """

    def __init__(
        self,
        config: Config,
        facts: RunFacts,
        folders: Folders,
        addresses: Sequence[str],
        secret: Secret,
        *,
        listeners: Mapping[int, socket] | None,
        workers: Sequence[int],
        threads: int,
        message: Callable[[str], object],
        tell: Callable[[AskStatus | WorkerLoss], object],
    ) -> None:
        self.config = config
        self.facts = facts
        self.folders = folders
        self.addresses = list(addresses)
        self.secret = secret
        # One per server, kept open so that nothing else takes the address while a server restarts. None for an address
        # that the server binds itself.
        own = listeners or {}
        self.listeners = [own[i].dup() if i in own else hold(address) for i, address in enumerate(addresses)]
        self.workers = list(workers)
        self.threads = threads
        self.message = message
        self.tell = tell
        self.children: dict[Role, Child] = {}
        self.ended_roles: set[Role] = set()
        self.progress = RoleProgress(folders.checkpoints)
        self._restarts = Restarts()
        self._restart_at: dict[Role, float] = {}  # when each failed role is restarted (monotonic seconds)
        self._causes: dict[Role, str] = {}  # why each role that is not yet restarted has ended

    def close(self, cause: str) -> None:
        """Kill the processes that still run, and close the sockets. cause: why the run ends, for their logs."""
        for role, child in self.children.items():
            child.kill()
            self._log_of(role).add(f"ends with the run: {cause}")
        for listener in filter(None, self.listeners):
            listener.close()

    def start(self, role: Role) -> None:
        """Start a role's process now, or later if it could not be forked. Raises JobError if that failed too often."""
        log = self._log_of(role).path
        log.parent.mkdir(parents=True, exist_ok=True)
        # Before the process can write a line: its last line is the cause of its end.
        cause = self._causes.pop(role, None)
        self._log_of(role).add(f"starts again, after: {cause}" if cause else "starts")
        try:
            self.children[role] = self._child(role, log)
        except ProcessKilledError as error:
            self.message(f"{error}; tried again{self._schedule(role, str(error), log)}")

    def _schedule(self, role: Role, cause: str, log: Path) -> str:
        """Schedule the restart of a role that has failed, and return the pause before it in words, "" if there is none.

        Raises JobError after too many failures. cause, log: as of ``count_failure``."""
        pause = pause_s(self.count_failure(f"{role} failed", self.progress.measure(role), cause, log))
        self._restart_at[role] = time.monotonic() + pause
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
            share = self.threads, self.workers.index(role.index), self.folders
            return Child(name, log, "trainer.worker.process", *run, role.index, self.addresses, self.secret, *share)
        return Child(name, log, "trainer.evaluation.process", self.config, self.folders, self.facts.shards)

    def look_after(self) -> None:
        """Wait up to POLL_S for an event; restart processes that have ended, and kill those that hang."""
        connection.wait([child.sentinel for child in self.children.values()], POLL_S)
        self._keep_fork_server()
        for role, child in list(self.children.items()):
            has_ended = child.exit_code() is not None
            cause = child.cause() if has_ended else self._hang_of(role, child)
            if cause is not None:
                child.kill()
                self._ended(role, child, cause)
        for role in [role for role, at in self._restart_at.items() if at <= time.monotonic()]:
            del self._restart_at[role]
            self.start(role)

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
            self.count_failure(f"{name} ended", self.progress.furthest, cause, self.folders.work / LOGS)
            log_event(self.folders.work, "restart", role="fork server", index=0, cause=cause)
            self.message(f"{name}: {cause}; {again}")

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
            self.tell(AskStatus())  # the run may be over
            return
        if code in (UsageError.exit_code, DataError.exit_code):  # a restart would fail in the same way
            raise error_class(code)(f"{role}: {cause}")
        pause = self._schedule(role, cause, child.log)
        if role.kind == "worker":  # other workers need not wait for the heartbeat timeout
            self.tell(WorkerLoss(role.index))
        self._causes[role] = cause
        log_event(self.folders.work, "restart", role=role.kind, index=role.index, cause=cause)
        self.message(f"{role}: {cause}; started again{pause}")

    def count_failure(self, event: str, progress: int, cause: str, log: Path) -> int:
        """Count a failure and return how many there were in a row without progress. Raises JobError if too many.

        Args:
            event: the subject and verb of the message, such as "worker-2 failed". Each text has its own count.
            progress: a number that grows with progress (see Restarts).
            cause: the cause of this failure, for the message.
            log: the file that the message refers to.
        """
        failures = self._restarts.failed(event, progress)
        if failures > self.config.processes.max_restarts:
            where = self.folders.home_place(log)
            raise JobError(f"{event} {failures} times in a row without progress, last: {cause}; see {where}")
        return failures

    def are_running(self, kind: Kind) -> bool:
        """Return whether any role of a kind runs on this host or waits for its restart."""
        return any(role.kind == kind for role in (*self.children, *self._restart_at))
