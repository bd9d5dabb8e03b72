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


def engine_module(name: EngineName) -> str:
    """Return the name of an engine's module."""
    return f"pipeline.strategies.engines.{name.replace('-', '_')}"


def modules_of(name: EngineName) -> tuple[str, ...]:
    """Return the modules that an engine imports during a fit."""
    return (
        engine_module(name),
        "pipeline.clustering.pca",
        "pipeline.clustering.kmeans",
        "pipeline.clustering.eigenvectors",
    )


def load_engine(name: EngineName) -> ClusteringEngine:
    engine: ClusteringEngine = getattr(import_module(engine_module(name)), ENGINES[name])()
    return engine
