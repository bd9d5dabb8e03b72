"""The wheel, installed outside the checkout: its commands and defaults work, and nothing of the checkout is read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.spark.package import TRAINER
from pipeline.spark.session import PACKAGE, package_zip
from tests.clusters.artifacts import find_java, java_home

pytestmark = pytest.mark.full  # builds a wheel and an environment; a set is sharded and trained on in it
ROOT = PACKAGE.parent
STORED_STUDIES = ROOT / "trainer" / "study" / "results"
SET_UP = {"conf/setup.sh", "conf/constraints.txt"}  # of a checkout's environment
EXAMPLE = "conf/airflow/"  # which names a checkout
WEIGHT_DECAY = 5e-3  # in the installed trainer.toml; no other file says so
# Every Python process of the environment runs this when it starts. {allowed}: where the third-party packages are.
GUARD = """
import sys

def refuse(event, args):
    if event in ("open", "os.listdir", "os.scandir") and str(args[0]).startswith({root!r}):
        if not str(args[0]).startswith({allowed!r}):
            raise PermissionError(f"{{args[0]}} is the checkout's")

sys.addaudithook(refuse)
"""
LOCATIONS = """
import pipeline, trainer
from pipeline.command_line import CONF
from pipeline.spark.session import spark_defaults
print(pipeline.__file__, trainer.__file__, CONF, sep="\\n")
assert spark_defaults()["spark.sql.session.timeZone"] == "UTC"
assert (CONF / "trainer.toml").is_file()
"""


@dataclass(frozen=True)
class Installed:
    """A virtual environment that holds the wheel. folder: where its commands run."""

    venv: Path
    folder: Path

    @property
    def packages(self) -> Path:
        (found,) = self.venv.glob("lib/python*/site-packages")
        return found

    def run(self, *command: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment."""
        program, *arguments = map(str, command)
        own = ("PYTHON", "PYSPARK_", "SPARK_", "VIRTUAL_ENV", "JAVA_HOME")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(own)}
        settings = {"JAVA_HOME": str(java_home(find_java())), "SPARK_LOCAL_IP": "127.0.0.1", **(env or {})}
        return subprocess.run(
            [str(self.venv / "bin" / program), *arguments],
            env={**kept, **settings},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )


def make_venv(venv: Path, wheel: Path) -> None:
    if shutil.which("uv"):  # as conf/setup.sh does
        subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, venv], check=True)
        install = ["uv", "pip", "install", "--quiet", "--python", str(venv / "bin" / "python")]
    else:
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        install = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", wheel], check=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel").resolve()
    build: list[str | Path] = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = folder.glob("*.whl")
    make_venv(folder / "venv", wheel)
    (folder / "work").mkdir()
    here = Installed(folder / "venv", folder / "work")
    # A folder that a .pth line names is searched, but its own .pth files, such as an editable install's, are not run.
    third_party = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (here.packages / "third_party.pth").write_text("\n".join(third_party))
    guard = GUARD.format(root=f"{ROOT}/", allowed=f"{ROOT}/.venv/")
    (here.packages / "checkout_guard.py").write_text(guard)
    (here.packages / "checkout_guard.pth").write_text(
        "import checkout_guard\n"
    )  # a distribution may have a sitecustomize
    settings = here.packages / "pipeline" / "conf" / "trainer.toml"
    settings.write_text(settings.read_text().replace("weight_decay = 2e-4", f"weight_decay = {WEIGHT_DECAY}"))
    return here


def test_the_packages_and_their_defaults_are_the_wheels(installed: Installed) -> None:
    done = installed.run("python", "-c", LOCATIONS)
    assert done.returncode == 0, done.stderr
    assert all(Path(line).is_relative_to(installed.packages) for line in done.stdout.splitlines()), done.stdout


def test_the_wheel_holds_every_file_of_the_packages_and_of_the_defaults(installed: Installed) -> None:
    sources = [path for package in ("pipeline", "trainer") for path in (ROOT / package).rglob("*") if path.is_file()]
    ours = [path for path in sources if path.suffix != ".pyc" and STORED_STUDIES not in path.parents]
    defaults = [str(path.relative_to(ROOT)) for path in (ROOT / "conf").rglob("*") if path.is_file()]
    expected = {str(path.relative_to(ROOT)) for path in ours}
    expected |= {f"pipeline/{path}" for path in defaults if path not in SET_UP and not path.startswith(EXAMPLE)}
    (wheel,) = installed.venv.parent.glob("*.whl")
    assert expected == {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_guard_of_these_tests_refuses_a_file_of_the_checkout(installed: Installed) -> None:
    done = installed.run("python", "-c", f"open({str(ROOT / 'pyproject.toml')!r})")
    assert "is the checkout's" in done.stderr


def test_a_set_is_made_sharded_and_trained_on_without_the_checkout(installed: Installed) -> None:
    shard = ["sharding", "shard", "--strategy", "stratified"]
    train = ["sharding", "train", "--shards", "shards", "--output", "run", "--model", "logistic", "--steps", 2]
    for command in (
        ["sharding", "sample", "--to", "sample", "--rows", 400, "--test-rows", 40],
        [*shard, "--input", "sample", "--eval-input", "sample", "--output", "shards", "--workers", 2, "--no-report"],
        [*train, "--batch-size", 20],
    ):
        done = installed.run(*command)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert "checkout's" not in done.stdout + done.stderr
        assert " WARN " not in done.stderr, "the log settings that came with the wheel hide these"
    config = json.loads((installed.folder / "run" / "config.json").read_text())["config"]
    assert config["optimiser"]["weight_decay"] == WEIGHT_DECAY
    assert (installed.folder / "run" / "model.safetensors").exists()


def test_the_zip_for_executors_carries_the_defaults(installed: Installed, tmp_path: Path) -> None:
    assert installed.run("sharding", "zip", "--to", tmp_path / "wheel.zip").returncode == 0
    package_zip(tmp_path / "checkout.zip", PACKAGE, TRAINER)
    names = [zipfile.ZipFile(tmp_path / f"{kind}.zip").namelist() for kind in ("wheel", "checkout")]
    assert sorted(names[0]) == sorted(names[1])
    for kind in ("wheel", "checkout"):
        done = installed.run("python", "-c", LOCATIONS, env={"PYTHONPATH": str(tmp_path / f"{kind}.zip")})
        assert done.returncode == 0, done.stderr
        package, _, conf = done.stdout.splitlines()
        assert package.startswith(str(tmp_path))
        assert conf.startswith(str(tmp_path))


@pytest.mark.parametrize(("flag", "expected"), [("--help", "train "), ("--version", "sharding 0.1.0")])
def test_the_command_says_what_it_offers_without_spark_or_torch(installed: Installed, flag: str, expected: str) -> None:
    for name in ("pyspark", "torch"):
        (installed.folder / f"{name}.py").write_text("raise SystemExit('imported')")
    done = installed.run("sharding", flag, env={"PYTHONPATH": str(installed.folder)})
    for name in ("pyspark", "torch"):
        (installed.folder / f"{name}.py").unlink()
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


@pytest.mark.parametrize(("command", "needs", "extra"), [("train", "TRAINER", "trainer"), ("study", "STUDY", "study")])
def test_training_without_its_extra_is_one_line_that_names_it(
    command: str, needs: str, extra: str, installed: Installed
) -> None:
    without = f"from pipeline import entry; entry.{needs}_NEEDS = ('no_such_module',); entry.main(['{command}'])"
    done = installed.run("python", "-c", without)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: {command} needs no_such_module, which is not installed: pip install 'sharding[{extra}]'"
    ]


def test_a_job_without_java_is_one_line_that_says_what_to_install(installed: Installed) -> None:
    start = "from pipeline.spark.session import spark_context\nwith spark_context(): pass"
    done = installed.run("python", "-c", start, env={"JAVA_HOME": "/nowhere"})
    assert done.stderr.splitlines()[-1] == (
        "pipeline.errors.JobError: no program /nowhere/bin/java, which Spark needs:"
        " install Java 17 or newer, or set JAVA_HOME to one"
    )
