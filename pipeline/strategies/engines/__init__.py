"""The engines that find neighbourhoods: one file each, and one dict of their modules by name.

A module is imported when its engine is first used, because spark.ml and scikit-learn take half a second to load."""

from importlib import import_module

from pipeline.strategies.clusterings import EngineName
from pipeline.strategies.engines.base import ClusteringEngine

ENGINES: dict[EngineName, str] = {
    "block": "BlockEngine",
    "spark-ml": "SparkMlEngine",
    "scikit-learn": "ScikitLearnEngine",
}


def load_engine(name: EngineName) -> ClusteringEngine:
    module = import_module(f"pipeline.strategies.engines.{name.replace('-', '_')}")
    engine: ClusteringEngine = getattr(module, ENGINES[name])()
    return engine
