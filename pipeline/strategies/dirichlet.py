"""Shards with skewed labels: the shares of every class are drawn from a Dirichlet distribution (Yurochkin et al. 2019)."""

from dataclasses import dataclass
from typing import ClassVar

from pipeline.assignment.shares import dirichlet_table
from pipeline.core.seeds import Purpose, generator
from pipeline.core.specs import option
from pipeline.strategies.base import Context, FitResult, Strategy
from pipeline.strategies.stratified import ByLabel


@dataclass(frozen=True)
class Dirichlet(Strategy):
    """A strategy that draws the workers' shares of each class from a symmetric Dirichlet distribution.

    With a small alpha, a worker has most of its rows from few classes, and shards differ in size; with a large one it
    approaches ``stratified``. The rows of a class are dealt in random order."""

    name: ClassVar[str] = "dirichlet"
    summary: ClassVar[str] = "random shares of every class: skewed labels and sizes"
    looks_at_labels: ClassVar[bool] = True
    decides_sizes: ClassVar[bool] = True
    alpha: float = option(0.5, "concentration of the shares; 0.1 is very uneven, 100 almost even", above=0, most=1e6)
    min_rows: int = option(1, "least number of rows of a worker", metavar="ROWS", least=1)

    def fit(self, context: Context) -> FitResult:
        counts = context.scan.label_counts
        rng = generator(self.seed, Purpose.SKEW)
        table = dirichlet_table(counts.sum(axis=0), context.num_workers, self.alpha, rng, self.min_rows)
        return FitResult(ByLabel(self.seed), counts, table=table)
