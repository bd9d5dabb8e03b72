"""Environments of their own for programs whose packages do not go together with the project's: the class Environment."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import JobError
from tests.clusters.machine import ROOT, cache_folder, locked


@dataclass(frozen=True)
class Environment:
    """An environment in the cache folder. requirements: the file that names each of its packages with its version."""

    name: str
    requirements: Path

    @property
    def folder(self) -> Path:
        """Of this list of packages: another list is another environment."""
        return cache_folder() / f"{self.name}-{hashlib.sha256(self.requirements.read_bytes()).hexdigest()[:12]}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def make(self) -> Path:
        """Its interpreter. It is made where it is not there yet. Raises JobError."""
        ready, uv = self.folder / "ready", shutil.which("uv")
        python = str(self.python)
        with locked(cache_folder()):
            if not ready.exists():
                shutil.rmtree(self.folder, ignore_errors=True)
                venv.create(self.folder, symlinks=True, with_pip=not uv)
                install = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
                print(f"installing {self.requirements.name} into {self.folder}", file=sys.stderr, flush=True)
                packages = ["--quiet", "--no-deps", "--requirement", str(self.requirements)]
                done = subprocess.run([*install, *packages], capture_output=True, text=True)
                if done.returncode != 0:
                    reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
                    raise JobError(f"could not install {self.name}: {reason}")
                ready.touch()
        return self.python


MOTO = Environment("moto", Path(__file__).with_name("moto.txt"))  # 28 packages, 140 MB, 15 s
AIRFLOW = Environment("airflow", ROOT / "conf" / "airflow" / "requirements.txt")  # 137 packages, 660 MB, 60 s
