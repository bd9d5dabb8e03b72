"""The report templates, loaded from the zip that a Spark job ships at the path where an executor imports it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.spark.package import TRAINER
from pipeline.spark.shipping import PACKAGE, package_zip
from tests.clusters.machine import ROOT

# As a task of Spark does it: site, which starts with the interpreter, would take "/./" out of PYTHONPATH.
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import pipeline, trainer
from pipeline.core.reporting.page import template

sources = {}
for package, name in json.loads(sys.argv[2]):
    try:
        sources[f"{package} {name}"] = template(package, name).name
    except Exception as error:
        sources[f"{package} {name}"] = repr(error)
print(json.dumps({"pipeline": pipeline.__file__, "trainer": trainer.__file__, "sources": sources}))
"""


def templates() -> Iterator[tuple[str, str]]:
    """Yield the package and the file name of every template of the product."""
    for package in (PACKAGE, TRAINER):
        for file in sorted(package.rglob("templates/*")):
            yield ".".join(file.parent.parent.relative_to(ROOT).parts), file.name


TEMPLATES = list(templates())


def test_every_template_of_the_product_is_known() -> None:
    assert {("pipeline.quality", "report.html"), ("trainer.report", "report.html")} <= set(TEMPLATES)


@pytest.fixture(scope="module")
def zip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a zip for executors."""
    folder = tmp_path_factory.mktemp("shipped")
    package_zip(folder / "packages.zip", PACKAGE, TRAINER)
    return folder


def test_packages_dated_1970_are_shipped_too(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "__init__.py").touch()
    os.utime(tmp_path / "small" / "__init__.py", (0, 0))
    target = package_zip(tmp_path / "packages.zip", tmp_path / "small")
    assert zipfile.ZipFile(target).namelist() == ["small/__init__.py"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["{}/packages.zip", "{}/./packages.zip"])
def test_templates_load_from_a_shipped_zip(zip_folder: Path, where: str) -> None:
    """The root of SparkFiles is ".", so an executor's path of a zip contains "/./"."""
    zipped = where.format(zip_folder)
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, zipped, json.dumps(TEMPLATES)],
        cwd=zip_folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout)
    assert about["pipeline"].startswith(zipped)
    assert about["trainer"].startswith(zipped)
    assert about["sources"] == {f"{package} {name}": name for package, name in TEMPLATES}
