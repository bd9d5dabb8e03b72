"""A study that is interrupted by signals while it waits for its runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.made_up_study import make_plan
from trainer.study import __main__ as study
from trainer.study.plan.study_plan import Run
from trainer.study.run.runner import Runner


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore the handlers of the signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class BlockedRun:
    """A run that lasts until it is killed."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.over = threading.Event()

    def measure(self, run: Run) -> None:
        self.running.set()
        self.over.wait()

    def kill(self) -> None:
        self.over.set()


def test_many_signals_are_one_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals at any moment end the runs, and nothing but KeyboardInterrupt is raised."""
    runner = Runner(make_plan(("random",), seeds=1), tmp_path, 1, print)
    blocked = BlockedRun()
    runner.children.add(blocked)
    monkeypatch.setattr(runner, "_measure", blocked.measure)
    monkeypatch.setattr(runner.sets, "make", lambda keys: None)
    stopped = threading.Event()

    def send() -> None:
        blocked.running.wait()
        while not stopped.wait(0.001):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt), study._interrupts_by_signals():
            runner.run(list(runner.plan.runs()))
    finally:
        stopped.set()
        blocked.running.set()
        sender.join()
    assert blocked.over.is_set()


def test_a_signal_that_is_ignored_stays_so() -> None:
    """A shell ignores SIGINT for the commands that it starts in the background."""
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with study._interrupts_by_signals():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
