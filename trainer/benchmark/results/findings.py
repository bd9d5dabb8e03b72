"""Findings from the summaries, in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from trainer.benchmark.configurations import HYPERPARAMETERS, Model, System
from trainer.benchmark.results import published
from trainer.benchmark.results.summary import SMALL_BATCH, Key, SystemSummary, best_server_speedups, read_throughput


def write_findings(summaries: Sequence[SystemSummary]) -> list[str]:
    """Return sentences on the main results, from runs with one task per core.

    They cover the speedup including the start, reading, the cases in which MLlib is faster, Spark's gain without one
    job per mini-batch, the gain of smaller mini-batches, and the time to read mini-batches of two sizes."""
    summaries = [each for each in summaries if not each.tasks]
    findings = [
        _describe_start(summaries),
        *(_describe_reading(summaries, model) for model in HYPERPARAMETERS),
        _describe_wins(summaries),
        _describe_all_reduce(summaries),
        *(_describe_small_batches(summaries, model) for model in HYPERPARAMETERS),
        *(_describe_reads_by_batch(summaries, model) for model in HYPERPARAMETERS),
    ]
    return [text for text in findings if text]


def _describe_start(summaries: Sequence[SystemSummary]) -> str:
    """Return a sentence on the mean and the smallest speedup over MLlib, with the start of both systems included.

    Each configuration counts once, with the faster of the synchronous and the asynchronous parameter server. Empty if
    MLlib and a server have not both converged in any of them."""
    best = best_server_speedups(summaries, "speedup_with_start")
    if not best:
        return ""
    return (
        "With the start (reading all rows, and for a server starting its processes), MLlib takes on average"
        f" {fmean(best.values()):.1f} times as long as the better server, and at least {min(best.values()):.1f} times."
    )


def _describe_reading(summaries: Sequence[SystemSummary], model: Model) -> str:
    """Return a sentence on the rows per second that the systems read into memory.

    Empty unless both MLlib and the synchronous server were measured."""
    speeds = read_throughput(summaries, model)
    if not {"mllib", "ps-sync"} <= speeds.keys():
        return ""
    names: dict[System, str] = {
        "mllib": "MLlib",
        "ps-sync": "the trainer",
        "all-reduce": "Spark tasks with numpy",
    }
    rates = ", ".join(f"{name} {speeds[system]:,.0f}" for system, name in names.items() if system in speeds)
    return f"Rows read into memory per second, {model}: {rates}."


def _describe_wins(summaries: Sequence[SystemSummary]) -> str:
    """Return a sentence on the configurations in which MLlib is faster than all parameter servers.

    If there are none, it has the smallest speedup. Empty without a configuration that MLlib and a server have run."""
    best: dict[Key, float] = {}
    servers = set()
    for each in summaries:
        speedup = each.speedup if each.length is None else each.mini_batch_speedup
        if each.system.startswith("ps-") and speedup is not None:
            # MLlib wins only if it is faster than every server.
            servers.add(each.system)
            best[each.configuration] = max(speedup, best.get(each.configuration, 0.0))
    if not best:
        return ""
    slower = [
        f"{model}, {batch:,} of {rows:,} rows ({speedup:.2f})"
        for (model, rows, batch, *_), speedup in best.items()
        if speedup < 1
    ]
    measured = "both servers" if len(servers) > 1 else "the parameter server"
    return f"Computing: MLlib is faster than {measured} in {len(slower)} of {len(best)} configurations" + (
        f": {'; '.join(slower)}." if slower else f"; the least gap is {min(best.values()):.1f} times."
    )


def _describe_all_reduce(summaries: Sequence[SystemSummary]) -> str:
    """Return a sentence on how much faster than MLlib Spark's own tasks are, without a job per mini-batch.

    It shows which part of the gap to the parameter server Spark could close itself."""
    timed = [(each.system, each.mini_batch_speedup) for each in summaries if each.mini_batch_speedup]
    tasks = [speedup for system, speedup in timed if system == "all-reduce"]
    server = [speedup for system, speedup in timed if system == "ps-sync"]
    if not tasks or not server:
        return ""
    return (
        f"Without a job and a pass over all rows per mini-batch, Spark's own tasks are {median(tasks):.0f} times as"
        f" fast as MLlib (all-reduce, median of all configurations; the synchronous server {median(server):.0f} times)."
    )


def _describe_small_batches(summaries: Sequence[SystemSummary], model: Model) -> str:
    """Return a sentence on the speedup of small mini-batches over all rows, beside the thesis's figures.

    It also names the mini-batch size with which each system converges first. Empty unless MLlib and the synchronous
    server were measured with both sizes."""
    of_model = [each for each in summaries if each.model == model and each.length is None and each.metrics]
    gains = []
    for system in ("mllib", "ps-sync"):
        by_size = {each.size: each.metrics for each in of_model if each.system == system}
        # The sentence compares the two systems, so it needs both.
        if "all" not in by_size or str(SMALL_BATCH) not in by_size:
            return ""
        faster = by_size["all"]["compute_s"].median / by_size[str(SMALL_BATCH)]["compute_s"].median
        first = min(by_size, key=lambda size: by_size[size]["seconds"].median)
        gains.append(f"{system} {faster:.1f} times as fast, and converges fastest with {first}")
    server, spark = published.COMPUTE_SPEEDUP
    return (
        f"Mini-batches of {SMALL_BATCH} instead of all rows, {model}: {'; '.join(gains)} (the thesis: up to {server:g} times"
        f" for the server, {spark:g} for MLlib, which converges fastest with 2000)."
    )


def _describe_reads_by_batch(summaries: Sequence[SystemSummary], model: Model) -> str:
    """Return a sentence on how the time in which the synchronous server's workers read a mini-batch grows with its size.

    It should be proportional to the size. MLlib's is independent of it, and is therefore measured once per set of rows.
    The sizes are the largest and the smallest on the set where they differ most; empty without two sizes."""
    by_rows: dict[int, dict[int, float]] = {}
    for each in summaries:
        # A mini-batch of all rows is not drawn.
        if (each.model, each.system) == (model, "ps-sync") and "read_s" in each.metrics and each.batch < each.rows:
            by_rows.setdefault(each.rows, {})[each.batch] = each.metrics["read_s"].median
    read_s = max(by_rows.values(), key=lambda seconds: max(seconds) / min(seconds), default={})
    if len(read_s) < 2:
        return ""
    small = min(read_s)
    large = max(read_s)
    slower = read_s[large] / max(1e-9, read_s[small])
    return (
        f"Reading mini-batches of {large:,} rows, {model}: {slower:.1f} times as long as of {small:,} in the synchronous"
        f" server ({large / small:.1f} times as many rows); MLlib reads all rows for a mini-batch of any size."
    )
