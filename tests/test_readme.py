"""The README's commands are run as they stand, in a copy of its world: the checkout, with its own build folder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.spark.session import PACKAGE

ROOT = PACKAGE.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"<!-- run -->\n```(bash|python)\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_readmes_commands_run_as_they_stand(tmp_path: Path) -> None:
    if not (ROOT / ".venv" / "env.sh").exists():
        pytest.skip("run through `make test`: the README's environment, .venv/env.sh, is not set up")
    for name in ("jobs", "conf", "pipeline", "trainer", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    assert [kind for kind, _ in BLOCKS] == ["bash", "python"]
    for kind, text in BLOCKS:
        command = ["bash", "-euo", "pipefail", "-c", text] if kind == "bash" else [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(list((tmp_path / "build").glob("*/manifest.json"))) == 4
    assert (tmp_path / "build" / "compare" / "compare.html").exists()
    assert (tmp_path / "build" / "run-asp" / "report.html").exists()


def test_every_strategy_protocol_model_job_and_make_target_the_readme_names_exists() -> None:
    from pipeline.strategies import STRATEGIES
    from trainer.models import MODELS
    from trainer.protocols import PROTOCOLS

    for name in (*STRATEGIES, *PROTOCOLS, *MODELS):
        assert f"`{name}`" in README
    for job in re.findall(r"jobs/(\w+\.py)", README):
        assert (ROOT / "jobs" / job).is_file()
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"make ([a-z][\w-]+)", README):
        assert target in targets
    assert shutil.which("make")
