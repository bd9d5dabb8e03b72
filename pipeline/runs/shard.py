"""Sharding of an input by a strategy, from its discovery to the committed set."""

from __future__ import annotations

from pyspark import SparkContext

from pipeline.core.shardset.attempt import Attempt
from pipeline.runs.request import Request, with_bundles
from pipeline.runs.steps.bundle import check_bundles, place_rows
from pipeline.runs.steps.commit import commit
from pipeline.runs.steps.current import define_goal, keep_committed, scan_unless_current
from pipeline.runs.steps.inputs import check_num_workers, discover_inputs
from pipeline.runs.steps.place import fitting_context
from pipeline.runs.steps.run import ShardingResult, open_run
from pipeline.runs.steps.write import save_models, write_rows
from pipeline.spark.images import run_on
from pipeline.spark.progress import PhaseLog
from pipeline.strategies import Strategy


def shard(context: SparkContext, request: Request, strategy: Strategy, progress: PhaseLog) -> ShardingResult:
    """Shard an input and commit the result, or return the set if it is committed already.

    Raises UsageError, DataError and JobError, after which nothing is left behind. The driver holds O(files + chunks x
    groups), never O(rows)."""
    run = open_run(context, with_bundles(request, strategy), progress)
    with progress.phase("discover"):
        inputs = discover_inputs(run)
        progress.report(inputs.describe())
        for remark in inputs.remarks():
            progress.report(remark)
    strategy.check_input(inputs.dataset)
    check_bundles(run.request, inputs.dataset)
    check_num_workers(run.request, inputs.dataset)
    goal = define_goal(run, strategy.with_source_digest(run.store, run_on(context)), inputs)
    scans = scan_unless_current(run, goal)
    if scans is None:
        return keep_committed(run, goal)
    # Whatever fails from here on, the end of the attempt deletes its files.
    with Attempt(run.store, run.request.output) as attempt:
        fit_result = goal.strategy.fit(fitting_context(run, scans.source, attempt.folder))
        placed_rows = place_rows(run, scans.source, fit_result, goal.strategy)
        written_set = write_rows(run, scans, placed_rows, attempt.folder)
        with progress.phase("commit"):
            models = save_models(context, run.store, fit_result.models, attempt.folder)
            return commit(run, goal, attempt, written_set, models)
