"""The conversion of a plan's tables to command lines, and the check of every flag before anything runs."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.core import command_line
from pipeline.core.errors import DataError, UsageError
from pipeline.core.specs import from_flags
from trainer import simulate
from trainer.config import Config
from trainer.exchange import EXCHANGES
from trainer.flags import build_parser as build_trainer_parser
from trainer.flags import config_of
from trainer.models.own import OwnModel, is_reference
from trainer.options import Options
from trainer.plan import check_shares
from trainer.protocols import PROTOCOLS
from trainer.simulation.options import SimulationSettings
from trainer.study.plan.study_plan import TABLES, WORKERS, Cell, Run, StudyPlan, argv_of, drop_places

if TYPE_CHECKING:
    from trainer.data.shards import Shards

HOST = tuple(field.name for field in fields(Options))  # flags of a host, not of the run
# Keys that the study sets itself, by table.
FILLED = {
    "datasets": ("to", "workers", "order", "dirichlet"),
    "shardings": ("input", "eval_input", "output", "workers", "overwrite"),
    "training": ("shards", "output", "seed", "model_seed", "schedule_seed", "replay", "compare", *HOST),
}
FILLED |= {table: FILLED["training"] for table in ("models", "protocols", "virtual")}
FILLED |= {"variants": tuple(key for key in FILLED["training"] if key != WORKERS)}
# keys of [shardings.NAME] that are not flags of its command
SHARDS_KEY = "shards"
ORDER = "order"
SEED = "seed"
EXAMPLE_TABLE = "example_table"
EXAMPLE_TABLE_FLAG = "--example-table"
DIRICHLET = "dirichlet"  # the order of rows that has a concentration, as in dirichlet:0.3


@dataclass(frozen=True)
class Case:
    """The configuration of one run. simulated: the virtual cluster; None on real processes."""

    config: Config
    simulated: SimulationSettings | None


def case_of(plan: StudyPlan, run: Run, shards: str, output: Path) -> Case:
    """Return the configuration of a run.

    Raises UsageError for keys that are not flags of the trainer, and for invalid values.

    Args:
        plan: the plan of the study.
        run: its cell and seed.
        shards: URI of the shard set.
        output: folder of the run.
    """
    cell = run.cell
    parser = build_trainer_parser() if plan.backend == "processes" else simulate.parser()
    flags = parser.actions_by_flag()
    argv = argv_of(keys_of_cell(plan, cell), flags)
    argv += [f"--shards={shards}", f"--output={output}", f"--seed={plan.seed_of('order', run)}"]
    argv += [f"--model-seed={plan.seed_of('model', run)}"]
    if plan.backend == "processes":
        return Case(config_of(command_line.parse(parser, argv)), None)
    argv += [f"--schedule-seed={plan.seed_of('schedule', run)}"]
    # One thread per run in virtual time, because a study has one run per core.
    argv += [] if any(flag.startswith("--threads=") for flag in argv) else ["--threads=1"]
    args = command_line.parse(parser, argv)
    return Case(config_of(args), from_flags(SimulationSettings, args))


def keys_of_cell(plan: StudyPlan, cell: Cell) -> dict[str, Any]:
    """Return the flags of a cell's runs. A later table overrides an earlier one, and the variant overrides all."""
    tables = [plan.training, plan.models[cell.model], plan.protocols[cell.protocol], plan.virtual]
    keys = {key: value for table in tables for key, value in table.items()}
    variant = {key: value for key, value in plan.variants.get(cell.variant, {}).items() if key != WORKERS}
    exchange = EXCHANGES.get(str(variant.get("exchange")))
    # An exchange with an order of its own takes the place of the protocol, which its command line refuses.
    if exchange and (exchange.protocol or exchange().stages()):
        protocol = PROTOCOLS.get(str(keys.pop("protocol", "")))
        # Its flags too, such as a staleness bound, unless the exchange has the same.
        own = {item.name for item in fields(exchange)}
        for name in [item.name for item in fields(protocol)] if protocol else []:
            if name not in own:
                keys.pop(name, None)
    return keys | variant


class CellSettings(NamedTuple):
    """The settings of a cell, by flag, including defaults.

    Attributes:
        training: those that determine its training.
        simulation: those that determine its virtual time; empty on real processes.
    """

    training: dict[str, Any]
    simulation: dict[str, Any]


def cell_settings(plan: StudyPlan, cell: Cell) -> CellSettings:
    """Return the settings of a cell. Raises UsageError with the cell for invalid flags.

    The absolute address of an example table is not among them: ``sources`` has a digest of its content."""
    with _errors_at(str(cell)):
        case = case_of(plan, Run(cell, 0), "shards", Path("run"))
    left_out = {"--seed", "--model-seed", EXAMPLE_TABLE_FLAG}
    training = {name: value for name, value in case.config.essentials().items() if name not in left_out}
    values = case.simulated.to_json() if case.simulated else {}
    left_out = {"schedule_seed", "workers", "rows"}
    return CellSettings(training, {name: value for name, value in values.items() if name not in left_out})


def sources(plan: StudyPlan) -> dict[str, str]:
    """Return digests of the files that flags name, such as a model's module, by the place of the flag in the plan.

    The digest of a folder, such as an example ledger, is of its Parquet files.

    The content of data sets and ready sets is recorded in every line of the ledger instead."""
    digests = {}
    for table, owner, keys in _tables_of_flags(plan, (*TABLES, "training", "virtual")):
        for key, value in drop_places(keys).items():
            path = _file_of(value)
            content = path.read_bytes() if path else _table_folder(key, value)
            if content is not None:
                digests[".".join(filter(None, (table, owner, key)))] = sha256(content).hexdigest()[:16]
    return digests


def _tables_of_flags(plan: StudyPlan, tables: Iterable[str]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield each table of flags with its place in a plan, such as models and cnn; [training] and [virtual] have no name."""
    for table in tables:
        members = getattr(plan, table)
        for name, flags in members.items() if table in TABLES else [("", members)]:
            yield table, name, flags


def _table_folder(key: str, value: Any) -> bytes | None:
    """Return the names and digests of the files of an example table that is a folder; None for any other value."""
    folder = Path(str(value))
    if key != EXAMPLE_TABLE or not folder.is_dir():
        return None
    paths = sorted(path for path in folder.iterdir() if path.suffix == ".parquet")
    return b"".join(path.name.encode() + b"\0" + sha256(path.read_bytes()).digest() for path in paths)


def _file_of(value: Any) -> Path | None:
    """Return the file that the value of a flag names, also as MODULE:FUNCTION, or None."""
    if not isinstance(value, str) or not re.search("[:/.]", value):  # a strategy may have the name of a file
        return None
    module, _, function = value.partition(":")
    places = [value, function] + [f"{module.replace('.', '/')}.py"] * is_reference(value)
    return next((path for path in map(Path, filter(None, places)) if path.is_file()), None)


def sharding_args(
    keys: Mapping[str, Any], workers: int, seed: int, source: str, evaluation: str, output: Path
) -> list[str]:
    """Return the arguments of ``python -m pipeline shard`` that make a set.

    Raises UsageError for keys that are not flags.

    Args:
        keys: of the way of sharding in the plan.
        workers: number of shards.
        seed: of the strategy.
        source: the training rows.
        evaluation: the evaluation rows.
        output: folder of the set.
    """
    from pipeline.runs.flags import shard_parser

    own = {key: value for key, value in keys.items() if key != ORDER}
    places = [f"--input={source}", f"--eval-input={evaluation}", f"--output={output}", f"--workers={workers}"]
    # A seed of its own makes the shards of a way of sharding the same for all runs, while everything else varies.
    places += [] if SEED in own else [f"--seed={seed}"]
    return [*argv_of(own, shard_parser().actions_by_flag()), *places, "--quiet"]


def check_plan(plan: StudyPlan, unread: Container[str] = ()) -> None:
    """Raise UsageError, or DataError for a broken set, for every fault that would stop a run before its training.

    unread: names of data sets that are not read, because all their shard sets are prepared."""
    for table, owner, keys in _tables_of_flags(plan, FILLED):
        key = next((key for key in FILLED[table] if key in keys and (table, key) != ("shardings", ORDER)), None)
        if key:
            raise UsageError(f"{_place(table, owner)}: {key} is set by the study; leave it out")
    for name in plan.shardings:
        with _errors_at(_place("shardings", name)):
            _check_sharding(plan, name)
    for name in plan.datasets:
        # A host on which a study was prepared elsewhere has no data sets.
        if name not in unread:
            with _errors_at(_place("datasets", name)):
                _check_dataset(plan, name)
    for cell in plan.cells():
        with _errors_at(str(cell)):
            _check_cell(plan, cell)


def open_ready(plan: StudyPlan, name: str) -> Shards:
    """Open a ready set. Raises UsageError if it does not suit the plan, DataError if there is none.

    It must have the plan's number of workers, labels, and evaluation rows."""
    from trainer.data.opening import open_shards

    shards = open_shards(str(plan.shardings[name][SHARDS_KEY]))
    for workers in workers_of_sharding(plan, name):
        if shards.num_workers != workers:
            raise UsageError(f"{shards.uri} is a set for {shards.num_workers} workers, the plan has {workers}")
    if not shards.has_labels:
        raise UsageError(f"{shards.uri} has no labels: a study compares accuracies, which are of classes")
    if not shards.manifest.evaluation:
        raise UsageError(f"{shards.uri} has no evaluation rows, which every run is measured on")
    return shards


def workers_of_sharding(plan: StudyPlan, name: str) -> list[int]:
    """Return the numbers of workers of the cells that have a way of sharding, ascending."""
    return sorted({plan.workers_of(cell) for cell in plan.cells() if cell.sharding == name})


def derivation(plan: StudyPlan, name: str, order: str, workers: int) -> Any:
    """Return the changes to a data set before it is sharded. Raises UsageError for invalid keys.

    Args:
        plan: the plan of the study.
        name: of the data set.
        order: of the rows, "given", "class-blocks" or "dirichlet:ALPHA".
        workers: for whom the rows are ordered.
    """
    from pipeline.datasets.derive import Derivation, parser

    keys = {key: value for key, value in plan.datasets[name].items() if key not in ("input", "eval_input")}
    name_of_order, _, alpha = order.partition(":")
    how = f"--dirichlet={alpha}" if name_of_order == DIRICHLET else f"--order={order}"
    blocks = [how, f"--workers={workers}"] if order != "given" else []
    flags = parser()
    argv = [*argv_of(keys, flags.actions_by_flag()), "--input=-", "--to=-", *blocks]
    return from_flags(Derivation, command_line.parse(flags, argv))


def _check_dataset(plan: StudyPlan, name: str) -> None:
    """Raise UsageError if a data set lacks an input, labels, evaluation rows, or enough rows for the workers.

    The study makes its shard sets from the data set, except for the ready sets that the plan names. If all shardings of
    the data set are ready sets, it is never read, and nothing is checked.

    name: the name of the data set in the plan."""
    from pipeline.datasets.derive import Derivation, check_derivation, train_and_test

    keys = plan.datasets[name]
    used = {cell.sharding for cell in plan.cells() if cell.dataset == name}
    most = max((plan.workers_of(cell) for cell in plan.cells() if cell.dataset == name), default=plan.workers)
    if used and all(SHARDS_KEY in plan.shardings[sharding] for sharding in used):
        return
    if "input" not in keys:
        raise UsageError('input is missing: name the images, such as input = "data/cifar10/cifar-10-batches-bin"')
    # An order such as class-blocks is a derivation of its own, which the data set must allow.
    orders = {
        str(plan.shardings[sharding].get(ORDER, "given"))
        for sharding in used
        if SHARDS_KEY not in plan.shardings[sharding]
    }
    train, test = train_and_test(str(keys["input"]), keys.get("eval_input"))
    if test is None:
        raise UsageError(f"{train.uri} has no evaluation rows, which every run is measured on: name some as eval_input")
    if not train.layout.labelled:
        raise UsageError(f"{train.uri} has no labels: a study compares accuracies, which are of classes")
    rows = train.rows
    for order_derivation in (derivation(plan, name, order, most) for order in sorted(orders)):
        if order_derivation != Derivation():
            check_derivation(order_derivation, train)
            # A derivation may keep fewer rows than there are.
            rows = min(order_derivation.rows or rows, rows)
    if most > rows:
        raise UsageError(f"workers = {most} is more than the {rows} rows")


def _check_sharding(plan: StudyPlan, name: str) -> None:
    """Raise UsageError, or DataError for a broken set, if a plan's table of a sharding is invalid.

    A table with the key ``shards`` names a ready set, which must suit the plan, be used for a single data set, and be
    the only key. For any other table the study makes the sets: ``order`` and the flags must be valid, and the sets
    must keep their labels. In both cases, runs with different seeds must differ.

    name: the table's name."""
    from pipeline.runs.flags import read_request

    keys = plan.shardings[name]
    # A ready set takes the place of a set that the study would make of one data set.
    if SHARDS_KEY in keys:
        owners = {cell.dataset for cell in plan.cells() if cell.sharding == name}
        if len(owners) > 1:
            raise UsageError(
                f"a ready set is of one data set, not of {', '.join(sorted(owners))}: use skip for the others"
            )
        if len(keys) > 1:
            raise UsageError("shards names a ready set, which takes no other key")
        open_ready(plan, name)
        _check_varies(plan, uses_seed=False)
        return
    order = keys.get(ORDER, "given")
    if order not in ("given", "class-blocks") and not str(order).startswith(f"{DIRICHLET}:"):
        raise UsageError(f"order must be given, class-blocks or {DIRICHLET}:ALPHA, got {order!r}")
    # Flags such as ratios fit some numbers of workers only.
    for workers in workers_of_sharding(plan, name) or [plan.workers]:
        if read_request(_shard_flags(plan, name, workers)).read_options.unlabelled:
            raise UsageError("unlabelled = true: a study compares accuracies, which are of classes")
    with_seed = SEED not in keys and _shards_use_seed(plan, name)
    _check_varies(plan, uses_seed=with_seed)


def _check_varies(plan: StudyPlan, *, uses_seed: bool) -> None:
    """Raise UsageError if shards must differ, between seeds or as crossed sets, but these shards do not.

    uses_seed: whether the seed changes the shards."""
    if plan.sets and not uses_seed:
        raise UsageError(
            f"its shards are the same for every seed, so that there are no sets = {plan.sets} to be crossed"
        )
    if not uses_seed and set(plan.vary) == {"sharding"}:
        raise UsageError('its shards are the same for every seed, and vary = ["sharding"] changes nothing else')


def strategy_of(plan: StudyPlan, name: str) -> Any:
    """Return the strategy of a way of sharding. Raises UsageError with its table for invalid flags."""
    with _errors_at(_place("shardings", name)):
        return _strategy(plan, name)


def shards_use_seed(plan: StudyPlan, name: str) -> bool:
    """Return whether the shards of a way of sharding depend on the seed, by their rows or by their sizes alone.

    Raises UsageError with its table for invalid flags."""
    with _errors_at(_place("shardings", name)):
        return _shards_use_seed(plan, name)


def _shards_use_seed(plan: StudyPlan, name: str) -> bool:
    draws_sizes = str(plan.shardings[name].get("ratios", "")).startswith("lognormal")
    return draws_sizes or bool(_strategy(plan, name).uses_seed())


def _strategy(plan: StudyPlan, name: str) -> Any:
    from pipeline.runs.flags import strategy_of_flags

    return strategy_of_flags(_shard_flags(plan, name, plan.workers))


def _shard_flags(plan: StudyPlan, name: str, workers: int) -> Namespace:
    from pipeline.runs.flags import shard_parser

    argv = sharding_args(plan.shardings[name], workers, 0, "train", "test", Path("shards"))
    return command_line.parse(shard_parser(), argv)


def _check_cell(plan: StudyPlan, cell: Cell) -> None:
    """Raise UsageError if a cell has invalid flags, flags that do not suit the workers, or does not train on shards.

    Raises DataError for an example table that is missing or lacks columns."""
    from trainer.data.example_table import check_table

    # No shard set exists yet. Only the flags are checked, so any seed, shard set and folder stand for those of a run.
    case = case_of(plan, Run(cell, plan.seeds[0]), "shards", Path("run"))
    if case.simulated and (case.simulated.compute != "real" or case.simulated.workers is not None):
        raise UsageError("a study trains on its shards: leave out compute and workers")
    if isinstance(case.config.model, OwnModel):
        case.config.model.function()  # imports the user's module; raises UsageError if it or the function is missing
    workers = plan.workers_of(cell)
    check_shares(case.config, workers)
    check_table(case.config.sampler)
    if case.simulated:
        case.simulated.check(workers)


@contextmanager
def _errors_at(place: str) -> Iterator[None]:
    """Prefix the message of a UsageError or DataError with a place in the plan."""
    try:
        yield
    except (UsageError, DataError) as error:
        raise type(error)(f"{place}: {error}") from None


def _place(table: str, name: str) -> str:
    return f"[{table}.{name}]" if name else f"[{table}]"
