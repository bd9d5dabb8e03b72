"""The plan of a study: a TOML file whose tables are combined in all ways. Pure: reads nothing but the file.

    title = "Two ways of sharding"
    seeds = 5

    [datasets.sample]
    input = "build/sample"
    eval_input = "build/sample"

    [shardings.random]
    strategy = "random"

    [shardings.stratified]
    strategy = "stratified"

    [models.cnn]
    model = "cnn"

    [protocols.asp]
    protocol = "asp"

    [variants.four-workers]
    workers = 4

    [variants.slow-matcha]
    exchange = "matcha"
    profile = "one-slow:4"

    [training]
    epochs = 5

The keys of a table are the long flags of its command, with underscores, as in conf/*.toml: ``python -m pipeline
derive`` (datasets), ``python -m pipeline shard`` (shardings), ``python -m trainer`` (models, protocols and training)
and ``python -m trainer.simulate`` (virtual). ``variants`` may be left out. A variant takes the flags of training and, in
virtual time, of the simulation, which override the flags of all other tables, and ``workers``, which overrides the
plan's. A value may be a list, which makes one table per value (``trainer.study.plan.grids``)."""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pipeline.core.errors import DataError, UsageError
from trainer.study.plan.grids import expand_grids

Axis = Literal["sharding", "protocol", "model", "variant"]
Source = Literal["model", "order", "sharding", "schedule"]
SOURCES: tuple[str, ...] = get_args(Source)
TABLES = ("datasets", "shardings", "models", "protocols", "variants")
OPTIONAL = "variants"  # a plan without this table has cells without a variant, whose names have four parts
WORKERS = "workers"  # the key of a variant that is not a flag: shards are made for this number
LONGEST = 200  # characters of a cell's name, since file names have at most 255
NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,59}", re.ASCII)
KEY = re.compile(r"[a-z][a-z0-9_]*")
MAX_SEEDS = 100_000
NO_KEYS = ("help", "help_all", "config", "debug", "log_format", "quiet", "silent")  # flags that do not affect a run
Table = Mapping[str, Any]


class Cell(NamedTuple):
    """A combination that is trained with every seed. variant: empty if the plan has none."""

    dataset: str
    sharding: str
    model: str
    protocol: str
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(filter(None, self))


class Run(NamedTuple):
    """A training run of a study. str(run) is its name in the ledger."""

    cell: Cell
    seed: int

    def __str__(self) -> str:
        return f"{self.cell}/{self.seed}"


@dataclass(frozen=True)
class StudyPlan:
    """A study's tables and settings.

    Attributes:
        title: of the report.
        datasets, shardings, models, protocols: flags by the names of data sets, ways of sharding, models and protocols.
        variants: flags of training, and numbers of workers, by the names of variants; empty for none.
        seeds: every cell is run once with each.
        workers: of every run whose variant has no number of its own.
        backend: "virtual" simulates the cluster in virtual time, "processes" runs real processes.
        sets: number of shard sets that are crossed with all else: run seed r has shards of seed r % sets, and r // sets
            for the other sources. 0: every seed has shards of its own.
        vary: the sources of randomness that differ between seeds; all others have seed 0 in every run.
        compare: the axis whose members are compared.
        baseline: the member of ``compare`` with which the others are compared; the first one by default.
        margin: two mean accuracies are equivalent if they differ by less.
        target: evaluation accuracy; the report has the time until runs reach it. None for no such table.
        target_loss: loss of training rows with the L2 term, likewise.
        times: seconds of training, increasing; the report has the accuracy that runs have by then. Empty for no such table.
        beside: name of another study's folder next to this one; its runs are compared with the runs of equal name here.
        skip: patterns of cells that are left out, such as "cifar100-*/stratified/*".
        training: flags of every run.
        virtual: flags of the simulated cluster.
    """

    title: str
    datasets: Mapping[str, Table]
    shardings: Mapping[str, Table]
    models: Mapping[str, Table]
    protocols: Mapping[str, Table]
    seeds: tuple[int, ...]
    variants: Mapping[str, Table] = field(default_factory=dict)
    workers: int = 12
    sets: int = 0
    backend: Literal["virtual", "processes"] = "virtual"
    vary: tuple[str, ...] = SOURCES
    compare: Axis = "sharding"
    baseline: str = ""
    margin: float = 0.005
    target: float | None = None
    target_loss: float | None = None
    times: tuple[float, ...] = ()
    beside: str = ""
    skip: tuple[str, ...] = ()
    training: Table = field(default_factory=dict)
    virtual: Table = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Set the default baseline. Raises UsageError, with key and value, for a plan that cannot be carried out."""
        for table in TABLES:
            _check_names(table, getattr(self, table))
        if not self.seeds:
            raise UsageError("seeds must be at least 1, got 0")
        if self.workers < 1:
            raise UsageError(f"workers must be at least 1, got {self.workers}")
        if self.sets and (self.sets < 2 or "sharding" not in self.vary or len(self.vary) < 2):
            raise UsageError(f"sets = {self.sets} must be at least 2, and vary must name sharding and another source")
        if self.sets and self.beside:
            raise UsageError(
                "beside compares independent runs, which the runs of a plan with sets are not: leave it out"
            )
        for name, keys in self.variants.items():
            workers = keys.get(WORKERS, 1)
            if type(workers) is not int or workers < 1:
                raise UsageError(f"[variants.{name}]: workers must be a whole number of at least 1, got {workers!r}")
        _one_of("backend", self.backend, ("virtual", "processes"))
        _one_of("compare", self.compare, get_args(Axis))
        if not self.members:
            raise UsageError(f'compare = "{self.compare}" needs tables [{self.compare}s.NAME]; there are none')
        for source in self.vary:
            _one_of("vary", source, SOURCES)
        if not self.vary:
            raise UsageError(f"vary names nothing: every seed would be the same run; name some of {', '.join(SOURCES)}")
        if not 0 < self.margin < 1:
            raise UsageError(f"margin must be an accuracy more than 0 and below 1, got {self.margin}")
        object.__setattr__(self, "baseline", self.baseline or next(iter(self.members)))  # the dataclass is frozen
        _one_of("baseline", self.baseline, tuple(self.members))
        if self.target is not None and not 0 < self.target <= 1:
            raise UsageError(f"target must be an accuracy more than 0 and at most 1, got {self.target}")
        if self.target_loss is not None and not 0 < self.target_loss < math.inf:
            raise UsageError(f"target_loss must be a loss more than 0, got {self.target_loss}")
        if not all(earlier < later for earlier, later in pairwise((0, *self.times, math.inf))):
            raise UsageError(f"times must be seconds more than 0 that increase, got {list(self.times)}")
        if self.beside and not NAME.fullmatch(self.beside):
            raise UsageError(f"beside must be the name of a study's folder next to this one's, got {self.beside!r}")
        for pattern in self.skip:
            if not any(fnmatchcase(str(cell), pattern) for cell in replace(self, skip=()).cells()):
                raise UsageError(f"skip: no cell is named {pattern}; cells are {self._form_of_cells()}")
        if not self.cells():
            raise UsageError("skip leaves nothing to train")
        if not any(getattr(cell, self.compare) == self.baseline for cell in self.cells()):
            raise UsageError(f"skip leaves out the baseline, {self.baseline}, with which the others are compared")
        if len(longest := max(map(str, self.cells()), key=len)) > LONGEST:
            raise UsageError(
                f"{longest} has {len(longest)} characters, and names of runs are file names with at most {LONGEST}"
            )
        if self.virtual and self.backend != "virtual":
            raise UsageError('the table [virtual] is for backend = "virtual"; leave it out')

    @property
    def members(self) -> Mapping[str, Table]:
        """Return the tables of the compared axis, by member."""
        tables: Mapping[str, Table] = getattr(self, f"{self.compare}s")
        return tables

    def cells(self) -> list[Cell]:
        """Return every combination that is not skipped, in the order of the file."""
        axes = (self.datasets, self.shardings, self.models, self.protocols, self.variants or ("",))
        every = (Cell(*names) for names in product(*axes))
        return [cell for cell in every if not any(fnmatchcase(str(cell), pattern) for pattern in self.skip)]

    def workers_of(self, cell: Cell) -> int:
        """Return the number of workers of a cell's runs: its variant's, or the plan's."""
        return int(self.variants.get(cell.variant, {}).get(WORKERS, self.workers))

    def runs(self) -> Iterator[Run]:
        """Return all runs, seed by seed, so that all cells of an unfinished study have about equally many runs."""
        return (Run(cell, seed) for seed in self.seeds for cell in self.cells())

    def seed_of(self, source: Source, run: Run) -> int:
        """Return the seed of one source of randomness in a run."""
        seed = run.seed
        if self.sets:
            seed = run.seed % self.sets if source == "sharding" else run.seed // self.sets
        return seed if source in self.vary else 0

    def identity(self) -> dict[str, Any]:
        """Return the part of the plan that must not change within a study's folder, apart from added members.

        Seeds, paths of data, title, skipped cells, and the choice of comparisons and tests are not part of it."""
        tables = {table: {name: drop_places(keys) for name, keys in getattr(self, table).items()} for table in TABLES}
        scalars: dict[str, Any] = {"workers": self.workers, "backend": self.backend, "vary": sorted(self.vary)}
        scalars |= {"sets": self.sets} if self.sets else {}
        if not self.variants:  # as plans were before there were variants
            del tables[OPTIONAL]
        return tables | scalars | {"training": dict(self.training), "virtual": dict(self.virtual)}

    def _form_of_cells(self) -> str:
        return "/".join(axis.upper() for axis in Cell._fields[: len(Cell._fields) - (not self.variants)])

    def tests(self) -> dict[str, Any]:
        """Return the choices that should be made before the results are known."""
        return {"baseline": self.baseline, "margin": self.margin, "seeds": len(self.seeds)}


def read_plan(path: Path) -> StudyPlan:
    """Read the plan of a TOML file. Raises UsageError with file, key and value, and DataError for a missing trace."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"the plan {path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"the plan {path} cannot be read: {error}") from None
    try:
        return plan_of(values, default_title=path.stem)
    except (UsageError, DataError) as error:
        raise type(error)(f"{path}: {error}") from None


def plan_of(values: Table, *, default_title: str = "") -> StudyPlan:
    """Return the plan of a parsed file. Raises UsageError with key and value."""
    field_names = {item.name for item in fields(StudyPlan)}
    unknown = next((key for key in values if key not in field_names), None)
    if unknown:
        raise UsageError(f"unknown key {unknown!r}; keys are {', '.join(sorted(field_names))}")
    for key in (*TABLES, "training", "virtual"):
        _check_table(key, values.get(key, {}), nested=key in TABLES)
    for key in ("title", "backend", "compare", "baseline", "beside"):
        _check_type(values, key, str, "a text")
    for key in ("workers", "sets"):
        _check_type(values, key, int, "a whole number")
    _check_type(values, "margin", float, "a number such as 0.005")
    _check_type(values, "target", float, "an accuracy such as 0.4")
    _check_type(values, "target_loss", float, "a loss such as 0.37")
    vary = _texts(values, "vary", SOURCES)
    # Zero is reported as an invalid number of seeds, not as a missing key.
    required = [key for key in (*TABLES, "seeds") if key != OPTIONAL]
    missing = next((key for key in required if not values.get(key) and values.get(key) != 0), None)
    if missing:
        example = "seeds = 19" if missing == "seeds" else f"[{missing}.NAME]"
        raise UsageError(f"{missing} is missing: a plan needs {example}")
    tables = {table: expand_grids(values[table], table) for table in TABLES if table in values}
    lists = {"seeds": seeds_of(values["seeds"]), "vary": vary, "skip": _texts(values, "skip", ())}
    lists |= {"times": _seconds(values, "times")}
    arguments: dict[str, Any] = {"title": default_title} | dict(values) | tables | lists
    return StudyPlan(**arguments)


def seeds_of(value: Any) -> tuple[int, ...]:
    """Return the seeds of a plan, given as their number (0, 1, ...) or as a list. Raises UsageError."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= MAX_SEEDS:
            raise UsageError(f"seeds must be from 1 to {MAX_SEEDS}, got {value}")
        return tuple(range(value))
    if not isinstance(value, list) or not all(type(seed) is int and 0 <= seed < 1 << 63 for seed in value):
        raise UsageError(f"seeds = {value!r} is neither a number of seeds nor a list of them")
    twice = next((seed for seed, times in Counter(value).items() if times > 1), None)
    if twice is not None:
        raise UsageError(f"seeds names {twice} twice")
    return tuple(value)


def argv_of(keys: Table, flags: Container[str]) -> list[str]:
    """Return a table as a command line: ``norm = "group"`` is --norm group, ``augment = false`` is --no-augment.

    flags: all flags of the command; abbreviations are not accepted. Raises UsageError for a key that is not a flag."""
    argv: list[str] = []
    for key, value in keys.items():
        flag = f"--{key.replace('_', '-')}"
        if flag not in flags or key in NO_KEYS:
            raise UsageError(f"{key} = {value!r}: there is no such flag")
        if isinstance(value, bool):
            argv.append(flag if value else f"--no-{flag.removeprefix('--')}")
        else:
            argv.append(f"{flag}={value}")
    return argv


def drop_places(keys: Table) -> dict[str, Any]:
    """Return a table without paths of data.

    A data set or a ready shard set may have another path on another host; its content is compared instead."""
    return {key: value for key, value in keys.items() if key not in ("input", "eval_input", "shards")}


def _check_names(table: str, members: Mapping[str, Table]) -> None:
    for name in members:
        if not NAME.fullmatch(name):
            raise UsageError(f"[{table}.{name}]: a name has letters, digits and _ . + - only, at most 60")


def _check_table(key: str, value: Any, *, nested: bool, may_list: bool = False) -> None:
    """Raise UsageError unless ``value`` is a table of flags or, if ``nested``, a table of such tables by name.

    may_list: whether a flag may have a list of values, as in a grid."""
    if not isinstance(value, dict):
        raise UsageError(f"{key} = {value!r} is not a table: write [{key}{'.NAME' * nested}]")
    for name, inner in value.items():
        listed = inner if may_list and isinstance(inner, list) else [inner]
        if nested:
            if not isinstance(inner, dict):
                raise UsageError(f"{key}.{name} = {inner!r} is not a table: write [{key}.NAME]")
            _check_table(f"{key}.{name}", inner, nested=False, may_list=True)
        elif not all(isinstance(one, str | int | float) for one in listed):
            raise UsageError(f"{key}.{name} = {inner!r} is not the value of a flag")
        elif not KEY.fullmatch(name):
            raise UsageError(f"{key}.{name} is not the name of a flag, written with underscores")


def _texts(values: Table, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    texts = values.get(key, default)
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{key} = {texts!r} is not a list of texts")
    return tuple(texts)


def _seconds(values: Table, key: str) -> tuple[float, ...]:
    times = values.get(key, ())
    if not isinstance(times, list | tuple) or not all(type(seconds) in (int, float) for seconds in times):
        raise UsageError(f"{key} = {times!r} is not a list of seconds such as [60, 120]")
    return tuple(times)


def _check_type(values: Table, key: str, kind: type, words: str) -> None:
    value = values.get(key)
    fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
    if value is not None and not fits:
        raise UsageError(f"{key} = {value!r} is not {words}")


def _one_of(key: str, value: str, names: tuple[str, ...]) -> None:
    if value not in names:
        raise UsageError(f"{key} must be one of {', '.join(names)}, got {value!r}")
