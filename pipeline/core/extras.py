"""The optional dependencies of pyproject.toml, checked before a command does any work.

`--help` needs none of them: a command calls require() once its flags are read."""

from __future__ import annotations

from importlib.util import find_spec

from pipeline.core.errors import UsageError

TRAINER = ("torch", "zmq", "safetensors", "networkx")
# The modules that each extra of pyproject.toml brings, by which their absence shows.
EXTRAS: dict[str, tuple[str, ...]] = {
    "trainer": TRAINER,
    "study": (*TRAINER, "statsmodels"),
    "benchmark": (*TRAINER, "psutil"),
    "ray": (*TRAINER, "ray"),
    "tensorboard": ("tensorboard",),
    "metrics": ("prometheus_client",),
    "lineage": ("openlineage",),
}


def require(extra: str, command: str) -> None:
    """Raise UsageError if a module of an extra is not installed. command: the command or flag that needs it."""
    missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise UsageError(
            f"{command} needs {', '.join(missing)}, which {are} not installed: run pip install '.[{extra}]' in the"
            " checkout of this project"
        )
