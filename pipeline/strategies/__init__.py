"""The sharding strategies: one file each, and one dict of them by name."""

from pipeline.core.specs import registry
from pipeline.strategies.base import Context, FitResult, Grouping, Strategy
from pipeline.strategies.by_attribute import ByAttribute
from pipeline.strategies.by_class import ByClass
from pipeline.strategies.class_cluster import ClassCluster
from pipeline.strategies.dirichlet import Dirichlet
from pipeline.strategies.distribution_aware import DistributionAware
from pipeline.strategies.hash import Hash
from pipeline.strategies.importance import Importance
from pipeline.strategies.random import Random
from pipeline.strategies.random_iid import RandomIid
from pipeline.strategies.round_robin import RoundRobin
from pipeline.strategies.sorted import Sorted
from pipeline.strategies.stratified import Stratified
from pipeline.strategies.submodular import Submodular

STRATEGIES = registry(
    RoundRobin,
    Random,
    RandomIid,
    Stratified,
    DistributionAware,
    ClassCluster,
    Submodular,
    Hash,
    Importance,
    Dirichlet,
    ByClass,
    Sorted,
    ByAttribute,
)

__all__ = ["STRATEGIES", "Context", "FitResult", "Grouping", "Strategy"]
