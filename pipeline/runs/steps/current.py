"""The steps that compare a run with the committed set in its output folder."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.core.shardset.commit import refuse_unless, tidy
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.damage import first_damage
from pipeline.core.shardset.manifest import ShardSet, missing_file, read_committed
from pipeline.doctor import beforehand
from pipeline.output.entries import describe_labels
from pipeline.runs.request import difference, identity
from pipeline.runs.steps.inputs import Inputs, ScannedInputs, scan_inputs
from pipeline.runs.steps.run import ShardingResult, ShardingRun
from pipeline.spark.images import run_on
from pipeline.strategies import Strategy


@dataclass(frozen=True)
class SetGoal:
    """The set that a run is to commit.

    Attributes:
        strategy: decides the groups.
        inputs: the discovered rows.
        identity: digest of everything except the rows that decides the shards.
        before: the committed set in the output folder, or None.
    """

    strategy: Strategy
    inputs: Inputs
    identity: str
    before: ShardSet | None


def define_goal(run: ShardingRun, strategy: Strategy, inputs: Inputs) -> SetGoal:
    """Return the set that the run is to commit. Raises DataError if the committed one cannot be read."""
    before = read_committed(run.store, run.request.output)
    return SetGoal(strategy, inputs, identity(run.request, strategy), before)


def scan_unless_current(run: ShardingRun, goal: SetGoal) -> ScannedInputs | None:
    """Scan the inputs, or return None if the committed set is the run's goal already.

    Raises UsageError if the output cannot be written, or holds a set that may not be replaced."""
    before = goal.before
    # A listing is cheap: an unchanged input needs no scan.
    is_listed = before is not None and not run.request.rescan and is_current(run, goal, before)
    if before and is_listed and not is_damaged(run, before):
        return None
    beforehand.check_output(run.context, run.store, run.request.output)
    scans = scan_inputs(run, goal.inputs)
    if before and not is_listed and is_current(run, goal, before, scans) and not is_damaged(run, before):
        return None
    if before:
        refuse_another(run, goal, before, scans)
    return scans


def is_current(run: ShardingRun, goal: SetGoal, committed: ShardSet, scans: ScannedInputs | None = None) -> bool:
    """True if a committed set is the run's goal.

    Inputs are compared by listing if they are not scanned yet, else by content."""
    manifest = committed.manifest
    if manifest.identity != goal.identity or missing_file(committed):
        return False
    if run.request.overwrite and "assignment" in manifest.absent:  # made by an older version
        return False
    beside = manifest.evaluation.input if manifest.evaluation else None
    if scans is None:
        return (manifest.input.listing, beside.listing if beside else None) == goal.inputs.listings()
    return describes_inputs(manifest, scans)


def describes_inputs(manifest: Manifest, scans: ScannedInputs) -> bool:
    """True if a manifest describes the scanned rows and evaluation rows, by content, and the classes of their labels."""
    beside = manifest.evaluation.input if manifest.evaluation else None
    inputs = (manifest.input, beside) if beside else (manifest.input,)
    labels = describe_labels(scans.source)
    # A set of an older version names no classes.
    names = manifest.labels.class_names or labels.class_names
    if manifest.labels.num_classes != labels.num_classes or names != labels.class_names:
        return False
    return tuple((each.fingerprint, each.attributes) for each in inputs) == scans.fingerprints()


def is_damaged(run: ShardingRun, committed: ShardSet) -> bool:
    """True if --overwrite is set and a listed file has changed; the set is then made again."""
    if not run.request.overwrite:
        return False
    with run.progress.phase("verify"):
        damage = first_damage(committed, run_on(run.context))
        if damage:
            run.progress.report(f"{damage}: the set is made again")
    return damage is not None


def refuse_another(run: ShardingRun, goal: SetGoal, before: ShardSet, scans: ScannedInputs) -> None:
    """Raise UsageError if the committed set is another one and --overwrite is not set.

    A set of the same rows with missing files is repaired without --overwrite."""
    manifest = before.manifest
    # The identity leaves the input out, so the rows are compared too.
    if manifest.identity == goal.identity and describes_inputs(manifest, scans) and missing_file(before):
        return
    differences = difference(before, run.request, goal.strategy)
    refuse_unless(run.request.overwrite, before, f"configuration or input ({differences})")


def keep_committed(run: ShardingRun, goal: SetGoal) -> ShardingResult:
    """Return the committed set, after files of killed runs beside it are deleted."""
    assert goal.before, "the goal is committed"
    if removed := tidy(run.store, goal.before):
        run.progress.report(f"{removed} files that a killed run had left are deleted")
    return ShardingResult(goal.before, fresh=False)
