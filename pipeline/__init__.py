"""Shard image data over workers so that every worker's shard represents the whole data set.

In Python, with a running SparkSession or without:

    import pipeline
    from pipeline.strategies.stratified import Stratified

    result = pipeline.shard(spark, input="data/cifar10", output="shards", strategy=Stratified(), num_workers=12)
    result.shards.files()
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipeline.core.import_path import drop_zips, leave_working_folder

if TYPE_CHECKING:
    from pipeline.assignment.sizes import named_ratios
    from pipeline.assignment.speeds import measured_ratios
    from pipeline.core.shardset.manifest import ShardSet
    from pipeline.runs.api import materialize, open_shards, reshard, shard
    from pipeline.runs.assign import assign
    from pipeline.runs.steps.run import ShardingResult

if sys.platform == "win32":
    raise ImportError("sharding runs on Linux; on Windows, install it in WSL")
leave_working_folder(__name__, __file__)
if "pyspark" not in sys.modules:
    sys.path[:] = drop_zips(sys.path)

__version__ = "0.1.0"
__all__ = [
    "ShardSet",
    "ShardingResult",
    "assign",
    "materialize",
    "measured_ratios",
    "named_ratios",
    "open_shards",
    "reshard",
    "shard",
]

_HOMES = {
    "ShardSet": "pipeline.core.shardset.manifest",
    "ShardingResult": "pipeline.runs.steps.run",
    "measured_ratios": "pipeline.assignment.speeds",
    "named_ratios": "pipeline.assignment.sizes",
    "assign": "pipeline.runs.assign",
    "materialize": "pipeline.runs.api",
    "open_shards": "pipeline.runs.api",
    "reshard": "pipeline.runs.api",
    "shard": "pipeline.runs.api",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the trainer and the tasks import this package without Spark."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
