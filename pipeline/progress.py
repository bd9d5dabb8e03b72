"""What a person sees of a run: one line a phase, and seconds for the manifest."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark import SparkContext
from tqdm import tqdm


class Progress:
    """Times phases and tells about them on standard error; a phase of over two seconds shows its tasks as a bar."""

    def __init__(self, context: SparkContext | None = None, *, quiet: bool = False) -> None:
        self.context, self.quiet = context, quiet
        self.seconds: dict[str, float] = {}
        self._note = ""
        self._begin = time.perf_counter()

    def report(self, text: str) -> None:
        """What the running phase found; shown on its line."""
        self._note = text

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        self._note = ""
        stop = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(name, stop), daemon=True)
        if not self.quiet and sys.stderr.isatty() and self.context is not None:
            watcher.start()
        try:
            yield
        finally:
            stop.set()
            if watcher.is_alive():
                watcher.join()
        spent = time.perf_counter() - began
        self.seconds[name] = round(self.seconds.get(name, 0.0) + spent, 3)
        if not self.quiet:
            print(
                f"[{time.perf_counter() - self._begin:6.1f} s] {name:<9} {spent:6.2f} s  {self._note}", file=sys.stderr
            )

    def _watch(self, name: str, stop: threading.Event) -> None:
        if stop.wait(2.0) or self.context is None:
            return
        tracker = self.context.statusTracker()
        with tqdm(desc=name, unit="task", leave=False) as bar:
            while not stop.wait(0.5):
                stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
                known = [stage for stage in stages if stage]
                bar.total = sum(stage.numTasks for stage in known) or None
                bar.n = sum(stage.numCompletedTasks for stage in known)
                bar.set_postfix_str(self._note, refresh=True)
