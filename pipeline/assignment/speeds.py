"""The measured speeds of a training run's workers, as ratios with which its machines finish together."""

from __future__ import annotations

import csv
from typing import Any

import numpy as np

from pipeline.core.arrays import Floats
from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.ratios import MOST_PARTS, Ratios
from pipeline.core.storage.store import Store

PUSHES = "pushes.csv"  # log of a training run: one pushed gradient per line
PERCENT = 100
MOST = 1 << 53  # limit of an example count, a worker number and the seconds of a step


def measured_speeds(store: Store, run: str) -> Floats:
    """Return the examples per second of each worker, float64 [workers]: all examples over their total step time,
    without waits.

    O(pushes).

    Args:
        store: reaches the run.
        run: folder of a training run.

    Raises:
        UsageError: there is no such run.
        DataError: its log is damaged or lacks timed steps of a worker.
    """
    import pandas as pd  # loads slower than all other modules of a command together

    path = f"{store.resolve(run)}/{PUSHES}"
    try:
        with store.open(path) as file:
            columns = ["worker", "examples", "step_s"]
            form: dict[str, Any] = {"quoting": csv.QUOTE_NONE, "encoding_errors": "replace", "low_memory": False}
            pushes = pd.read_csv(file, usecols=columns, on_bad_lines="skip", index_col=False, **form)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise UsageError(f"{path} is no file; --ratios-from names the --output of a training run") from None
    except (ValueError, OverflowError) as error:  # pandas' own errors are among them
        raise DataError(f"{path} is not the log of a training run: {' '.join(str(error).split())[:200]}") from None
    pushes = pushes.apply(pd.to_numeric, errors="coerce").astype("float64")
    # Lines that a full disk cut off are dropped.
    pushes = pushes[(pushes.abs() < MOST).all(axis=1) & (pushes.worker >= 0) & (pushes.worker % 1 == 0)]
    sums = pushes[(pushes.examples > 0) & (pushes.step_s > 0)].groupby("worker").sum()
    workers = sums.index.to_numpy()
    if not len(workers) or not np.array_equal(workers, np.arange(len(workers))):
        missing = next(worker for worker in range(len(workers) + 1) if worker not in workers)
        raise DataError(f"{path} has no timed steps of worker {missing}; let every worker of the run take some")
    speeds: Floats = (sums.examples / sums.step_s).to_numpy(np.float64)
    return speeds


def ratios_of(speeds: Floats) -> Ratios:
    """Return speeds as percent of the fastest, at least 1; coarser for very many workers."""
    scale = min(PERCENT, MOST_PARTS // len(speeds))
    return tuple(max(1, round(float(speed) / float(speeds.max()) * scale)) for speed in speeds)


def measured_ratios(run: str, store: Store | None = None) -> Ratios:
    """Return ratios for machines of uneven speed: see ``measured_speeds`` and ``ratios_of``."""
    return ratios_of(measured_speeds(store or Store(), run))
