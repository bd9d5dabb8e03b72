"""The origin of a result: when, where and by which command it was made."""

from __future__ import annotations

import os
import platform
import re
import shlex
import socket
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DISTRIBUTION = "distribution-aware-sharding"  # the name in pyproject.toml, under which installed metadata are found
# Of a URI. In Azure's abfss://container@account/path, the container comes before the @.
CREDENTIALS = re.compile(r"(?<=://)(?:(?<!\babfs://)(?<!\babfss://)|(?=[^/@\s]*:))[^/@\s]+@")
SECRET = re.compile(
    r"(?i)secret|passw|token|jaas|credential|signature|(?:keystore|account|access|private|api)[._-]?key"
)
KAFKA = "--kafka-option"  # whose values may all be secret
HIDDEN = "***"


def provenance() -> dict[str, str]:
    """Return the time, the command and the host of this process, as manifests and logs record them."""
    return {"time": utc_now(), "command": command(), "host": socket.gethostname()}


def installed_version() -> str:
    """Return the version of the installed package, or "not installed" for a checkout that is on the search path alone."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "not installed"


def processor() -> str:
    """Return the name of the processor or, if it is unknown, of its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def utc_now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"


def command(argv: list[str] | None = None) -> str:
    """Return the command of this process as one would type it, without credentials.

    argv: the program and its arguments (default: this process's)."""
    program, *arguments = argv or sys.argv or [""]
    path = Path(program)
    if path.name == "__main__.py":
        # Python replaces the name after -m by the path of the package's __main__.
        words = ["python", "-m", _module(path)]
    elif path.suffix == ".py":
        # spark-submit starts Python with the port of its JVM in the environment.
        submitted = "PYSPARK_GATEWAY_PORT" in os.environ
        words = [
            "spark-submit" if submitted else "python",
            f"jobs/{path.name}" if path.parent.name == "jobs" else program,
        ]
    else:
        words = [path.name]
    # Bytes that are not UTF-8, which no manifest could hold, become escapes.
    return shlex.join([*words, *_hide_secrets(arguments)]).encode(errors="backslashreplace").decode()


def _hide_secrets(arguments: list[str]) -> list[str]:
    """Hide the values of arguments whose text names a secret, Kafka's properties, and credentials in URIs."""
    public: list[str] = []
    for argument in arguments:
        name, is_pair, _ = argument.partition("=")
        follows = bool(public) and public[-1].startswith("--") and SECRET.search(public[-1]) and "=" not in public[-1]
        if name == KAFKA and is_pair:
            argument = f"{KAFKA}={argument.split('=')[1]}={HIDDEN}"  # of --kafka-option=KEY=VALUE
        elif public and public[-1] == KAFKA:
            argument = f"{name}={HIDDEN}"
        elif follows:
            argument = HIDDEN
        elif is_pair and SECRET.search(argument):
            argument = f"{name}={HIDDEN}"
        public.append(CREDENTIALS.sub(f"{HIDDEN}@", argument))
    return public


def _module(main: Path) -> str:
    """Return the dotted name of the package that holds a ``__main__.py``."""
    names: list[str] = []
    folder = main.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return ".".join(names) or main.parent.name
