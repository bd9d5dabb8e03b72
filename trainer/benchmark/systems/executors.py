"""The executors of a cluster as hosts of the parameter server, so that both systems compute on the same machines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import SparkContext

from pipeline.spark.jvm import scala_context
from pipeline.spark.store import open_store

if TYPE_CHECKING:
    from trainer.cluster.spark import SparkLauncher


ON_EXECUTORS = "executors"  # results["machine"]["servers_on"] of a cluster


@dataclass(frozen=True)
class Executors:
    """The executors of a context. They run MLlib's tasks and, between MLlib's runs, the servers and their workers."""

    context: SparkContext

    def count(self) -> int:
        """Return the number of registered executors, at least 1."""
        executors = scala_context(self.context).statusStore().executorList(True)
        names = [executors.apply(at).id() for at in range(executors.size())]
        return max(1, len(names) - names.count("driver"))

    def launcher(self) -> SparkLauncher:
        """Return a launcher that starts a run's processes in tasks, which Spark spreads evenly over idle executors."""
        from trainer.cluster.spark import SparkLauncher

        return SparkLauncher(lambda: (self.context, json.dumps(dict(open_store(self.context).conf))))


def find_executors(context: SparkContext) -> Executors | None:
    """Return the executors of a cluster, or None on a local master, whose only executor is the driver."""
    master = str(context.master)
    return None if master.startswith("local") and not master.startswith("local-cluster") else Executors(context)
