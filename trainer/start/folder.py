"""The folder of a run during a start: checked, prepared and locked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainer.exchange.neighbours import NeighbourExchange
from trainer.home.place import Place
from trainer.leader.peer_members import check_view
from trainer.lifecycle.ends import try_report
from trainer.plan import check_shares
from trainer.run_files import REPORT
from trainer.runlog.run_folder import Start, prepare_folder
from trainer.runlog.run_record import RunRecord, SavedRun, has_stopped_early
from trainer.start.decide import RunStart


@contextmanager
def locked_start(
    start: RunStart, check: Callable[[RunRecord], RunRecord], on_lost: Callable[[], object] = lambda: None
) -> Iterator[Start]:
    """Yield the kind of a start, with the run's folder prepared and locked. Prints why nothing is trained, if so.

    Args:
        start: the start.
        check: called before the folder is changed; returns the record of the run, or raises if it cannot be trained.
        on_lost: called if another start takes the folder, because this one was frozen and considered dead.

    Raises:
        UsageError, DataError, JobError: as in ``train``.
    """
    context = start.context
    options = start.options
    config = context.config
    check_shares(config, context.num_workers, context.shards.ratios_of(context.num_workers))
    plan = config.exchange.plan(context.num_workers, config.run.seed)
    if plan and isinstance(config.exchange, NeighbourExchange):
        check_view(plan, config.exchange.topology)

    def check_all(record: RunRecord, saved: SavedRun) -> RunRecord:
        # The decision was made before the folder was locked.
        start.confirm(saved)
        if saved.record is None:
            config.protocol.check_steps(config.steps_per_worker(context.shards.rows))
        return check(record)

    with prepare_folder(
        context.home,
        RunRecord.from_config(config, context.shards),
        resume=options.resume,
        overwrite=options.overwrite,
        check=check_all,
        on_lost=on_lost,
    ) as kind:
        if kind is Start.FINISHED:
            _finish(start)
        if kind is Start.NEW and options.resume and not options.silent:
            print(f"{context.home} holds no run to resume; a new run starts")
        yield kind


def _finish(start: RunStart) -> None:
    """Say that a run has finished already, and write its report if that failed before."""
    home = start.context.home
    if not start.options.silent:
        print(describe_finished(home))
    if start.options.report and not (home / REPORT).exists():
        try_report(home)


def describe_finished(home: Place) -> str:
    """Return the line about a run that has finished already, with the flags that continue it. Reads its result."""
    if has_stopped_early(home):
        return (
            f"{home}: finished already, ended early by --patience, nothing to do; --resume with a larger --patience, or"
            " without --patience, continues"
        )
    return f"{home}: finished already, nothing to do; a larger --epochs or --steps with --resume continues"
