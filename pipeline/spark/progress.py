"""What a person sees of a run: a line a phase, lines in between while a long one works, and seconds for the manifest."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark import SparkContext

FIRST_WORD_S, LONGEST_SILENCE_S = 5.0, 60.0


class PhaseLog:
    """Times phases and prints a line for each on standard error.

    Lines, not a bar: spark-submit hands a program's output on through a pipe, and batch runs keep it in a log."""

    def __init__(self, context: SparkContext | None = None, *, quiet: bool = False) -> None:
        self.context, self.quiet = context, quiet
        self.seconds: dict[str, float] = {}
        self._note = ""
        self._begin = time.perf_counter()

    def report(self, text: str) -> None:
        """A result of the running phase, shown on its line."""
        self._note = text

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        self._note = ""
        stop = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(name, stop), daemon=True)
        if not self.quiet:
            watcher.start()
        try:
            yield
        finally:
            stop.set()
            if watcher.is_alive():
                watcher.join()
        spent = time.perf_counter() - began
        self.seconds[name] = round(self.seconds.get(name, 0.0) + spent, 3)
        self._say(name, f"{spent:6.2f} s  {self._note}")

    def _say(self, name: str, text: str) -> None:
        if not self.quiet:
            print(
                f"[{time.perf_counter() - self._begin:6.1f} s] {name:<9} {text}".rstrip(), file=sys.stderr, flush=True
            )

    def _watch(self, name: str, stop: threading.Event) -> None:
        """A line after five seconds, and then at growing intervals."""
        pause = FIRST_WORD_S
        while not stop.wait(pause):
            self._say(name, f"     ...  {self._tasks()}{self._note}")
            pause = min(2 * pause, LONGEST_SILENCE_S)

    def _tasks(self) -> str:
        if self.context is None:
            return ""
        tracker = self.context.statusTracker()
        stages = [stage for stage in map(tracker.getStageInfo, tracker.getActiveStageIds()) if stage]
        total, done = sum(stage.numTasks for stage in stages), sum(stage.numCompletedTasks for stage in stages)
        return f"{done} of {total} tasks  " if total else ""
