"""The wheel, installed outside the checkout: what it holds, and that nothing of the checkout is read.

tests/clusters/test_environments.py runs its commands."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from pipeline.spark.package import TRAINER
from pipeline.spark.shipping import PACKAGE, package_zip
from tests.clusters.environments import Wheel, install_wheel

# It builds a wheel and an environment, beside the demo's, which may have to be made.
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
ROOT = PACKAGE.parent
SET_UP = {"conf/setup.sh", "conf/constraints.txt"}  # of a checkout's environment
OF_CHECKOUT = ("conf/airflow/", "conf/container/", "conf/study/results/")
LOCATIONS = """
import pipeline, trainer
from pipeline.core.command_line import CONF
from pipeline.spark.session import spark_defaults
print(pipeline.__file__, trainer.__file__, CONF, sep="\\n")
assert spark_defaults()["spark.sql.session.timeZone"] == "UTC"
assert (CONF / "trainer.toml").is_file()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    return install_wheel(tmp_path_factory.mktemp("wheel").resolve())


def test_the_packages_and_their_defaults_are_the_wheels(installed: Wheel) -> None:
    done = installed.run("python", "-c", LOCATIONS)
    assert done.returncode == 0, done.stderr
    assert all(Path(line).is_relative_to(installed.packages) for line in done.stdout.splitlines()), done.stdout


def test_the_wheel_holds_every_file_of_packages_and_defaults(installed: Wheel) -> None:
    sources = [path for package in ("pipeline", "trainer") for path in (ROOT / package).rglob("*") if path.is_file()]
    ours = [path for path in sources if path.suffix != ".pyc"]
    defaults = [str(path.relative_to(ROOT)) for path in (ROOT / "conf").rglob("*") if path.is_file()]
    expected = {str(path.relative_to(ROOT)) for path in ours}
    expected |= {f"pipeline/{path}" for path in defaults if path not in SET_UP and not path.startswith(OF_CHECKOUT)}
    assert expected == {name for name in zipfile.ZipFile(installed.file).namelist() if ".dist-info/" not in name}


def test_the_guard_of_these_tests_refuses_a_file_of_the_checkout(installed: Wheel) -> None:
    done = installed.run("python", "-c", f"open({str(ROOT / 'pyproject.toml')!r})")
    assert "is the checkout's" in done.stderr


def test_the_zip_for_executors_carries_the_defaults(installed: Wheel, tmp_path: Path) -> None:
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
def test_the_command_says_what_it_offers_without_spark_or_torch(installed: Wheel, flag: str, expected: str) -> None:
    for name in ("pyspark", "torch"):
        (installed.folder / f"{name}.py").write_text("raise SystemExit('imported')")
    done = installed.run("sharding", flag, env={"PYTHONPATH": str(installed.folder)})
    for name in ("pyspark", "torch"):
        (installed.folder / f"{name}.py").unlink()
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_a_job_without_java_is_one_line_that_says_what_to_install(installed: Wheel) -> None:
    start = "from pipeline.spark.session import spark_context\nwith spark_context(): pass"
    done = installed.run("python", "-c", start, env={"JAVA_HOME": "/nowhere"})
    assert done.stderr.splitlines()[-1] == (
        "pipeline.core.errors.JobError: no program /nowhere/bin/java, which Spark needs:"
        " install Java 17 or newer, or set JAVA_HOME to one"
    )
