"""MLlib's stop rule, and what a roll-back or a resume leaves of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import JobError, UsageError
from tests.support.virtual_runs import RESUME, final, virtual
from trainer.checkpoints.read import read_state
from trainer.checkpoints.state import RunState
from trainer.config import RunFacts
from trainer.coordination.convergence import Convergence
from trainer.leader.snapshots import Snapshots
from trainer.rules import build_coordinator
from trainer.runlog.run_record import read_record
from trainer.stages import build_stages

TOLERANCE, WORKERS = 0.25, 3


def converged_at(moves: Sequence[float], size: int, *, resumed_at: int = 0) -> int | None:
    """The accepted gradients at which a run ends whose updates of ``size`` gradients move its parameter so far.

    resumed_at: accepted gradients of the checkpoint that it goes on from."""
    values = np.cumsum(moves)
    now = {"accepted": resumed_at}

    def read() -> np.ndarray:
        return values[now["accepted"] // size - 1 :][:1].astype(np.float32)

    rule = Convergence(TOLERANCE, WORKERS, read, accepted=resumed_at, update_size=size)
    for now["accepted"] in range(resumed_at + size, len(moves) * size + 1, size):
        if rule.is_reached(now["accepted"]):
            return now["accepted"]
    return None


@pytest.mark.parametrize(("size", "moves"), [(3, [1, 1, 1, 0.1, 1]), (1, [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0.1, 1])])
def test_a_run_ends_at_the_same_mini_batch_after_a_roll_back(size: int, moves: list[float]) -> None:
    """The checkpoint is one at the end of a mini-batch."""
    assert converged_at(moves, size) == 12
    for resumed_at in (3, 6, 9):
        assert converged_at(moves, size, resumed_at=resumed_at) == 12


def test_the_first_mini_batch_of_a_run_is_compared_with_nothing() -> None:
    assert converged_at([0.1, 1, 1], 3) is None
    assert converged_at([1, 0, 0, 0, 0, 0], 1) == 6


@pytest.mark.parametrize(("begin", "others"), [(4, 2), (5, 2), (4, 4)])
def test_other_workers_count_mini_batches_of_their_own(begin: int, others: int) -> None:
    """Compare their first one with the checkpoint with which they began, also after a resume at the end of it."""
    moves = [1.0] * (begin + others) + [0.0] * (2 * others)
    values = np.cumsum(moves)
    for resumed_at in (begin, begin + others):
        now = {"accepted": resumed_at}
        rule = Convergence(
            TOLERANCE,
            others,
            lambda now=now: values[[now["accepted"] - 1]].astype(np.float32),  # type: ignore[misc]
            accepted=resumed_at,
            begin=begin,
        )
        ends = []
        for now["accepted"] in range(resumed_at + 1, len(moves) + 1):
            if rule.is_reached(now["accepted"]):
                ends.append(now["accepted"])
        assert ends == [begin + 2 * others, begin + 3 * others]


def test_the_first_mini_batch_of_others_is_compared() -> None:
    rule = Convergence(TOLERANCE, WORKERS, lambda: np.ones(1, np.float32), accepted=4, begin=4)
    assert [accepted for accepted in range(5, 9) if rule.is_reached(accepted)] == [7]


def test_within_a_mini_batch_a_resume_compares_with_the_next_one() -> None:
    assert converged_at([1] * 9 + [0] * 6, 1, resumed_at=10) == 15


@pytest.mark.parametrize("values", [{"protocol": "bsp"}, {"protocol": "asp", "stop": "local"}], ids=str)
def test_a_converged_run_killed_before_its_result_ends_again(values: dict[str, Any], tmp_path: Path) -> None:
    """Kill it twice, because the second start writes the final checkpoint again. A longer run trains on."""
    done = virtual(tmp_path, tolerance=1e6, **values)
    parameters = final(done).tobytes()
    log = (tmp_path / "pushes.csv").read_bytes()
    assert (done.converged, done.updates < 30) == (True, True)
    for _ in range(2):
        (tmp_path / "result.json").unlink()
        with pytest.raises(UsageError, match="finished at this length: --workers 3 --batch-size 40 instead of"):
            virtual(tmp_path, options=RESUME, tolerance=1e6, workers=3, **values)
        again = virtual(tmp_path, options=RESUME, tolerance=1e6, **values)
        assert (again.converged, again.updates, final(again).tobytes()) == (True, done.updates, parameters)
        assert (tmp_path / "pushes.csv").read_bytes() == log
    longer = virtual(tmp_path, options=RESUME, tolerance=1e6, steps=40, **values)
    assert longer.updates > done.updates
    others = virtual(tmp_path, options=RESUME, tolerance=1e6, steps=50, workers=3, **values)
    assert others.updates > longer.updates


def test_a_run_that_converges_with_an_epoch_ends_there_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill it once the checkpoint of the epoch is complete, before the final one of the same version."""
    values: dict[str, Any] = {"protocol": "bsp", "tolerance": 1e6, "rows": 80, "epoch_checkpoints": True}
    done = virtual(tmp_path / "calm", **values)
    begin = Snapshots.begin

    def killed(self: Snapshots, sequence: int, state: RunState, now: float, *, is_needed: bool = False) -> None:
        if state.final:
            raise JobError("killed")
        begin(self, sequence, state, now, is_needed=is_needed)

    with monkeypatch.context() as patched:
        patched.setattr(Snapshots, "begin", killed)
        with pytest.raises(JobError, match=r"^killed$"):
            virtual(tmp_path / "run", **values)
    state = read_state(tmp_path / "run" / "checkpoints", 2)
    assert (state.epoch_boundary, state.final) == (1, False)
    (stage,) = build_stages(read_record(tmp_path / "run").config, 4, 80)
    assert build_coordinator(stage, RunFacts(4, 80, 64, 0), state, 1).finished, "after a roll-back, too"
    again = virtual(tmp_path / "run", options=RESUME, **values)
    assert (again.converged, again.updates) == (done.converged, done.updates) == (True, 2)
    assert final(again).tobytes() == final(done).tobytes()
