"""The duration of calls, and the CPU use of this machine, which is the driver's host."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import NamedTuple

import psutil

SAMPLE_EVERY_S = 0.1


def time_call(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class CpuSample(NamedTuple):
    """The use of all cores at a time.

    Attributes:
        time: seconds since 1970.
        busy, total: seconds of all cores since boot.
    """

    time: float
    busy: float
    total: float


class CpuMeter:
    """A background sampler of /proc/stat. A context manager."""

    def __init__(self) -> None:
        # Appended to by two threads.
        self._samples: list[CpuSample] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="cpu")

    def __enter__(self) -> CpuMeter:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def share_between(self, start: float, end: float) -> float:
        """Return the busy share of this machine's cores between two times (seconds since 1970).

        Measured between the nearest samples that enclose them."""
        self._sample()
        times = [sample.time for sample in self._samples]
        at = max(0, bisect_right(times, start) - 1)
        first = self._samples[at]
        last = self._samples[min(len(times) - 1, max(at + 1, bisect_left(times, end)))]
        total = last.total - first.total
        return (last.busy - first.busy) / total if total > 0 else 0.0

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            self._sample()

    def _sample(self) -> None:
        """Append the time, and the busy and total seconds of all cores.

        Waiting for I/O counts as idle. Time of guests is part of the user time, and is subtracted so that it counts
        once."""
        times = psutil.cpu_times()
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        idle = times.idle + getattr(times, "iowait", 0.0)
        self._samples.append(CpuSample(time.time(), total - idle, total))
