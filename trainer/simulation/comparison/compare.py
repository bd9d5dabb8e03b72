"""A comparison of exchanges and protocols on one virtual cluster: seconds, bytes and accuracy, in a table and a figure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from pipeline.core.errors import UsageError
from trainer.comparison.measurements import (
    Measurements,
    highest_common_accuracy,
    lowest_common_loss,
    measure,
    with_times,
)
from trainer.comparison.presentation import PICTURE, Goals, describe, write_comparison
from trainer.config import Config, Optimiser
from trainer.context import RunContext
from trainer.home.place import Place
from trainer.options import Options
from trainer.plan import check_shares
from trainer.regroup import regrouped
from trainer.run_files import METRICS
from trainer.runlog.run_folder import resolve_output
from trainer.runlog.run_record import SavedRun, read_record, saved_run
from trainer.runlog.thinned import thinned_log
from trainer.simulation.comparison.contenders import Contender
from trainer.simulation.options import SimulationSettings
from trainer.simulation.run import check_exchange, drawn_ratios, pinned_context, run_in, workers_rows_digest


def compare(
    config: Config,
    simulated: SimulationSettings,
    contenders: Mapping[str, Contender],
    options: Options,
    *,
    optimiser: Optimiser | None = None,
    loss: float | None = None,
    accuracy: float | None = None,
) -> list[Measurements]:
    """Simulate each contender in its own subfolder of the output, and write a table and a figure beside them.

    A finished run in a subfolder is not simulated again. Raises UsageError and JobError.

    Args:
        config: the configuration of all runs, except for the exchange, the protocol and the folder.
        simulated: the virtual cluster.
        contenders: by label.
        options: quiet and silent apply to the comparison as a whole; the runs themselves print nothing.
        optimiser: as given by the user, without defaults, so that each contender gets its own default rate and momentum;
            the configuration's if None.
        loss: the goal of "time to loss"; default: the lowest loss that all runs reach.
        accuracy: the goal of "time to accuracy"; default: the highest evaluation accuracy that all runs reach.
    """
    output = resolve_output(config.run.output)
    homes = _folders(output, contenders)
    saved_runs = {label: saved_run(home, overwrite=options.overwrite) for label, home in homes.items()}
    # On a set that grows, all contenders have the rows of the one that began first.
    first = next((saved for saved in saved_runs.values() if saved.record), SavedRun())
    context = pinned_context(RunContext.from_config(config, output), simulated, first)
    config = context.config
    num_workers, rows, _ = workers_rows_digest(context, simulated)
    configs = {}
    for label, contender in contenders.items():  # all of them before the first run, which may take long
        own = contender.configure(config, optimiser or config.optimiser)
        home = homes[label]
        configs[label] = replace(own, run=replace(config.run, output=str(home)))
        check_shares(own, num_workers, drawn_ratios(context, simulated, num_workers))
        check_exchange(own, num_workers, simulated.compute)
        if saved_runs[label].record is None:
            own.protocol.check_steps(own.steps_per_worker(rows))
        # Refuses a change of workers for those that cannot follow it, while none has changed.
        own_context = replace(context, config=configs[label], home=home)
        regrouped(own_context, saved_runs[label], simulated.workers, options, compute=simulated.compute)
    quiet = replace(options, silent=True, quiet=True)
    runs = []
    for label, own in configs.items():
        if not (options.quiet or options.silent):
            print(f"{label} ...", flush=True)
        result = run_in(replace(context, config=own, home=homes[label]), simulated, quiet)
        runs.append(measure(label, read_record(homes[label]).config, result, thinned_log(homes[label] / METRICS)))
    # The default goals depend on all runs, so the times to them are only known now.
    goals = Goals(
        lowest_common_loss(runs) if loss is None else loss,
        highest_common_accuracy(runs) if accuracy is None else accuracy,
    )
    runs = [with_times(run, *goals) for run in runs]
    write_comparison(output, runs, goals, unit_of_time="virtual second")
    if not options.silent:
        print(describe(runs, goals, subject="contender", clock="virtual time"))
        print(f"picture: {output / PICTURE}")
    return runs


def _folders(output: Place, labels: Iterable[str]) -> dict[str, Place]:
    """Return the folder of each contender below the output, by label. Raises UsageError if two have the same one."""
    labels_by_folder: dict[Place, str] = {}
    for label in labels:
        home = output / re.sub(r"[^\w.-]", "-", label)
        if other := labels_by_folder.get(home):
            raise UsageError(f"--compare: {other} and {label} have the same folder, {home}; leave one of them out")
        labels_by_folder[home] = label
    return {label: home for home, label in labels_by_folder.items()}
