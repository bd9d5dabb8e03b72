"""One host's part of a run: start its roles, start again what dies, say how it goes, and leave nothing behind.

It holds no state that a checkpoint lacks: whatever is killed, itself included, the same command with --resume goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from pipeline.errors import DataError, JobError, UsageError
from trainer.checkpoints.read import newest, read_state, whole
from trainer.checkpoints.state import State
from trainer.config import Config, Facts
from trainer.launch.control import Control
from trainer.launch.processes import Child
from trainer.options import Options, Role
from trainer.plan import plan
from trainer.report.progress import ProgressLine
from trainer.run_files import CHECKPOINTS, LOGS, METRICS
from trainer.runlog.event_tail import EventTail
from trainer.runlog.events import log_event
from trainer.transport.addresses import hold
from trainer.transport.agreement import Agreement
from trainer.transport.messages import Op
from trainer.transport.sockets import Secret

POLL_S = 0.2
LINGER_S = 10.0
ALIVE_AGAIN_S = 60.0  # a role that lived so long is no longer failing in a row
LEADER = Role("server", 0)


class Supervisor:
    def __init__(
        self, config: Config, facts: Facts, options: Options, addresses: Sequence[str], secret: Secret
    ) -> None:
        self.config, self.facts, self.options = config, facts, options
        self.addresses, self.secret = list(addresses), secret
        self.held = [hold(address) for address in addresses]
        self.output = Path(config.run.output)
        self.roles = options.roles_of(config.processes.servers, facts.num_workers)
        self.control = Control(addresses[0], secret, Agreement.of(config, facts))
        self.children: dict[Role, Child] = {}
        self.failures: dict[Role, int] = dict.fromkeys(self.roles, 0)
        self.done: set[Role] = set()
        self.interrupted = False
        self.workers = [role.index for role in self.roles if role.kind == "worker"]
        self.plan = plan(config, facts, workers_here=len(self.workers))
        self.events = EventTail(self.output / METRICS)
        self.progress = ProgressLine(quiet=options.quiet or options.silent)
        self.board = _board(options, self.output)
        self._evaluated: float | None = None
        self._told = False
        self._trouble: str | None = None

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
        self.progress.close()
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
        secret, log = self.secret, self.output / LOGS / f"{role}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        config, facts, addresses = self.config, self.facts, self.addresses
        if role.kind == "server":
            held = self.held[role.index]
            child = Child(str(role), log, "trainer.server.process", config, facts, role.index, addresses, secret, held)
        elif role.kind == "worker":
            share = self.plan.threads_per_worker, self.workers.index(role.index)
            child = Child(
                str(role), log, "trainer.worker.process", config, facts, role.index, addresses, secret, *share
            )
        else:
            child = Child(str(role), log, "trainer.evaluation.process", config, self.output)
        self.children[role] = child

    def _look_after(self) -> None:
        """Wait a moment for something to happen; start again what has ended, end what is frozen."""
        sentinels = [child.process.sentinel for child in self.children.values()]
        connection.wait(sentinels, POLL_S)
        for role, child in list(self.children.items()):
            if child.exit_code() is None and child.is_frozen(self.config.processes.heartbeat_timeout_s):
                child.kill()
                self._ended(role, child, f"no heartbeat for {self.config.processes.heartbeat_timeout_s:g} s")
            elif child.exit_code() is not None:
                child.kill()
                self._ended(role, child, child.cause())

    def _ended(self, role: Role, child: Child, cause: str) -> None:
        del self.children[role]
        code = child.exit_code()
        if code == 0:
            self.done.add(role)
            self.control.tell(Op.STATUS)  # the run may be over
            return
        if code in (UsageError.exit_code, DataError.exit_code):
            raise (UsageError if code == UsageError.exit_code else DataError)(f"{role}: {cause}")
        lived = time.monotonic() - child.started
        self.failures[role] = 1 if lived > ALIVE_AGAIN_S else self.failures[role] + 1
        if self.failures[role] > self.config.processes.max_restarts:
            raise JobError(f"{role} failed {self.failures[role]} times in a row, last: {cause}; see {child.log}")
        if role.kind == "worker":
            self.control.tell(Op.LOST, role.index)
        log_event(self.output, "restart", role=role.kind, index=role.index, cause=cause)
        self.progress.message(f"{role}: {cause}; started again")
        self._start(role)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        status = self.control.status
        if status["diverged"]:
            raise JobError(
                f"the run diverged: {status['diverged']}; lower --learning-rate (see {self.output / METRICS})"
            )
        if status["finished"]:
            return True
        if LEADER in self.roles:
            return False
        # Another host leads: this one is done when its workers and evaluator are, whatever it hears from there.
        working = any(role.kind != "server" for role in set(self.roles) - self.done)
        mine_are_done = not working and any(role.kind != "server" for role in self.roles)
        return mine_are_done or (self.control.is_silent() and self._has_ended())

    def _has_ended(self) -> bool:
        """Whether the end of this run is in its folder: server 0 may have left before this host could hear of it."""
        root = self.output / CHECKPOINTS
        version = newest(root)
        return version is not None and is_end(read_state(root, version), self.config, self.facts)

    def _wait_for_the_rest(self) -> None:
        """Workers get their last answer, the evaluator its last checkpoint; then nobody needs the servers."""
        end = time.monotonic() + LINGER_S
        while any(role.kind == "evaluator" for role in self.children) or (
            time.monotonic() < end and (self._remaining() or any(role.kind == "worker" for role in self.children))
        ):
            if self.interrupted:
                self._leave_checkpoint()
            self._look_after()
            self._show()

    def _remaining(self) -> int:
        return int(self.control.status.get("remaining", 0))

    def _leave_checkpoint(self) -> None:
        """Checkpoint this moment, then end the run. Raises JobError, which says how to go on."""
        root = self.output / CHECKPOINTS
        if LEADER in self.roles:
            self.control.tell(Op.END)
            end = time.monotonic() + LINGER_S
            while time.monotonic() < end and not self._is_written(root):
                time.sleep(POLL_S / 4)
                self.control.ask()
        version = newest(root)
        at = f" at version {version} (epoch {read_state(root, version).epoch:.2f})" if version is not None else ""
        raise Interrupted(f"interrupted{at}; the same command with --resume goes on")

    def _is_written(self, root: Path) -> bool:
        """Whether what server 0 had when it was told of the end is on disk; an older status would not tell."""
        last = self.control.at_end
        return last is not None and (not last["ready"] or any(version >= last["version"] for version in whole(root)))

    # --- people -------------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        fresh = self.control.ask()
        self._tell_of_silence()
        for event in self.events.new():
            if event["event"] == "eval":
                self._evaluated = event["accuracy"]
            if self.board:
                self.board.add(event)
        if fresh:
            self._tell_of_trouble(self.control.status.get("trouble"))
        if fresh and self.control.status["ready"]:
            self.progress.update({"eval_accuracy": self._evaluated, **self.control.status})

    def _tell_of_trouble(self, trouble: str | None) -> None:
        """The disk that has no room for checkpoints has none for logs either."""
        if trouble and trouble != self._trouble:
            self.progress.message(f"{trouble}; training goes on, and tries again")
        self._trouble = trouble

    def _tell_of_silence(self) -> None:
        silent = self.control.is_silent()
        if silent and not self._told and LEADER not in self.roles:
            self.progress.message(f"server 0 does not answer at {self.addresses[0]}; waiting for it")
        self._told = silent


def is_end(state: State, config: Config, facts: Facts) -> bool:
    """Whether a checkpoint is the end of the run as long as it is now: of a longer one, it is where that begins."""
    steps = config.steps_per_worker(facts.rows)
    if config.run.stop == "local":
        return state.final and min(state.clocks.values()) >= steps
    return state.final and state.accepted >= steps * facts.num_workers


class Interrupted(JobError):
    """Somebody ended the run: Ctrl-C, or a scheduler's SIGTERM."""


def _board(options: Options, output: Path) -> Any:
    if not options.tensorboard:
        return None
    from trainer.report.tensorboard import TensorBoardWriter

    return TensorBoardWriter(output)
