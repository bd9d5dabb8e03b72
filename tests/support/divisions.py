"""An oracle of ``--repartition importance``: the division of rows in each interval, from log and example ledger alone."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from trainer.runlog.read import read_pushes

GAP = 3e-6  # importances that are closer may be ranked either way: the run has float32


class DividedRun(NamedTuple):
    """The settings of a run, for equal mini-batches. batch: of all workers."""

    rows: int
    workers: int
    batch: int
    steps: int
    warmup_epochs: int
    ignore_epochs: int
    interval: int
    importance: str = "average"
    heuristic: str = "stripes"

    @property
    def flags(self) -> dict[str, Any]:
        """The options of the command line."""
        names = ("steps", "warmup_epochs", "ignore_epochs", "interval", "importance", "heuristic")
        return {"repartition": "importance", "batch_size": self.batch} | {name: getattr(self, name) for name in names}

    def first_steps(self) -> list[int]:
        """Return the first step of each interval."""
        first = -(-self.warmup_epochs * self.rows // self.batch)
        length = -(-self.interval * -(-self.rows // self.workers) // (self.batch // self.workers))
        fitting = int((self.steps / (self.rows // self.batch) - self.warmup_epochs) // self.interval)
        return [
            first + length * place
            for place in range(max(1, fitting))
            if not place or first + length * place < self.steps
        ]


def drawn_rows(folder: Path, share: int) -> pd.DataFrame:
    """Return the rows of all accepted mini-batches: worker, clock, row (by the order of ids) and loss.

    share: rows of a worker's mini-batch. A push may have several of them, from its clock on."""
    pushes = read_pushes(folder / "pushes.csv")
    pushes = pushes[pushes["accepted"] == 1]
    ledger = pd.concat([pd.read_parquet(path) for path in sorted((folder / "examples").glob("*.parquet"))])
    assert len(ledger) == pushes["examples"].sum()
    number = np.repeat(np.arange(len(pushes)), pushes["examples"])
    clocks = pushes["clock"].to_numpy()[number] + pd.Series(number).groupby(number).cumcount().to_numpy() // share
    rows = np.unique(ledger["id"], return_inverse=True)[1]
    workers = pushes["worker"].to_numpy()[number]
    table = pd.DataFrame({"worker": workers, "clock": clocks, "row": rows, "loss": ledger["loss"].to_numpy()})
    return table.sort_values(["clock", "worker"], kind="stable")


def assert_divided_by_losses(folder: Path, about: DividedRun) -> None:
    """Check every interval of a run: each row has one worker, by the rule applied to the losses of the phase before."""
    drawn = drawn_rows(folder, about.batch // about.workers)
    starts = about.first_steps()
    made = Counter(zip(drawn["worker"], drawn["clock"], strict=True))
    early = {key: count for key, count in made.items() if key[1] < starts[-1]}
    assert set(early) == {(worker, clock) for worker in range(about.workers) for clock in range(starts[-1])}
    assert set(early.values()) == {about.batch // about.workers}
    phases = zip([0, *starts], [*starts, np.inf], strict=True)
    tables = [drawn[(drawn["clock"] >= begin) & (drawn["clock"] < end)] for begin, end in phases]
    for place, (before, now) in enumerate(pairwise(tables)):
        owners = now.groupby("row")["worker"].agg(["min", "max"])
        assert (owners["min"] == owners["max"]).all(), f"a row of interval {place + 1} has two workers"
        # In the last interval, a slow worker may not come to all of its rows.
        assert place + 1 == len(starts) or len(owners) == about.rows
        span = (about.ignore_epochs, about.warmup_epochs) if not place else (0, about.interval)
        values = importance_of(before, *span, about)
        assert_ranked(values, owners["min"], about)


def assert_divided_over_others(folder: Path, about: DividedRun, later: DividedRun, clock: int) -> None:
    """Check a run whose workers change between two steps that all make together.

    about, later: with the workers and the mini-batch before and after ``clock``. Rows that fill the last step of a pass are
    told from its other rows by their places alone."""
    drawn = drawn_rows(folder, about.batch)  # a push has one mini-batch
    starts = [start for start in about.first_steps() if start <= clock]
    if not starts:
        # The epochs of the warm-up are one sequence, in which the workers change.
        dealt = about.warmup_epochs * about.rows
        for epoch in range(about.warmup_epochs):
            rows = drawn["row"].iloc[epoch * about.rows : (epoch + 1) * about.rows]
            assert rows.nunique() == about.rows
        first = clock - (clock * about.batch - dealt) // later.batch
        values = importance_of(drawn[drawn["clock"] < first], about.ignore_epochs, about.warmup_epochs, about)
        passes = about.interval
        before = drawn[:0]
    else:
        begin = starts[-1]
        span = (about.ignore_epochs, about.warmup_epochs) if len(starts) == 1 else (0, about.interval)
        values = importance_of(drawn[(drawn["clock"] < begin) & (drawn["clock"] >= [0, *starts][-2])], *span, about)
        before = drawn[(drawn["clock"] >= begin) & (drawn["clock"] < clock)]
        assert_ranked(values, before.groupby("row")["worker"].first(), about)
        visits = before.groupby("row").size().reindex(range(about.rows), fill_value=0)
        rest = drawn[drawn["clock"] >= clock]
        first = clock
        for turn in range(visits.min() + 1, visits.max() + 1):
            lacking = visits.index[visits < turn]
            part = rest.iloc[(first - clock) * later.batch :][: len(lacking)]
            assert sorted(part["row"]) == sorted(lacking), "the other workers complete a pass"
            before = pd.concat([before, part])
            first += -(-len(lacking) // later.batch)
        passes = about.interval - visits.max()
    # Then each worker makes the passes that are left over its rows by the same importance.
    end = first - (-passes * -(-about.rows // later.workers) // (later.batch // later.workers))
    own = drawn[(drawn["clock"] >= first) & (drawn["clock"] < end)]
    assert not passes or own["row"].nunique() == about.rows
    assert_ranked(values, own.groupby("row")["worker"].first(), later)
    values = importance_of(pd.concat([before, own]), 0, about.interval, about)
    last = drawn[drawn["clock"] >= end]
    owners = last.groupby("row")["worker"].agg(["min", "max"])
    assert len(owners) == about.rows
    assert (owners["min"] == owners["max"]).all()
    assert_ranked(values, owners["min"], later)


def importance_of(before: pd.DataFrame, ignored: int, last: int, about: DividedRun) -> npt.NDArray[np.float64]:
    """Return the importance of each row after a phase: mean or variance of its losses in the visits that count."""
    visits = before.groupby("row").cumcount() + 1
    losses = before[(visits > ignored) & (visits <= last)].astype({"loss": "float64"}).groupby("row")["loss"]
    assert (losses.count() == last - ignored).all()
    assert losses.ngroups == about.rows
    by_variance = about.importance == "variance" and last - ignored > 1
    return np.asarray(losses.var() if by_variance else losses.mean())


def assert_ranked(values: npt.NDArray[np.float64], owners: pd.Series, about: DividedRun) -> None:
    """Check the workers of rows against the ranks of their importance. owners: worker by row, of the rows that have any."""
    order = np.argsort(-values, kind="stable")
    places = np.arange(about.rows)
    size = about.rows // about.workers
    assert about.heuristic == "stripes" or size * about.workers == about.rows
    expected = places % about.workers if about.heuristic == "stripes" else places // size
    # Rows that rounding may rank either way share the places of their group.
    group = np.cumsum(np.concatenate([[False], -np.diff(values[order]) > GAP]))
    actual = owners.reindex(order).to_numpy()
    for number in range(group[-1] + 1):
        wanted, found = Counter(expected[group == number].tolist()), Counter(actual[group == number].tolist())
        known = Counter({worker: count for worker, count in found.items() if worker == worker})
        assert known <= wanted, f"rows {order[group == number]} belong to workers {dict(known)}, not {dict(wanted)}"
    assert group[-1] + 1 > about.rows // 2, "most rows have a rank of their own"
