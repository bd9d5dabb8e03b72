"""All-reduce over torch.distributed on real processes: kills and a freeze in any operation, and the same bits after them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.trainer_runs import Training, train_here, until

pytestmark = pytest.mark.full
FLAGS = (
    *(
        "--model",
        "logistic",
        "--batch-size",
        24,
        "--learning-rate",
        0.02,
        "--threads",
        1,
        "--device",
        "cpu",
        "--no-report",
    ),
    *("--quiet", "--exchange", "all-reduce", "--steps", 600, "--no-epoch-checkpoints", "--max-restarts", 100),
)


def disturb(run: Training, role: str, number: int) -> None:
    """Signal a process, and wait until another has its place and the run steps again."""
    pid = run.send(role, number)
    until(lambda: run.pid(role) not in (None, pid), f"{role} is there again")
    before = run.updates()
    until(lambda: run.updates() > before, f"the run steps again with another {role}")


def test_kills_and_a_freeze_in_a_collective_change_no_bit(sets: dict[int, Path], tmp_path: Path) -> None:
    """The run ends with the bits of one without faults, and has each record once. No fault rolls it back."""
    calm = train_here(sets[3], tmp_path / "calm", *FLAGS, "--collective", "torch")
    run = Training(sets[3], tmp_path / "run", *FLAGS, "--collective", "torch")
    try:
        run.wait_for_updates(10)
        for role, number in (
            ("worker-1", signal.SIGKILL),
            ("worker-0", signal.SIGSTOP),
            ("worker-2", signal.SIGKILL),
        ):
            disturb(run, role, number)
        assert run.wait() == 0, run.said()
    finally:
        run.end()
    assert run.vector().tobytes() == calm.vector().tobytes()
    restarts = run.result()["restarts"]
    assert (restarts["worker"], restarts["server"], run.result()["rollbacks"]) == (3, 0, 0)
    pushes = run.pushes()
    used = pushes[pushes["accepted"] == 1]
    assert len(used) == 3 * 600
    assert not used.duplicated(["worker", "clock"]).any()
