"""conf/setup.sh: its choice of the program that installs packages."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clusters.machine import ROOT


def write_program(path: Path, line: str) -> Path:
    """Write a shell script of one line, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


def select_uv(venv: Path, *folders: Path) -> str:
    """Run the function find_uv of the script with a PATH of folders and grep, and return the uv that it sets."""
    text = (ROOT / "conf" / "setup.sh").read_text()
    [function] = re.findall(r"^find_uv\(\) \{$.*?^\}$", text, re.MULTILINE | re.DOTALL)
    script = f'set -euo pipefail; venv={venv}; pip_install() {{ true; }}\n{function}\nfind_uv; echo "$uv"'
    tools = venv / "tools"  # without the machine's own uv
    tools.mkdir(parents=True)
    (tools / "grep").symlink_to(str(shutil.which("grep")))
    env = {"PATH": ":".join(map(str, (*folders, tools)))}
    command = [str(shutil.which("bash")), "-c", script]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("setting", ["global.index-url='https://mirror/simple'", "global.timeout='60'"])
def test_uv_is_not_used_with_an_index_of_pip(setting: str, active: bool, installed: bool, tmp_path: Path) -> None:
    """Set up again. installed: uv is there from an earlier set-up; active: the environment is on PATH."""
    bins = tmp_path / "bin"
    write_program(bins / "python", f'echo "{setting}"')
    if installed:
        write_program(bins / "uv", "true")
    assert select_uv(tmp_path, *[bins] * active) == ("" if "index" in setting else f"{bins}/uv")


def test_a_uv_of_the_machine_is_used(tmp_path: Path) -> None:
    uv = write_program(tmp_path / "bin" / "uv", "true")
    assert select_uv(tmp_path / "venv", uv.parent) == str(uv)
