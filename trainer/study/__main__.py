"""``python -m trainer.study``: train several configurations with many seeds, and report their differences."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from pipeline.core import command_line
from pipeline.core.command_line import CONF, Parser
from pipeline.core.errors import JobError, UsageError
from pipeline.core.extras import require
from pipeline.core.machine import usable_cores
from pipeline.core.program import execute
from trainer.runlog.run_folder import locked, resolve_output
from trainer.study.plan.cases import check_plan
from trainer.study.plan.study_plan import Run, StudyPlan, read_plan, seeds_of
from trainer.study.run.folder import PLAN, claim_folder, refuse_foreign, refuse_other_plan
from trainer.study.run.ledger import LEDGER, StudyLedger
from trainer.study.run.progress import StudyLog
from trainer.study.run.runner import Runner
from trainer.study.run.sets import Sets

PROG = "python -m trainer.study"
DESCRIPTION = "Train several configurations with many seeds, and report means, spreads and significance of differences."
EPILOG = """\
examples: python -m trainer.study quick --output build/study
          python -m trainer.study my-plan.toml --output build/study --seeds 50

A run that is in the ledger of --output is not repeated: the same command
resumes an interrupted study, and a larger --seeds extends a finished study.
Several hosts can divide a study (--share 1/2, --share 2/2); --merge then
combines their ledgers. Exit codes: 0 done, 2 wrong usage, 3 broken data,
1 other errors and interruption."""
INTERRUPTED = "finished runs are in the ledger, and the same command resumes the study"


def parser() -> Parser:
    result = command_line.parser(PROG, DESCRIPTION, EPILOG)
    result.conf = "study"
    result.add_argument(
        "plan",
        metavar="PLAN",
        help="TOML file of a plan, or the name of a plan in conf/study: " + ", ".join(plan_names()),
    )
    # The plan defines all that changes results. The flags say how much of it runs here, so that the ledgers of several
    # commands can be merged.
    result.add_argument("--output", required=True, metavar="DIR", help="folder of the study")
    result.add_argument(
        "--seeds", type=int, metavar="INT", help="number of seeds, counted from 0 (default: set by the plan)"
    )
    result.add_argument(
        "--jobs",
        type=int,
        metavar="INT",
        help="number of parallel runs (default: the number of cores in virtual time, 1 with real processes)",
    )
    result.add_argument(
        "--share", type=share, default=(1, 1), metavar="I/N", help="run every N-th seed, from the I-th (default: 1/1)"
    )
    result.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="add the runs of other studies of the same plan",
    )
    result.add_argument("--keep-sets", action="store_true", help="keep the shard sets after their runs have ended")
    result.add_argument(
        "--prepare",
        action="store_true",
        help="make the shard sets and train nothing; the same command without this option then trains on them, also on a"
        " host without Spark and without the data sets, to which --output was copied",
    )
    result.add_argument("--report-only", action="store_true", help="report on the runs in the ledger, without training")
    command_line.add_log_format_flag(result)
    result.add_argument("--quiet", action="store_true", help="print only the result and errors")
    return result


def share(text: str) -> tuple[int, int]:
    """Parse a share: ``2/3`` is (2, 3). Raises UsageError."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--share {text} is not I/N with I from 1 to N, such as 1/2")
    return int(match[1]), int(match[2])


def plan_names() -> list[str]:
    """Return the names of the plans that come with the program."""
    folder = CONF / "study"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def find_plan(name: str) -> StudyPlan:
    """Return the plan of a file, or a shipped one. Raises UsageError."""
    if name in plan_names():
        return read_plan(Path(str(CONF / "study" / f"{name}.toml")))
    if not name.endswith(".toml"):
        raise UsageError(f"the plan {name} is neither a TOML file nor a plan of conf/study: {', '.join(plan_names())}")
    return read_plan(Path(name))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study of a command line and return the exit code. Raises UsageError, DataError and JobError."""
    args = command_line.parse(parser(), argv)
    require("study", "a study")
    plan = find_plan(args.plan)
    if args.seeds is not None:
        plan = replace(plan, seeds=seeds_of(args.seeds))
    if args.jobs is not None and args.jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {args.jobs}")
    root = resolve_output(args.output)
    if plan.beside == root.name:
        raise UsageError(f"beside = {plan.beside!r} is the study in {root} itself; name another folder next to it")
    if args.report_only and not args.merge and not (root / LEDGER).exists():
        raise UsageError(f"--report-only: {root} contains no ledger; leave the option out to train")
    if args.prepare and (args.report_only or args.merge):
        raise UsageError("--prepare makes shard sets alone: leave out --report-only and --merge")
    # Check everything before the folder is locked and written.
    refuse_foreign(root)
    if (root / PLAN).exists():
        refuse_other_plan(plan, root)
    runs = share_of_runs(plan, *args.share)
    others = [_other_study(plan, folder) for folder in args.merge]
    if not args.report_only:
        ledger = StudyLedger(root / LEDGER)
        waiting = [run for run in runs if run not in ledger]
        check_plan(plan, set() if args.prepare else Sets(plan, root).prepared_datasets(runs, waiting))
    with ExitStack() as stack:
        stack.enter_context(_interrupts_by_signals())
        try:
            stack.enter_context(locked(root))
        except OSError as error:
            raise UsageError(f"--output {root} cannot be written: {error.strerror}; choose another folder") from None
        say = (lambda text: None) if args.quiet else StudyLog().say
        claim_folder(plan, root)
        jobs = args.jobs or (1 if plan.backend == "processes" else usable_cores())
        runner = Runner(plan, root, jobs, say, keep_sets=args.keep_sets)
        for other in others:
            say(f"{other.path}: {runner.ledger.merge(other, plan, runner.contents)} runs taken")
        if args.prepare:
            runner.prepare(runs)
            print(f"{root}: the shard sets are ready; the same command without --prepare trains on them")
            return 0
        if not args.report_only:
            try:
                runner.run(runs)
            except JobError:
                if runner.ledger.records_of_plan(plan):  # report the finished runs despite the error
                    _report(plan, root, runner.ledger)
                raise
        _report(plan, root, runner.ledger)
    return 0


def share_of_runs(plan: StudyPlan, part: int, parts: int) -> list[Run]:
    """Return the runs of every ``parts``-th seed, from the ``part``-th.

    Shares are split by seed, so that members are compared on equal seeds from the same host. Raises UsageError if there
    is no seed for that part."""
    seeds = plan.seeds[part - 1 :: parts]
    if not seeds:
        raise UsageError(
            f"--share {part}/{parts}: the plan has only {len(plan.seeds)} seeds, too few for {parts} shares"
        )
    return list(replace(plan, seeds=seeds).runs())


def _other_study(plan: StudyPlan, folder: Path) -> StudyLedger:
    """Return the ledger of another study of this plan, which may be running. Raises UsageError, DataError."""
    if not (folder / LEDGER).is_file():
        raise UsageError(f"--merge {folder} contains no {LEDGER}; give the folder of a study")
    refuse_other_plan(plan, folder)
    return StudyLedger(folder / LEDGER)


def _report(plan: StudyPlan, root: Path, ledger: StudyLedger) -> None:
    from trainer.study.report.write import write_report  # loads pandas, matplotlib and statsmodels

    print(write_report(plan, root, ledger))


@contextmanager
def _interrupts_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at the first SIGINT or SIGTERM. Later ones are ignored, for an orderly end."""
    # A shell starts background commands with SIGINT ignored, which stays so.
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    numbers = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        for number in numbers:
            signal.signal(number, lambda *_: None)  # not SIG_IGN, which processes that this one starts would inherit
        raise KeyboardInterrupt

    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        # After an interruption the program ends, and later signals stay ignored.
        for number in numbers:
            if signal.getsignal(number) is interrupt:
                signal.signal(number, before[number])


if __name__ == "__main__":
    execute(main, interrupted=INTERRUPTED)
