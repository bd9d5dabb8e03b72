"""The hosts of a run, by command-line flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.core.errors import UsageError
from pipeline.core.extras import require
from pipeline.core.specs import Spec, option

if TYPE_CHECKING:
    from trainer.cluster.launcher import Launcher


SPARK = "spark"


@dataclass(frozen=True)
class Hosts(Spec):
    """The flags of ``python -m trainer`` for a cluster."""

    hosts: int = option(1, "number of hosts that share the run", least=1)
    launcher: Literal["spark", "ray", "local"] | None = option(
        None,
        "hosts of the run: tasks of a Spark application, with the cores of spark.task.cpus and the GPUs of"
        " spark.task.resource.gpu.amount; nodes of a Ray cluster; or processes of this machine that act as hosts",
    )
    host_cores: int = option(1, "CPU cores per host that are reserved on a Ray cluster", least=1, advanced=True)
    host_gpus: float = option(0.0, "GPUs per host that are reserved on a Ray cluster", least=0, advanced=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hosts > 1 and self.launcher is None:
            raise UsageError(f"--hosts {self.hosts} needs --launcher: spark, ray or local")
        if self.launcher != "ray" and (self.host_cores, self.host_gpus) != (1, 0):
            of_spark = "a Spark task has the cores of spark.task.cpus and the GPUs of spark.task.resource.gpu.amount"
            next_step = of_spark if self.launcher == SPARK else "leave them out"
            raise UsageError(f"--host-cores and --host-gpus are for --launcher ray; {next_step}")

    def make(self) -> Launcher | None:
        """Return the launcher, None for this host alone; ``trainer.spark_driver`` makes Spark's, which needs an application.

        Raises UsageError if the launcher's extra is not installed."""
        assert self.launcher != SPARK, "its launcher needs an application"
        if self.launcher == "ray":
            require("ray", "--launcher ray")
            from trainer.cluster.ray import RayLauncher

            return RayLauncher(self.host_cores, self.host_gpus)
        if self.launcher == "local":
            from trainer.cluster.local import LocalLauncher

            return LocalLauncher()
        return None
