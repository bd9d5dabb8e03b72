"""The screen output of a run: a line per phase, progress lines during long phases, and seconds for the manifest."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark import SparkContext

from pipeline.core import console

LOGGER = "sharding.job"
GROUP = "spark.jobGroup.id"
DESCRIPTION = "spark.job.description"
STARVED = (
    "no executor has started a task yet: check that the cluster has as much free memory and as many free cores as this"
    " application requests (spark.executor.memory, spark.executor.cores)  "
)
FIRST_WORD_S = 5.0
LONGEST_SILENCE_S = 60.0


class PhaseLog:
    """A log that times phases, prints a line for each on standard error, and names Spark's jobs after them.

    The names appear on Spark's pages and in its event log. Output is lines, not a progress bar, because spark-submit
    passes a program's output through a pipe, and batch runs keep it in a log. title: the purpose of the run, which
    groups its jobs."""

    def __init__(self, context: SparkContext | None = None, *, quiet: bool = False, title: str = "sharding") -> None:
        self.context = context
        self.quiet = quiet
        self.title = title
        self.seconds: dict[str, float] = {}
        self._application: str | None = None  # its id in Spark
        self._note = ""
        self._begin = time.perf_counter()

    def report(self, text: str) -> None:
        """Set the result of the running phase, which is shown on its line."""
        self._note = text

    def begin(self, context: SparkContext, title: str) -> None:
        """Set the context and the title of the run, and show the id of the Spark application, by which logs of its
        executors are found."""
        self.context = context
        self.title = title
        self._application = context.applicationId
        self._say("spark", f"application {context.applicationId} on {context.master}")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a ``with`` block as a phase: print progress lines during it and its seconds at its end.

        The seconds of phases with the same name are added up. A phase that raises is not recorded."""
        start = time.perf_counter()
        self._note = ""
        stop = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(name, stop), daemon=True)
        if not self.quiet:
            watcher.start()
        try:
            with self._named_jobs(name):
                yield
        finally:
            # The watcher ends before the phase is reported, so that no progress line follows the result.
            stop.set()
            if watcher.is_alive():
                watcher.join()
        spent = time.perf_counter() - start
        # A phase may run several times; the manifest has the sum.
        self.seconds[name] = round(self.seconds.get(name, 0.0) + spent, 3)
        self._say(name, f"{spent:6.2f} s  {self._note}", phase=name, seconds=round(spent, 3))

    @contextmanager
    def _named_jobs(self, phase: str) -> Iterator[None]:
        """Name Spark's jobs in a ``with`` block after the phase, and restore the previous names at its end."""
        context: Any = self.context  # its stubs do not allow None, which removes a property
        if context is None:
            yield
            return
        group = context.getLocalProperty(GROUP)
        description = context.getLocalProperty(DESCRIPTION)
        try:
            # Keep the job group of a notebook, which needs it to cancel jobs.
            context.setLocalProperty(GROUP, group or self.title)
            context.setLocalProperty(DESCRIPTION, f"{phase}: {self.title}")
            yield
        finally:
            context.setLocalProperty(GROUP, group)
            context.setLocalProperty(DESCRIPTION, description)

    def _say(self, name: str, text: str, **fields: Any) -> None:
        """Show a line. name, text: of a phase; fields: values for programs that read JSON."""
        if self.quiet:
            return
        elapsed = time.perf_counter() - self._begin
        line = f"{console.wall_clock()} [{elapsed:6.1f} s] {name:<9} {text}".rstrip()
        about = {"run": self.title, "application": self._application, "elapsed_s": round(elapsed, 1)}
        console.say(LOGGER, f"{name}: {' '.join(text.split())}", text=line, fields=about | fields)

    def _watch(self, name: str, stop: threading.Event) -> None:
        """Print a line after five seconds, and then at growing intervals."""
        pause = FIRST_WORD_S
        waiting = frozenset[int]()
        while not stop.wait(pause):
            before = waiting
            (waiting, tasks) = self._tasks()
            # Spark may report tasks that began right after their stage a heartbeat (10 s) late: warn the second time.
            self._say(name, f"     ...  {STARVED if before & waiting else tasks}{self._note}", phase=name)
            pause = min(2 * pause, LONGEST_SILENCE_S)

    def _tasks(self) -> tuple[frozenset[int], str]:
        """Return the idle stages and the progress as text.

        The set contains all active stages if none of their tasks is known to have begun, and is empty otherwise. On a
        cluster without a free core it stays the same, of which ``_watch`` warns."""
        if self.context is None:
            return frozenset(), ""
        tracker = self.context.statusTracker()
        stages = {number: tracker.getStageInfo(number) for number in tracker.getActiveStageIds()}
        stage_infos = [stage for stage in stages.values() if stage]
        total = sum(stage.numTasks for stage in stage_infos)
        completed_tasks = sum(stage.numCompletedTasks for stage in stage_infos)
        idle = not completed_tasks and not any(stage.numActiveTasks for stage in stage_infos)
        return frozenset(stages if idle else ()), f"{completed_tasks} of {total} tasks  " if total else ""
