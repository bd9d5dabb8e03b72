"""The entry point of the container image, and the files that its Dockerfile copies. No image is built here."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.clusters.machine import ROOT

FOLDER = ROOT / "conf" / "container"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
    command = ["bash", str(FOLDER / "entrypoint.sh"), *arguments]
    return subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=False, cwd="/")


@pytest.mark.slow
def test_arguments_are_those_of_sharding() -> None:
    done = run("strategies", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert "stratified" in done.stdout
    assert run("no-such-command", PYTHONPATH=str(ROOT)).returncode == 2


@pytest.mark.parametrize(("role", "name"), [("driver", "SPARK_DRIVER_BIND_ADDRESS"), ("executor", "SPARK_DRIVER_URL")])
def test_a_role_of_spark_needs_its_variables(role: str, name: str) -> None:
    done = run(role, SPARK_HOME="/nowhere")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"error: {name} is not set: ")


def test_the_dockerfile_copies_files_that_exist() -> None:
    """And the ignore file lets them through."""
    text = (FOLDER / "Dockerfile").read_text()
    sources = [name for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for name in line.split()[:-1]]
    allowed = [line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"]
    assert sources
    for name in sources:
        assert (ROOT / name).exists()
        assert Path(name).parts[0] in allowed
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["1000:1000"]


def test_the_job_of_the_page_is_valid_yaml() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    (container,) = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "train"
