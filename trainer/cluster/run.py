"""A run on a cluster, as the starting process sees it: it manages the run's folder, has a launcher start the parts,
shows progress, and ends the run."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TypeVar

from pipeline.core import console
from pipeline.core.errors import JobError, error_class
from trainer.cluster.launcher import LaunchArguments, Launcher, Part
from trainer.cluster.rendezvous import CHANGE, CHECKPOINT, DONE, GO, LEAVE, PartEnd, Rendezvous
from trainer.config import Config, RunFacts
from trainer.launch.restarts import Restarts
from trainer.launch.workers_request import Requests
from trainer.leader.next_stage import find_continuation
from trainer.lifecycle.interruption import INTERRUPTED, RunInterruptedError
from trainer.options import Options
from trainer.plan import describe, plan
from trainer.regroup import departure_obstacle, has_followed_stream
from trainer.report.metrics import RunMetrics
from trainer.report.progress import ProgressLine
from trainer.run_files import CHECKPOINTS
from trainer.runlog.run_record import RunRecord
from trainer.transport.addresses import all_interfaces, bracketed
from trainer.transport.sockets import IN_CLEAR, Secret

POLL_S = 0.1
SLOW_S = 10.0  # after so long missing parts are reported
START_S = 120.0  # and after so long the run is given up
LEAVE_S = 12.0  # how long parts may take to end by themselves before the launcher kills them
SETTLE_S = 2.0  # how long a launcher may take to notice the loss of a part
CHECKPOINT_S = 120.0  # how long the leading part may take to write its checkpoint

T = TypeVar("T")


class ClusterRun:
    """A start of a run on several hosts, as the process sees it that manages the run's folder.

    Call ``start``, then ``train``, and ``close`` in any case. Setting ``interrupted`` ends the run with
    RunInterruptedError, in ``train`` after a checkpoint.

    Args:
        config, options: the run, and the options of this process.
        launcher: starts the parts.
        parts: one per host.
        requests: may stop the run, which continues with other workers then.
        metrics: of this process, with --metrics-port.
    """

    def __init__(
        self,
        config: Config,
        options: Options,
        launcher: Launcher,
        parts: Sequence[Part],
        requests: Requests,
        metrics: RunMetrics | None = None,
    ) -> None:
        self.config = config
        self.options = options
        self.launcher = launcher
        self.parts = parts
        self.requests = requests
        self.metrics = metrics
        self.interrupted = False
        self.progress = ProgressLine(quiet=options.quiet or options.silent)
        self.token = secrets.token_hex(32)
        self.rendezvous: Rendezvous  # set once the launcher has found its cluster
        self.restarts = Restarts()
        self._came: set[int] = set()  # parts that have arrived at least once
        self._silent: set[int] = set()  # parts that were silent at the last look
        self._departing: set[int] = set()  # parts whose hosts are to end, and with which the run does not continue
        self._all_depart = False  # apart from ``interrupted``, after which a signal to this process is the second one
        self._has_followed = False  # whether workers have added rows of a stream before this start
        self._is_changing = False  # whether the parts end so that the run continues with other workers
        self._start_time = 0.0  # when the parts were started (monotonic seconds), 0 before
        self._has_reported_missing = False
        self._is_lost = False  # another start has taken the folder
        self._over_since = math.inf  # since when no part runs (monotonic seconds)
        self._stopping = False

    def start(self, record: RunRecord) -> RunRecord:
        """Start the parts; wait until all have arrived and the leading one has checked that the run can be trained.

        Returns the record to write: with the threads per worker, so that a resume on other hosts is bit-identical.
        Raises UsageError, DataError and JobError, after which no part runs.

        record: the run's record; its threads are 0 for a new run."""
        try:
            threads = self._start(record)
        except BaseException:
            self.close()
            raise
        return replace(record, threads=threads)

    def _start(self, record: RunRecord) -> int:
        """Start the parts, wait for them, and return the threads per worker. record: see ``start``."""
        self._raise_if_interrupted()
        # Once, because a store that does not answer must not delay the loop.
        self._has_followed = has_followed_stream(self.config, self.requests.home)
        self.launcher.check(self.parts)
        self._raise_if_interrupted()  # the check may have taken long, for example to start Spark
        threads = self._threads(record.threads)
        self.config = replace(self.config, processes=replace(self.config.processes, threads=threads))
        bind = all_interfaces(self.launcher.host())
        self.rendezvous = Rendezvous(len(self.parts), self.config.processes.servers, Secret(self.token), bind)
        self._start_time = time.monotonic()
        self.launcher.start([self._arguments(part, record.shards) for part in self.parts])
        while self.rendezvous.facts is None or self.rendezvous.present() < len(self.parts):
            self._watch()
            self._raise_if_interrupted()
        facts = RunFacts.from_json(self.rendezvous.facts)
        if self.metrics:
            self.metrics.begin(self.config, facts)
        if not (self.options.quiet or self.options.silent):
            start = (
                find_continuation(self.config, facts, self.requests.home / CHECKPOINTS) if self.options.resume else None
            )
            print(describe(plan(self.config, facts, continuation=start)), flush=True)
        if self.config.processes.encryption == "off" and not self.options.silent:
            console.say("sharding.training", IN_CLEAR, level="warning")
        return threads

    def _threads(self, before: int) -> int:
        """Return the threads per worker. before: the recorded number, 0 for a new run.

        A resumed run keeps its number unless --threads is given: another one would change the results in the last
        bits."""
        own = self.launcher.threads(self.parts)
        if before and before != own and not self.config.processes.threads:
            self.progress.message(
                f"workers have {before} threads each as before, not {own}; --threads {own} changes that"
            )
        return self.config.processes.threads or before or own

    @property
    def is_to_end(self) -> bool:
        """Return whether a signal to this process, or to all hosts, ends the run, so that it does not continue by itself."""
        return self.interrupted or self._all_depart

    def _raise_if_interrupted(self) -> None:
        if self.is_to_end:
            raise RunInterruptedError("interrupted before the run began")

    def _arguments(self, part: Part, shards: str) -> LaunchArguments:
        """Return the launch arguments of a part. shards: digest of the shard set."""
        return LaunchArguments(
            part,
            rendezvous=f"tcp://{bracketed(self.launcher.host())}:{self.rendezvous.port}",
            token=self.token,
            config=self.config,
            shards=shards,
            report=self.options.report,
            tensorboard=self.options.tensorboard,
            store=self.launcher.store(),
        )

    def train(self) -> None:
        """Train until the leading part has ended without an error. Raises the error of a failed part, or JobError."""
        everybody = [part.index for part in self.parts]
        self.rendezvous.want(everybody, GO)
        while not self._watch():
            changes = not self.is_to_end and self.requests.is_waiting()
            if self.is_to_end or changes:
                self._leave_checkpoint(changes=changes)
                break
        self.rendezvous.want(everybody, DONE)
        self._wait_for_ends()

    def lose(self) -> None:
        """Note that another start has taken the folder, because this one was frozen and considered dead."""
        self._is_lost = True

    def close(self) -> None:
        """End all parts that still run. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        try:
            if self._start_time and not self.launcher.is_over():
                self.rendezvous.want([part.index for part in self.parts], LEAVE)
                self._wait_for_ends()
                if self._is_changing:
                    self._release_hosts()  # those that were told to end meanwhile: they have no part in the next start
        finally:
            try:
                self.launcher.stop()
            finally:
                if self._start_time:
                    self._show()  # what came with the last ends
                    self.rendezvous.close()
                self.progress.close()

    def _watch(self) -> bool:
        """Wait POLL_S, check on all parts once, and return whether the leading part has ended without an error.

        Raises JobError if the run cannot continue, or the error with which a part has ended."""
        time.sleep(POLL_S)
        self._show()
        # Ends come first: a part's own error says more than the launcher's.
        for end in drained(self.rendezvous.ends):
            self._raise_for(end)
            if self.parts[end.part].leads:
                return True
        for part, host in drained(self.rendezvous.arrivals):
            self._arrived(part, host)
        self._release_hosts()
        failure = "a later start of the run has its --output now" if self._is_lost else self.launcher.failure()
        if failure:
            self._show()
            raise JobError(failure)
        self._raise_if_all_have_gone()
        self._report_missing_parts()
        self._tell_of_silent()
        return False

    def _raise_if_all_have_gone(self) -> None:
        """Raise JobError if no part runs or will be restarted, and none has reported the run's end.

        The report of a part can arrive a little later than the launcher notices that the part has
        ended, so the error is raised only after SETTLE_S."""
        now = time.monotonic()
        self._over_since = min(self._over_since, now) if self.launcher.is_over() else math.inf
        if now - self._over_since > SETTLE_S and self.rendezvous.ends.empty():
            raise JobError("all hosts have stopped without reporting a result; see their logs")

    def _raise_for(self, end: PartEnd) -> None:
        """Raise the error with which a part has ended, of the class of its exit code. A no-op for exit code 0."""
        if end.code:
            where = "" if self.parts[end.part].leads else f"host {end.part}: "
            raise error_class(end.code)(f"{where}{end.text}")

    def _arrived(self, part: int, host: str) -> None:
        """Report that a part has arrived. Raises JobError if it has arrived, and so was lost before, too often."""
        if part not in self._came:
            self._came.add(part)
            self.progress.message(f"host {part} has started on {host}")
            return
        failures = self.restarts.failed(f"host {part}", self.rendezvous.status.version)
        if failures > self.config.processes.max_restarts:
            raise JobError(f"host {part} was lost {failures} times in a row without progress; see its log")
        if self.metrics:
            self.metrics.count_restart("host")
        self.progress.message(f"host {part} was lost, and is started again on {host}")

    def _release_hosts(self) -> None:
        """Have the run continue without the hosts that are to end; a host whose workers must stay is only reported.

        If all are to end, the run is interrupted. A run that has trained to its end does not change any more."""
        status = self.rendezvous.status
        if self.is_to_end or status.trained or status.finished:
            return
        # One after the other: each of them leaves fewer workers.
        for part in drained(self.rendezvous.departures):
            rest = [each for each in self.parts if each.index not in self._departing | {part}]
            workers = sum(each.count("worker") for each in rest)
            obstacle: str | None = "it is the only host"
            if len(self.parts) > 1:
                obstacle = departure_obstacle(self.config, workers, has_followed=self._has_followed)
            if obstacle:
                self.progress.message(f"host {part} got SIGTERM; it is replaced once it has ended, because {obstacle}")
                continue
            self._departing.add(part)
            if not rest:
                self.progress.message("all hosts got SIGTERM: the run ends; --resume continues it")
                self._all_depart = True
                return
            self.progress.message(f"host {part} got SIGTERM: the run continues with {workers} workers")
            self.requests.departed_hosts += 1
            self.requests.submit(workers)

    def _report_missing_parts(self) -> None:
        """Report once if parts have not started after SLOW_S, as on a cluster without room for all of them.

        Raises JobError if parts are still missing after START_S."""
        present = self.rendezvous.present()
        count = len(self.parts)
        waited = time.monotonic() - self._start_time
        if present == count or waited < SLOW_S:
            return
        line = f"{present} of {count} hosts have started after {waited:.0f} s: {self.launcher.waiting_for()}"
        if waited > START_S:
            raise JobError(line)
        if not self._has_reported_missing:
            self._has_reported_missing = True
            self.progress.message(f"{line}; waiting {START_S:.0f} s for them")

    def _tell_of_silent(self) -> None:
        """Report parts that are silent, and parts that are heard of again.

        Raises JobError if a part is silent for more than --stall-timeout-s (0: no limit)."""
        silent = self.rendezvous.silent()
        limit = self.config.processes.stall_timeout_s
        # Only changes are reported, because this is called in every round of the loop.
        for host in sorted(silent.keys() - self._silent):
            self.progress.message(f"host {host} does not answer; waiting until it answers or is restarted")
        for host in sorted(self._silent - silent.keys()):
            self.progress.message(f"host {host} answers again")
        self._silent = set(silent)
        # The cluster usually starts a lost host again. Without the limit the run would wait for ever if it does not.
        for host, seconds in silent.items():
            if limit and seconds > limit:
                raise JobError(
                    f"host {host} did not answer for {seconds:.0f} s (--stall-timeout-s {limit:g}); --resume continues"
                    " from the last checkpoint"
                )

    def _leave_checkpoint(self, *, changes: bool) -> None:
        """Have the leading part write a checkpoint and end, then raise RunInterruptedError.

        Returns instead if the run ends by itself at this moment, and raises the error of a part that fails. The other
        parts end later, because without their servers the checkpoint would stay incomplete.

        changes: whether the run is to continue with other workers. Without a whole checkpoint in time, such as after the
            death of the leading host, it continues from an earlier one."""
        self._is_changing = changes
        head = next(part.index for part in self.parts if part.leads)
        self.rendezvous.want([head], CHANGE if changes else CHECKPOINT)
        end = time.monotonic() + CHECKPOINT_S
        while time.monotonic() < end and not self.launcher.failure():
            time.sleep(POLL_S)
            self._show()
            self._release_hosts()
            for part_end in drained(self.rendezvous.ends):
                if part_end.part == head and not part_end.code:
                    return  # the run has just ended
                if not part_end.text.startswith(INTERRUPTED):
                    # The next start would meet the error too, and servers of another host may be missing in the checkpoint.
                    self._raise_for(part_end)
                elif part_end.part == head:
                    raise RunInterruptedError(part_end.text, changes=changes and not self.is_to_end)
        failure = self.launcher.failure()
        cause = f"no checkpoint was written: {failure}" if failure else f"no checkpoint within {CHECKPOINT_S:.0f} s"
        raise RunInterruptedError(
            f"interrupted; {cause}; --resume continues from the last",
            changes=changes and not (self.is_to_end or failure),
        )

    def _wait_for_ends(self) -> None:
        """Wait up to LEAVE_S until all parts have ended by themselves."""
        end = time.monotonic() + LEAVE_S
        while time.monotonic() < end and not self.launcher.is_over():
            time.sleep(POLL_S)
        self._show()

    def _show(self) -> None:
        """Print the messages of the parts, and the progress of the run."""
        for part, text in drained(self.rendezvous.texts):
            leads = self.parts[part].leads
            self.progress.message(text if leads else f"host {part}: {text}")
        if self.rendezvous.status.ready:
            self.progress.update(self.rendezvous.status)
        if self.metrics:
            self.metrics.show(self.rendezvous.status)
            # The leading host counts, because the log may be on HDFS or in an object store.
            self.metrics.add_totals(*self.rendezvous.totals)


def drained(queue: SimpleQueue[T]) -> list[T]:
    """Remove and return all items of a queue, without waiting."""
    items = []
    while True:
        try:
            items.append(queue.get_nowait())
        except Empty:
            return items
