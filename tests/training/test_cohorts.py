"""Real runs that are killed with SIGKILL and resumed with another number of workers and another mini-batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.trainer_runs import Training, train_here, until
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from trainer.checkpoints.read import newest, read_state
from trainer.coordination.passes import WORD
from trainer.data.shards import load_worker, open_shards
from trainer.runlog.kinds import PassEvent
from trainer.runlog.read import iter_events, surviving_events

COMMON = ("--model", "logistic", "--learning-rate", 0.02, "--threads", 1, "--no-report", "--quiet")
CASES = [
    pytest.param(("--protocol", "asp", "--servers", 2), 5, id="asp"),
    pytest.param(("--protocol", "bsp"), 2, marks=pytest.mark.full, id="bsp"),
    pytest.param(("--exchange", "all-reduce"), 4, marks=pytest.mark.full, id="all-reduce"),
]


@pytest.fixture
def runs() -> Iterator[list[Training]]:
    """Runs that the test has started, which are ended whatever it does."""
    started: list[Training] = []
    yield started
    for run in started:
        run.end()


@pytest.mark.parametrize(("flags", "workers"), CASES)
def test_a_killed_run_resumes_with_other_workers(
    flags: tuple[str, ...], workers: int, tmp_path: Path, runs: list[Training]
) -> None:
    """Every pass has the fingerprint of all rows, also the interrupted pass."""
    parts = [rows_of(size, 10 + number, 1000 * number) for number, size in enumerate((400, 290, 450))]
    shards = write_shards(tmp_path / "set", parts, EVAL_ROWS)
    output = tmp_path / "run"
    own = (*COMMON, *flags, "--checkpoint-every-s", 0.3, "--no-epoch-checkpoints")
    run = Training(shards, output, *own, "--batch-size", 24, "--steps", 100_000)
    runs.append(run)
    until(lambda: newest(output / "checkpoints"), "a checkpoint after the first")
    run.end()
    version = newest(output / "checkpoints", verify=True)
    assert version is not None
    steps = max(read_state(output / "checkpoints", version).clocks.values()) + 100
    train_here(shards, output, *own, "--batch-size", 50, "--steps", steps, "--resume", "--workers", workers)
    live = [each for each in surviving_events(iter_events(output / "metrics.jsonl")) if isinstance(each, PassEvent)]
    assert [each.first for each in live] == [1, *(each.last + 1 for each in live[:-1])]
    assert (live[-1].version or 0) > version
    # The manifest of this set has no fingerprint: it is summed up here.
    opened = open_shards(str(shards))
    total = sum(int(hash_) for worker in range(3) for hash_ in load_worker(opened, worker).hashes)
    assert [each.fingerprint for each in live] == [
        f"{total * (each.last - each.first + 1) % WORD:016x}" for each in live
    ]
