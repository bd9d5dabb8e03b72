"""The events of exchanges among neighbours from which a replay repeats who averaged with whom."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trainer.runlog.events import log_event

NO_MODEL = "all workers were lost at the same time"  # the cause of a roll-back


def log_newcomer(log: Path, worker: int, source: int, round: int) -> None:
    """Log that a worker begins a round with the model of another one.

    Args:
        log: folder of the log.
        worker, source: numbers of the workers.
        round: the round.
    """
    # With the version that its model has: the checkpoint of that version has this model, too.
    log_event(log, "newcomer", version=round, worker=worker, source=source, round=round)


def log_links(log: Path, worker: int, round: int, changed: Iterable[int], unused: dict[int, set[int]]) -> None:
    """Log the links that a worker uses again, or no longer, from a round on.

    Args:
        log: folder of the log.
        worker: number of the worker.
        round: the round.
        changed: neighbours at the other ends.
        unused: by worker, its neighbours whose models it does not use; changed.
    """
    for neighbour in changed:
        unused.setdefault(worker, set()).symmetric_difference_update([neighbour])
        used = neighbour not in unused[worker]
        log_event(log, "link", version=round + 1, worker=worker, neighbour=neighbour, round=round, used=used)
