"""The interpreter that a cluster's machines run tasks with: the installed packages without this project."""

from __future__ import annotations

import functools
import sysconfig
import tempfile
import venv
from pathlib import Path

from tests.clusters.processes import watcher


@functools.cache
def executor_python() -> Path:
    """A virtual environment's python that imports the packages of the running interpreter, and not this project.

    `make setup` installs the project in editable mode: a .pth file in site-packages names the checkout. The environment
    has a .pth file of its own that names those site-packages. Python reads no .pth file in a folder found that way.
    """
    folder = Path(tempfile.mkdtemp(prefix="sharding-python-"))
    watcher.watch("folder", folder)
    venv.create(folder, symlinks=True, with_pip=False)
    packages = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    own = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
    Path(own, "packages.pth").write_text("\n".join(sorted(packages)))
    return folder / "bin" / "python"
