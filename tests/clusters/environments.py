"""The environments beside the checkout's .venv, each made once in the cache folder.

Environment holds a list of packages that do not go together with the project's. DemoEnvironment is what `make demo`
installs. Wheel is an installation without the checkout. `python -m tests.clusters.environments` makes them, and downloads
the servers of the clusters, so that no test does."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import JobError
from tests.clusters.archives import make_archives
from tests.clusters.artifacts import (
    find_java,
    java_home,
    kafka_classpath,
    kafka_connector,
    lake_jars,
    minikdc_classpath,
    yarn_classpath,
)
from tests.clusters.machine import HOST, ROOT, cache_folder, locked
from tests.clusters.settings import QUICK_START

# Variables of the tests' own environment, which a command of another one must not inherit.
OWN = ("PYTHON", "PYSPARK_", "SPARK_", "VIRTUAL_ENV")
# The files of the checkout that its set-up reads, or that the installed package is made of.
CHECKOUT = ("pipeline", "jobs", "trainer", "conf", "pyproject.toml", "README.md", "LICENSE", "Makefile")
INSTALLERS = [ROOT / "conf" / "constraints.txt", ROOT / "conf" / "setup.sh"]


@dataclass(frozen=True)
class Environment:
    """An environment in the cache folder. requirements: the file that names each of its packages with its version."""

    name: str
    requirements: Path

    @property
    def folder(self) -> Path:
        """The environment's folder, which depends on the list of packages."""
        return cache_folder() / f"{self.name}-{digest([self.requirements])}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        (folder,) = self.folder.glob("lib/python*/site-packages")
        return folder

    def make(self) -> Path:
        """Return its interpreter. It is made where it is not there yet. Raises JobError."""
        ready, uv = self.folder / "ready", shutil.which("uv")
        python = str(self.python)
        with locked(cache_folder()):
            if not ready.exists():
                remove_predecessors(self.folder)
                venv.create(self.folder, symlinks=True, with_pip=not uv)
                install = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
                print(f"installing {self.requirements.name} into {self.folder}", file=sys.stderr, flush=True)
                packages = ["--quiet", "--no-deps", "--requirement", str(self.requirements)]
                run_setup(self.name, [*install, *packages], {**os.environ, **self.build_variables()})
                ready.touch()
        return self.python

    def build_variables(self) -> dict[str, str]:
        """Return the variables with which its packages are compiled."""
        return {}


class KerberosEnvironment(Environment):
    """The packages of ``hdfs[kerberos]``, compiled with the headers of MIT Kerberos: the system's, or Debian's packages.

    Debian's are unpacked into the environment, so nothing is installed and only a Debian system has them."""

    def build_variables(self) -> dict[str, str]:
        """Return the variables with which its packages are compiled. Raises JobError where there are no headers."""
        if shutil.which("krb5-config"):
            return QUICK_BUILD
        root = self.folder / "headers"
        root.mkdir()
        run_setup(self.name, ["bash", "-c", UNPACK_HEADERS, str(root), *HEADERS])
        (libraries,) = (root / "usr" / "lib").glob("*/mit-krb5")
        config = root / "bin" / "krb5-config"
        config.parent.mkdir()
        places = {"prefix": f"{root}/usr", "includedir": f"{root}/usr/include/mit-krb5", "libdir": str(libraries)}
        text = (root / "usr" / "bin" / "krb5-config.mit").read_text()
        for name, place in places.items():
            text = re.sub(rf"^{name}=.*", f"{name}={place}", text, flags=re.MULTILINE)
        config.write_text(text)
        config.chmod(0o755)
        path = os.pathsep.join([str(config.parent), os.environ.get("PATH", os.defpath)])
        return {
            **QUICK_BUILD,
            "PATH": path,
            "CPATH": f"{root}/usr/include",
            "LIBRARY_PATH": str(libraries.parent),
        }


@dataclass(frozen=True)
class DemoEnvironment:
    """The .venv that `make demo` leaves: made by conf/setup.sh with the extra trainer, in a copy of the checkout.

    Nothing in it leads to a copy of the project: its commands run the checkout's code when their folder or PYTHONPATH is
    the checkout, and executors with its interpreter have only what a job ships."""

    name: str = "demo"

    @functools.cached_property
    def folder(self) -> Path:
        """The copy's folder, which depends on what the set-up installed when this process asked first."""
        return cache_folder() / f"{self.name}-{digest(INSTALLERS, describe_package())}"

    @property
    def venv(self) -> Path:
        return self.folder / ".venv"

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def packages(self) -> Path:
        (folder,) = self.venv.glob("lib/python*/site-packages")
        return folder

    def make(self) -> Path:
        """Return its interpreter. It is made where it is not there yet. Raises JobError."""
        with locked(cache_folder()):
            if not (self.folder / "ready").exists():
                remove_predecessors(self.folder)
                self._set_up()
                (self.folder / "ready").touch()
            # env.sh reads two settings from these files, so they follow the checkout.
            copy_checkout(self.folder, "conf")
        return self.python

    def _set_up(self) -> None:
        copy_checkout(self.folder, *CHECKOUT)
        print(f"setting up {self.venv} as make demo does", file=sys.stderr, flush=True)
        env = {**foreign_environment(), "PYTHON": sys.executable}
        run_setup(self.name, ["bash", str(self.folder / "conf" / "setup.sh"), "trainer"], env)
        # The editable install's pointer would hide that a job ships too little, and would run the copy's old code.
        pointers = [file for file in self.packages.glob("*.pth") if str(self.folder) in file.read_text().splitlines()]
        if len(pointers) != 1:
            raise JobError(f"{self.name}: {len(pointers)} .pth files lead to {self.folder}, expected one")
        pointers[0].unlink()
        for name in ("pipeline", "jobs", "trainer"):
            shutil.rmtree(self.folder / name)

    @functools.cached_property
    def variables(self) -> dict[str, str]:
        """The variables that `. .venv/env.sh` sets, and the interpreters of Spark's driver and tasks."""
        self.make()
        before = foreign_environment()
        script = ["bash", "-c", '. "$0" && exec env -0', str(self.venv / "env.sh")]
        output = subprocess.run(script, env=before, capture_output=True, text=True, check=True).stdout
        after = dict(line.split("=", 1) for line in output.split("\0") if line)
        new = {name: value for name, value in after.items() if before.get(name) != value and name != "_"}
        return {**new, "PYSPARK_PYTHON": str(self.python), "PYSPARK_DRIVER_PYTHON": str(self.python)}

    def run(
        self, *command: object, cwd: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment as a user does after `. .venv/env.sh`."""
        settings = {**foreign_environment(), **self.variables, "SPARK_LOCAL_IP": HOST, **(env or {})}
        return run_program(self.venv, *command, cwd=cwd, env=settings)


def remove_predecessors(folder: Path) -> None:
    """Delete an unfinished environment, and those of earlier lists of packages: one with torch has gigabytes."""
    name = folder.name.rpartition("-")[0]
    for old in folder.parent.glob(f"{name}-*"):
        shutil.rmtree(old, ignore_errors=True)


@dataclass(frozen=True)
class Wheel:
    """A virtual environment that holds the project's wheel, beside it. folder: where its commands run."""

    venv: Path
    folder: Path

    @property
    def packages(self) -> Path:
        (folder,) = self.venv.glob("lib/python*/site-packages")
        return folder

    @property
    def file(self) -> Path:
        (wheel,) = self.venv.parent.glob("*.whl")
        return wheel

    def run(self, *command: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment."""
        java = {"JAVA_HOME": str(java_home(find_java())), "JDK_JAVA_OPTIONS": " ".join(QUICK_START)}
        settings = {**java, "SPARK_LOCAL_IP": HOST, **(env or {})}
        return run_program(self.venv, *command, cwd=self.folder, env={**foreign_environment(), **settings})


# Every Python process of a wheel's environment runs this when it starts. allowed: where its packages are.
GUARD = """
import sys

def refuse(event, args):
    if event in ("open", "os.listdir", "os.scandir") and str(args[0]).startswith({root!r}):
        if not str(args[0]).startswith({allowed!r}):
            raise PermissionError(f"{{args[0]}} is the checkout's")

sys.addaudithook(refuse)
"""


def install_wheel(folder: Path) -> Wheel:
    """Build the checkout's wheel and install it as `pip install '.[trainer]'` does, into an environment in the folder.

    The packages that it needs are the demo environment's, which the same extra brought. Its processes are refused every
    file of the checkout."""
    DEMO.make()
    build: list[str | Path] = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True)
    wheel = Wheel(folder / "venv", folder / "work")
    python = wheel.venv / "bin" / "python"
    uv = shutil.which("uv")  # as conf/setup.sh does
    venv.create(wheel.venv, symlinks=True, with_pip=False)
    own_pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "install"]
    install: list[str | Path] = [uv, "pip", "install", "--python", python] if uv else own_pip
    subprocess.run([*install, "--quiet", "--no-deps", "--no-index", wheel.file], check=True)
    wheel.folder.mkdir()
    # A folder that a .pth line names is searched, but its own .pth files are not run.
    (wheel.packages / "third_party.pth").write_text(f"{DEMO.packages}\n")
    guard = GUARD.format(root=f"{ROOT}/", allowed=f"{DEMO.folder}/")
    (wheel.packages / "checkout_guard.py").write_text(guard)
    # A sitecustomize may be there already.
    (wheel.packages / "checkout_guard.pth").write_text("import checkout_guard\n")
    return wheel


def digest(files: Sequence[Path], text: str = "") -> str:
    """Twelve hex digits that stand for the files' content and a text."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files) + text.encode()).hexdigest()[:12]


def describe_package() -> str:
    """Return the tables of pyproject.toml that installers read. Settings of the linters change no environment."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return json.dumps([tables["build-system"], tables["project"]], sort_keys=True)


def copy_checkout(folder: Path, *names: str) -> None:
    """Copy files and folders of the checkout."""
    for name in names:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignore, dirs_exist_ok=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def foreign_environment() -> dict[str, str]:
    """The variables of this process without those of its own Python environment."""
    own_programs = str(Path(sys.executable).parent)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
    path = [folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if folder != own_programs]
    return {**variables, "PATH": os.pathsep.join(path)}


def run_program(
    environment: Path, program: object, *arguments: object, cwd: Path, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a program of a virtual environment with exactly these variables."""
    command = [str(environment / "bin" / str(program)), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def run_setup(name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Run a command that installs. Raises JobError with the last line that it printed."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise JobError(f"could not install {name}: {reason}")


QUICK_BUILD = {"CFLAGS": "-O0 -g0"}  # a third of the time
HEADERS = (
    "libkrb5-dev",
    "krb5-multidev",
    "comerr-dev",
    "libgssapi-krb5-2",
    "libkrb5-3",
    "libk5crypto3",
    "libkrb5support0",
)
UNPACK_HEADERS = """
set -e
cd "$0"
apt-get download --quiet "$@"
for package in *.deb; do dpkg-deb --extract "$package" .; done
"""

MOTO = Environment("moto", Path(__file__).with_name("moto.txt"))  # 28 packages, 140 MB, 15 s
ONNX = Environment("onnx", Path(__file__).with_name("onnx.txt"))  # 6 packages, 170 MB, 15 s
READERS = Environment("readers", Path(__file__).with_name("readers.txt"))  # 32 packages, 330 MB, 20 s
MDS = Environment("mds", Path(__file__).with_name("mds.txt"))  # 11 packages, 180 MB, 10 s
LAKE = Environment("lake", Path(__file__).with_name("lake.txt"))  # 1 package, 515 MB, 70 s
KERBEROS = KerberosEnvironment("kerberos", Path(__file__).with_name("kerberos.txt"))  # 8 packages, 60 MB, 60 s
AIRFLOW = Environment("airflow", ROOT / "conf" / "airflow" / "requirements.txt")  # 137 packages, 660 MB, 60 s
DEMO = DemoEnvironment()


def _kerberos() -> str:
    """Make the environment of hdfs[kerberos], and return its interpreter, or why its test will be skipped."""
    try:
        return str(KERBEROS.make())
    except JobError as error:
        return f"{error} (its test will be skipped)"


def main(argv: Sequence[str] | None = None) -> int:
    """Make every environment and download every server that tests need; one line each. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.clusters.environments", description=main.__doc__)
    parser.parse_args(argv)
    try:
        for environment in (MOTO, ONNX, READERS, MDS, LAKE, AIRFLOW, DEMO):
            print(f"{environment.name}: {environment.make()}", flush=True)
        print(f"kerberos: {_kerberos()}", flush=True)
        kafka = [*kafka_classpath(), *kafka_connector()]
        servers = (("hadoop", yarn_classpath()), ("kafka", kafka), ("kdc", minikdc_classpath()), ("lake", lake_jars()))
        for name, jars in servers:
            print(f"{name}: {len(jars)} jars", flush=True)
        print(f"class archives of Hadoop's servers: {len(make_archives())}", flush=True)
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
