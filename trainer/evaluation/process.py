"""The evaluator process: evaluates the checkpoints of a run during training.

It has no connections to other processes, only the files of the run, so that it may be killed and restarted at any time:
it repeats an interrupted evaluation, but none that is in metrics.jsonl."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from trainer.config import Config
from trainer.data.pinned import open_pinned
from trainer.evaluation.evaluator import Evaluator
from trainer.home.folders import Folders
from trainer.run_files import NEWS
from trainer.watchdog import kick, report

logger = logging.getLogger(__name__)

POLL_S = 0.5
# Looking for checkpoints costs several operations of a store: seconds between two looks on server 0's host, where a new
# checkpoint is announced, and on another host.
TOLD_POLL_S = 60.0
FAR_POLL_S = 15.0


def main(config: Config, folders: Folders, digest: str = "", *, stop: threading.Event | None = None) -> None:
    """Evaluate the checkpoints of epoch ends in the home as they appear, by version, up to the final one of the run.

    Returns earlier if ``stop`` is set and all present checkpoints are done. Failed writes are retried. Raises DataError
    or OSError if the shards, and DataError if the final checkpoint cannot be read, or if the set has another digest."""
    stop = stop or threading.Event()
    shards = replace(open_pinned(config.data, digest=digest), mapped=folders.rows, kept=folders.kept)
    evaluator = Evaluator(config, shards, folders)
    while True:
        kick()
        news = _news(folders)
        stopping = stop.is_set()  # read before the folder, so that checkpoints from before the stop are evaluated
        try:
            if evaluator.catch_up() or stopping:
                return
            report("")
        except OSError as error:  # a full or unreachable disk: retried, as for checkpoints
            report(f"the evaluation or its model was not written: {error}")
            logger.warning(f"evaluating will be tried again: {error}")
            if stopping:
                return
        _wait(folders, news, stop)


def _wait(folders: Folders, news: int, stop: threading.Event) -> None:
    """Wait until it is time to look for checkpoints. news: the value of ``_news`` before the last look."""
    far = TOLD_POLL_S if folders.leads else FAR_POLL_S
    end = time.monotonic() + (0 if folders.is_local else far)
    while not stop.wait(POLL_S) and time.monotonic() < end and _news(folders) == news:
        kick()


def _news(folders: Folders) -> int:
    """Return a number that grows when server 0, if it is on this host, announces a checkpoint."""
    path = folders.work / NEWS
    return path.stat().st_size if path.exists() else 0
