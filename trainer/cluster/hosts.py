"""The hosts of a run, by command-line flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.core.errors import UsageError
from pipeline.core.extras import require
from pipeline.core.specs import Spec, option

if TYPE_CHECKING:
    from trainer.cluster.launcher import Launcher


@dataclass(frozen=True)
class Hosts(Spec):
    """The flags of ``python -m trainer`` for a cluster."""

    hosts: int = option(1, "of a cluster that share the run", metavar="H", least=1)
    launcher: Literal["ray", "local"] | None = option(
        None, "where they are: nodes of a Ray cluster, or processes of this machine, each as if it were a host"
    )
    host_cores: int = option(1, "that each takes of a Ray cluster, for all its workers", metavar="C", least=1)
    host_gpus: float = option(0.0, "that each takes of a Ray cluster", metavar="G", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hosts > 1 and self.launcher is None:
            raise UsageError(
                f"--hosts {self.hosts} needs --launcher: ray or local (jobs/train.py takes those of Spark)"
            )

    def make(self) -> Launcher | None:
        """Return the launcher, None for this host alone. Raises UsageError if the launcher's extra is not installed."""
        if self.launcher == "ray":
            require("ray", "--launcher ray")
            from trainer.cluster.ray import RayLauncher

            return RayLauncher(self.host_cores, self.host_gpus)
        if self.launcher == "local":
            from trainer.cluster.local import LocalLauncher

            return LocalLauncher()
        return None
