"""One host's part of a run: start its roles, start again what dies, say how it goes, and leave nothing behind.

It holds no state that a checkpoint lacks: whatever is killed, itself included, the same command with --resume goes on."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from socket import socket
from typing import Any

from pipeline.core.errors import DataError, Diverged, JobError, UsageError
from trainer.checkpoints.read import evaluation_of, newest, read_state, whole_states
from trainer.checkpoints.state import State
from trainer.config import Config, Facts
from trainer.home.folders import Folders
from trainer.home.segments import Superseded
from trainer.home.work import Work
from trainer.launch.control import Control
from trainer.launch.leaving import newest_in_words, wait_for_checkpoint, wait_for_leader
from trainer.launch.overseer import Overseer, Terminal
from trainer.launch.processes import FORK_SERVER, Child, Killed
from trainer.launch.restarts import Restarts, pause_s
from trainer.options import Kind, Options, Role
from trainer.plan import plan
from trainer.run_files import LOGS, METRICS
from trainer.runlog.event_tail import EventTail
from trainer.runlog.events import log_event
from trainer.runlog.read import iter_events
from trainer.transport.addresses import hold
from trainer.transport.agreement import Agreement
from trainer.transport.messages import Op
from trainer.transport.sockets import Secret

POLL_S = 0.2
LINGER_S = 10.0
FAR_LOOK_S = 15.0
SPACE_WAIT_S = 30 * 60.0  # for which a trained run waits until its last checkpoint and its model can be written
FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))
LEADER, EVALUATOR = Role("server", 0), Role("evaluator")


class Supervisor:
    """work: of this host, that of a local --output where not given; held: the sockets at which servers of this host listen
    already, by number; roles, overseer: those of a host that is started by hand, where not given."""

    def __init__(
        self,
        config: Config,
        facts: Facts,
        options: Options,
        addresses: Sequence[str],
        secret: Secret,
        work: Work | None = None,
        *,
        held: Mapping[int, socket] | None = None,
        roles: Sequence[Role] | None = None,
        overseer: Overseer | None = None,
    ) -> None:
        self.work = work or Work(Folders.of(config.run.output))
        self.folders = self.work.folders
        self.config, self.facts, self.options = config, facts, options
        self.addresses, self.secret = list(addresses), secret
        given = held or {}
        self.held = [given[i].dup() if i in given else hold(address) for i, address in enumerate(addresses)]
        self.output = self.folders.work
        self.roles = list(roles or options.roles_of(config.processes.servers, facts.num_workers))
        self.control = Control(addresses[0], secret, Agreement.of(config, facts))
        self.children: dict[Role, Child] = {}
        self.waiting: dict[Role, float] = {}  # to be started again at a time (monotonic seconds)
        self.restarts = Restarts()
        self.furthest = 0  # the highest version that was heard of
        self.clocks: dict[int, int] = {}  # the highest clock of each worker that was heard of
        self.done: set[Role] = set()
        self.interrupted = False
        self.workers = [role.index for role in self.roles if role.kind == "worker"]
        self.plan = plan(config, facts, workers_here=len(self.workers))
        self.events = EventTail(self.output / METRICS)
        self.overseer = overseer or Terminal(quiet=options.quiet or options.silent)
        self.board = _board(options, self.folders)
        self._evaluated: dict[str, float | None] = {}  # the last evaluation, as the progress line shows it
        self._last_evaluated = -1
        self._told = False
        self._looked = 0.0  # for the end of the run, in a home elsewhere (monotonic seconds)
        self._trouble: str | None = None
        self._stuck: float | None = None  # since when the run is trained and cannot be written (monotonic seconds)

    def run(self) -> None:
        """Until the run is over for this host. Raises JobError when it fails or is interrupted."""
        self._wait_to_be_admitted()
        for role in self.roles if not self._is_over() else ():
            self._start(role)
        while not self._is_over():
            if self.interrupted:
                self._leave_checkpoint()
            self._look_after()
            self._show()
        self._wait_for_the_rest()
        self._show()

    def close(self) -> None:
        for child in self.children.values():
            child.kill()
        for held in filter(None, self.held):
            held.close()
        self.control.close()
        self.overseer.close()
        if self.board:
            self.board.close()

    def _wait_to_be_admitted(self) -> None:
        """Where another host leads: one that server 0 does not admit touches nothing of the run."""
        while not (LEADER in self.roles or self.control.is_admitted or self._is_over()):
            if self.interrupted:
                self._leave_checkpoint()
            time.sleep(POLL_S / 4)
            self._show()

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start(self, role: Role) -> None:
        """Start a role's process now, or later where it could not be forked. Raises JobError if that failed too often."""
        log = self.output / LOGS / f"{role}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.children[role] = self._child(role, log)
        except Killed as error:
            pause = pause_s(self._count(f"{role} failed", self._progress_of(role), str(error), log))
            self.overseer.message(f"{error}; tried again{f' in {pause:g} s' if pause else ''}")
            self.waiting[role] = time.monotonic() + pause

    def _child(self, role: Role, log: Path) -> Child:
        """A new process of a role. Raises Killed."""
        config, facts, addresses, secret = self.config, self.facts, self.addresses, self.secret
        if role.kind == "server":
            listening = addresses, secret, self.held[role.index], self.folders
            return Child(str(role), log, "trainer.server.process", config, facts, role.index, *listening)
        if role.kind == "worker":
            share = self.plan.threads_per_worker, self.workers.index(role.index), self.output
            return Child(str(role), log, "trainer.worker.process", config, facts, role.index, addresses, secret, *share)
        return Child(str(role), log, "trainer.evaluation.process", config, self.folders)

    def _look_after(self) -> None:
        """Wait a moment for something to happen; start again what has ended, end what is frozen."""
        connection.wait([child.sentinel for child in self.children.values()], POLL_S)
        self._keep_fork_server()
        for role, child in list(self.children.items()):
            ended, processes = child.exit_code() is not None, self.config.processes
            cause = child.cause() if ended else child.hangs(processes.heartbeat_timeout_s, processes.stall_timeout_s)
            if cause is not None:
                child.kill()
                self._ended(role, child, cause)
        for role in [role for role, at in self.waiting.items() if at <= time.monotonic()]:
            del self.waiting[role]
            self._start(role)

    def _keep_fork_server(self) -> None:
        """What it forked goes on without it; the next process to be started needs it."""
        FORK_SERVER.ensure()
        while FORK_SERVER.losses:
            cause = FORK_SERVER.losses.pop()
            self._count("the process that the others are forked from ended", self.furthest, cause, self.output / LOGS)
            log_event(self.output, "restart", role="fork server", index=0, cause=cause)
            self.overseer.message(f"the process that the others are forked from: {cause}; started again")

    def _ended(self, role: Role, child: Child, cause: str) -> None:
        del self.children[role]
        code = child.exit_code()
        if code == 0:
            self.done.add(role)
            self.control.tell(Op.STATUS)  # the run may be over
            return
        if code in (UsageError.exit_code, DataError.exit_code):
            raise (UsageError if code == UsageError.exit_code else DataError)(f"{role}: {cause}")
        pause = pause_s(self._count(f"{role} failed", self._progress_of(role), cause, child.log))
        if role.kind == "worker":
            self.control.tell(Op.LOST, role.index)
        log_event(self.output, "restart", role=role.kind, index=role.index, cause=cause)
        self.overseer.message(f"{role}: {cause}; started again{f' in {pause:g} s' if pause else ''}")
        self.waiting[role] = time.monotonic() + pause

    def _count(self, what: str, progress: int, cause: str, log: Path) -> int:
        """How often it has happened without progress by now. Raises JobError if that is too often."""
        failures = self.restarts.failed(what, progress)
        if failures > self.config.processes.max_restarts:
            where = self.folders.at_home(log)
            raise JobError(f"{what} {failures} times in a row without progress, last: {cause}; see {where}")
        return failures

    def _progress_of(self, role: Role) -> int:
        """A worker's own: others get on without one that always dies, and nobody would train its shard."""
        if role.kind == "worker":
            return self.clocks.get(role.index, -1)
        return self._furthest_evaluated() if role.kind == "evaluator" else self.furthest

    def _furthest_evaluated(self) -> int:
        """The newest version that the evaluator is done with; one without rows logs no event, and marks it only."""
        root = self.folders.checkpoints
        marked = [state.version for state in whole_states(root) if evaluation_of(root, state)]
        self._last_evaluated = max(self._last_evaluated, *marked, -1)
        return self._last_evaluated

    # --- the end ------------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        status = self.control.status
        if status["diverged"]:
            raise Diverged(f"the run diverged: {status['diverged']} (see {self.folders.home / METRICS})")
        if status["finished"]:
            return True
        if LEADER in self.roles:
            return False
        # Another host leads: this one is done when its workers and evaluator are, whatever it hears from there. A server's
        # part of the last checkpoint may not be written by then.
        has_server = any(role.kind == "server" for role in self.roles)
        mine_are_done = not has_server and set(self.roles) <= self.done
        return mine_are_done or (self.control.is_silent() and self._has_ended())

    def _has_ended(self) -> bool:
        """Whether the end of this run is in its folder: server 0 may have left before this host could hear of it."""
        root, now = self.folders.checkpoints, time.monotonic()
        if not self.folders.is_local and now - self._looked < FAR_LOOK_S:
            return False
        self._looked, version = now, newest(root)
        return version is not None and is_end(read_state(root, version), self.config, self.facts)

    def _wait_for_the_rest(self) -> None:
        """Workers get their last answer, the evaluator its last checkpoint; then nobody needs the servers."""
        end = time.monotonic() + LINGER_S
        while self._runs("evaluator") or (time.monotonic() < end and (self._remaining() or self._runs("worker"))):
            if self.interrupted:
                self._leave_checkpoint()
            self._look_after()
            self._show()

    def _runs(self, kind: Kind) -> bool:
        """Whether there is one of a kind here, or will be."""
        return any(role.kind == kind for role in (*self.children, *self.waiting))

    def _remaining(self) -> int:
        return int(self.control.status.get("remaining", 0))

    def _leave_checkpoint(self) -> None:
        """Checkpoint this moment, then end the run. Raises JobError, which says how to go on."""
        root = self.folders.checkpoints
        if self._stuck is not None:  # server 0 tries to write the last checkpoint all the time
            raise Interrupted(f"interrupted: {self._unwritten(self._disk_trouble() or 'not all was written')}")
        if LEADER in self.roles:
            wait_for_checkpoint(self.control, root, self.facts)
        elif self.control.is_admitted and any(role.kind == "server" for role in self.roles):
            wait_for_leader(self.control, root, self.facts)
        raise Interrupted(f"interrupted{newest_in_words(root)}; the same command with --resume goes on")

    # --- people -------------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        self.work.check()
        wanted = self.overseer.wanted()
        if wanted == "leave":
            raise Superseded("this part of the run is not wanted any more")
        self.interrupted |= wanted == "checkpoint"
        fresh = self.control.ask()
        self._tell_of_silence()
        for event in self.events.new():
            if event["event"] == "eval":
                self._evaluated = {"eval_accuracy": event["accuracy"], "eval_loss": event.get("loss")}
                self._last_evaluated = max(self._last_evaluated, event["version"])
            if event["event"] == "train":
                for worker in event["workers"]:
                    self.clocks[worker["index"]] = max(worker["clock"], self.clocks.get(worker["index"], -1))
            if event["event"] == "warning":
                self.overseer.message(event["message"])
            if event["event"] == "rollback" and LEADER in self.roles:
                self.furthest = max(self.furthest, event["from_version"])
                self._count("the run went back to a checkpoint", self.furthest, event["cause"], self.events.path)
            if self.board:
                self.board.add(event)
        if self._is_trained():
            self._wait_for_space()
        else:
            self._stuck = None
        if fresh and not self._is_trained():
            self._tell_of_trouble(self._disk_trouble())
        if fresh and self.control.status["ready"] and self._stuck is None:
            self.furthest = max(self.furthest, self.control.status["version"])
            self.overseer.update({**self._evaluated, **self.control.status})

    def _tell_of_trouble(self, trouble: str | None) -> None:
        """The disk that has no room for checkpoints has none for logs either."""
        if trouble and trouble != self._trouble:
            self.overseer.message(f"{trouble}; training goes on, and tries again")
        self._trouble = trouble

    def _disk_trouble(self) -> str | None:
        """Why a checkpoint, the log, an evaluation or a model is not written, for people."""
        evaluator = self.children.get(EVALUATOR)
        return self.control.status.get("trouble") or self.work.trouble or (evaluator.trouble if evaluator else None)

    def _is_trained(self) -> bool:
        """Whether only the last files of the run are left to be written."""
        return bool(self.control.status["finished"] or self.control.status.get("trained"))

    def _wait_for_space(self) -> None:
        """Say once that a trained run cannot be written. Raises JobError where that lasts too long."""
        trouble, now, minutes = self._disk_trouble(), time.monotonic(), SPACE_WAIT_S / 60
        if not trouble:
            self._stuck = None
        elif self._stuck is None:
            self._stuck = now
            what = "space on " if any(reason in trouble for reason in FULL) else ""
            text = f"finished, waiting for {what}{self.folders.home}: {trouble}"
            self.overseer.message(f"{text}; the run ends after {minutes:g} minutes of this")
        elif now - self._stuck > SPACE_WAIT_S:
            raise JobError(f"{minutes:g} minutes after its end {self._unwritten(trouble)}")

    def _unwritten(self, trouble: str) -> str:
        """What a trained run leaves that could not be written, and the next step."""
        home, version = self.folders.home, newest_in_words(self.folders.checkpoints)
        return f"{trouble}; kept is the run{version}: make room on {home}, and the same command with --resume goes on"

    def _tell_of_silence(self) -> None:
        silent = self.control.is_silent()
        if silent and not self._told and LEADER not in self.roles:
            self.overseer.message(f"server 0 does not answer at {self.addresses[0]}; waiting for it")
        self._told = silent


def is_end(state: State, config: Config, facts: Facts) -> bool:
    """Whether a checkpoint is the end of the run as long as it is now: of a longer one, it is where that begins."""
    steps = config.steps_per_worker(facts.rows)
    if config.run.stop == "local":
        return state.final and min(state.clocks.values()) >= steps
    return state.final and state.accepted >= steps * facts.num_workers


class Interrupted(JobError):
    """Somebody ended the run: Ctrl-C, or a scheduler's SIGTERM."""


def _board(options: Options, folders: Folders) -> Any:
    if not options.tensorboard:
        return None
    from trainer.report.tensorboard import TensorBoardWriter

    board = TensorBoardWriter(folders.work)
    for event in () if folders.is_local else iter_events(folders.work / METRICS):
        board.add(event)  # what a killed start has not copied; the first takes the place of all that there is
    return board
