"""A working folder whose files are named like modules: neither our programs nor their processes import them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline.core.import_path import SAFE_PATH, child_variables, handed_on
from pipeline.spark.shipping import PACKAGE

pytestmark = pytest.mark.slow  # processes of its own

NAMES = ("torch", "numpy", "json", "socket", "selectors", "pyarrow", "zmq", "safetensors")
EXPLAIN = """
from pipeline.core.import_path import hiding_file
import safetensors
for code in ("from safetensors import safe_open", "import safetensors.numpy", "safetensors.safe_open", "import nothing"):
    try:
        exec(code)
    except (ImportError, AttributeError) as error:
        print(hiding_file(error))
"""


def hide(folder: Path, *names: str) -> Path:
    """Put files into a folder that end whoever imports them."""
    for name in names:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the working folder was imported')\n")
    return folder


def run_python(
    folder: Path, *arguments: str, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != SAFE_PATH}
    environment |= {"PYTHONPATH": str(PACKAGE.parent)} if variables is None else variables
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("program", "hidden"), [("trainer", ("pipeline", *NAMES)), ("trainer.simulate", NAMES), ("pipeline", NAMES)]
)
def test_a_program_imports_nothing_from_the_folder(tmp_path: Path, program: str, hidden: tuple[str, ...]) -> None:
    done = run_python(hide(tmp_path, *hidden), "-m", program, "--help")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "usage: " in done.stdout


def test_another_program_keeps_its_working_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import helper, pipeline, trainer\nprint(helper.__file__)\n")
    (tmp_path / "helper.py").touch()
    assert run_python(tmp_path, "-m", "mine").stdout.strip() == str(tmp_path / "helper.py")


def test_a_child_has_the_path_of_its_parent_alone(tmp_path: Path) -> None:
    code = "import pipeline, socket; print(*pipeline.__path__)"
    done = run_python(hide(tmp_path, "pipeline", "socket"), "-c", code, variables=child_variables())
    assert done.stdout.strip() == str(PACKAGE), done.stderr


def test_folders_that_a_program_adds_are_told_apart(tmp_path: Path) -> None:
    """Tasks may have another interpreter, which has its own packages."""
    code = (
        "import sys; sys.path.insert(0, 'added'); from pipeline.core.import_path import added_folders;"
        " print(*added_folders(), sep='\\n')"
    )
    done = run_python(tmp_path, "-P", "-c", code, variables={"PYTHONPATH": f"{PACKAGE.parent}:{tmp_path}/of-variable"})
    folders = done.stdout.splitlines()
    assert folders[:3] == [f"{tmp_path}/added", str(PACKAGE.parent), f"{tmp_path}/of-variable"]
    assert not [folder for folder in folders if "site-packages" in folder or folder.endswith(".zip")]


def test_the_environment_is_as_before_once_it_was_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.delenv(SAFE_PATH, raising=False)
    with handed_on():
        assert (os.environ[SAFE_PATH], os.environ["PYTHONPATH"] != "before") == ("1", True)
    assert (os.environ.get(SAFE_PATH), os.environ["PYTHONPATH"]) == (None, "before")


def test_a_file_that_hides_a_module_is_named(tmp_path: Path) -> None:
    (tmp_path / "safetensors.py").touch()
    done = run_python(tmp_path, "-c", EXPLAIN)
    line = (
        f"{tmp_path / 'safetensors.py'} hides the installed module safetensors: rename it, or run from another folder"
    )
    assert done.stdout.splitlines() == [line, line, line, "None"], done.stderr


def test_a_file_that_hides_a_module_ends_with_a_line(tmp_path: Path) -> None:
    """Such a folder cannot be left: the program itself is imported from there."""
    for package in ("pipeline", "trainer"):
        (tmp_path / package).symlink_to(PACKAGE.parent / package)
    (tmp_path / "numpy.py").touch()
    done = run_python(tmp_path, "-m", "trainer", "--help", variables={})
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'numpy.py'} hides the installed module numpy: "), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_fork_server_starts_though_tmpdir_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path of a Unix socket has 107 bytes at most."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    code = "from trainer.launch.fork_server import FORK_SERVER as f; f.ensure(); f.end(); f.ensure(); print(f.pid); f.end()"
    done = run_python(tmp_path, "-c", code, variables={"PYTHONPATH": str(PACKAGE.parent), "TMPDIR": str(folder)})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
