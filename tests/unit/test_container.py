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


def programs(folder: Path, **texts: str) -> str:
    """Write shell scripts, and return a PATH on which they come first."""
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_an_executor_has_the_jars_that_a_job_adds(tmp_path: Path) -> None:
    needed = (
        "DRIVER_URL", "EXECUTOR_ID", "EXECUTOR_CORES", "EXECUTOR_MEMORY", "APPLICATION_ID", "EXECUTOR_POD_IP",
        "EXECUTOR_POD_NAME", "RESOURCE_PROFILE_ID",
    )  # fmt: skip
    variables = {f"SPARK_{name}": "1" for name in needed}
    variables |= {"SPARK_HOME": "/opt/spark", "SPARK_CLASSPATH": "/extra.jar", "HADOOP_CONF_DIR": "/conf"}
    path = programs(tmp_path, java='echo "$@"')
    done = run("executor", PATH=path, JAVA_HOME="", **variables)
    assert " -cp /conf:/extra.jar:/opt/spark/jars/* " in done.stdout, done.stderr


def test_a_user_by_number_gets_a_name(tmp_path: Path) -> None:
    fake = 'if [ "$1" = -un ]; then exit 1; fi; echo 12345'
    path = programs(tmp_path, id=fake, sharding='echo "$LD_PRELOAD"; cat "$NSS_WRAPPER_PASSWD"')
    done = run("strategies", PATH=path, HOME="/work")
    first, *lines = done.stdout.splitlines()
    assert first == "libnss_wrapper.so"
    assert lines[-1] == "user12345:x:12345:12345::/work:/bin/false"
    assert run("strategies", PATH=programs(tmp_path, id="echo root")).stdout.strip() == ""
