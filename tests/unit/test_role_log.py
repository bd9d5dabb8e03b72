"""The supervisor's lines in the logs of roles."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.launch.role_log import RoleLog


def test_lines_have_the_time_and_the_role(tmp_path: Path) -> None:
    log = RoleLog(tmp_path / "worker-1.log", "worker-1")
    log.path.write_text("a line of the process\n")
    log.add("starts")
    log.add("has ended: killed by SIGKILL")
    first, *rest = log.path.read_text().splitlines()
    assert first == "a line of the process"
    assert [re.fullmatch(r"[\dTZ:-]{20} worker-1 (.*)", line)[1] for line in rest] == [  # type: ignore[index]
        "starts", "has ended: killed by SIGKILL",
    ]  # fmt: skip


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    RoleLog(tmp_path / "no folder" / "worker-1.log", "worker-1").add("starts")
