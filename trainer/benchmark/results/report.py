"""The benchmark's report: results.json in the thesis's figures and tables, beside its numbers. Works offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.core.reporting.page import origin, plain, template
from trainer.benchmark.configurations import HYPERPARAMETERS
from trainer.benchmark.results import figures, published
from trainer.benchmark.results.findings import write_findings
from trainer.benchmark.results.forecast import average_gaps, fit_cost_models
from trainer.benchmark.results.summary import Spread, SystemSummary, judge_goals, read_throughput, summarise
from trainer.benchmark.systems.descent import LOCAL_STEPS
from trainer.benchmark.systems.executors import ON_EXECUTORS

LIBRARIES = ("python", "java", "pyspark", "numpy", "pyarrow", "torch", "pyzmq")  # keys of results["machine"]


def render(results: Mapping[str, Any]) -> str:
    """Return the report as one HTML page."""
    summaries = summarise(results["records"])
    # Runs with more tasks than cores are only for the cost model.
    usual = [each for each in summaries if not each.tasks]
    to_converge = [each for each in usual if each.length is None]
    sizes = {(each.model, each.rows) for each in to_converge}
    machine = results["machine"]
    cost_models = fit_cost_models(summaries, int(machine["parallelism"]))
    page: str = template("trainer.benchmark", "benchmark.html").render(
        headline=write_headline(usual),
        goals=judge_goals(usual),
        origin=origin(results.get("made"), {name: machine[name] for name in LIBRARIES if name in machine}),
        libraries=LIBRARIES,
        machine=machine,
        on_executors=machine["servers_on"] == ON_EXECUTORS,
        experiment=results["experiment"],
        to_converge=to_converge,
        summaries=summaries,
        local_steps=LOCAL_STEPS,
        find_published=figures.find_published,
        ms=format_ms,
        task_metrics={name: metrics for name, metrics in results["task_metrics"].items() if metrics},
        throughput={model: read_throughput(usual, model) for model in HYPERPARAMETERS},
        findings=write_findings(usual),
        cost_models=cost_models,
        gaps=average_gaps(cost_models),
        published=published,
        figures={
            "convergence": figures.draw_convergence(to_converge),
            "mini_batches": figures.draw_mini_batches([each for each in usual if (each.model, each.rows) in sizes]),
            "sizes": figures.draw_sizes(usual),
        },
    )
    return page


def write_headline(summaries: Sequence[SystemSummary]) -> str:
    """Return a line with the number of configurations, systems and failures."""
    failed = sum(bool(each.errors) for each in summaries)
    configurations = len({each.configuration for each in summaries})
    return f"{configurations} configurations of {len({each.system for each in summaries})} systems" + (
        f"; {failed} failed, with the reason in their rows" if failed else ""
    )


def format_ms(spread: Spread) -> str:
    """Format a metric, given in seconds, as milliseconds with its range."""
    middle, least, most = (plain(1e3 * value) for value in (spread.median, spread.least, spread.most))
    return middle if least == most else f"{middle} ({least} to {most})"
