"""Plans of studies: what they multiply out to, and the line for each way in which one can be wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import DataError, UsageError
from tests.clusters.machine import ROOT
from tests.support.exit_codes import ended
from tests.support.made_up_study import make_plan
from trainer.config import Config
from trainer.exchange.sync_switch import SyncSwitch
from trainer.study.__main__ import find_plan, main, plan_names, share, share_of_runs
from trainer.study.plan import cases
from trainer.study.plan.cases import case_of, cell_settings, check_plan
from trainer.study.plan.study_plan import Cell, Run, argv_of, plan_of, read_plan, seeds_of
from trainer.study.run.sets import SetKey, Sets

PLAN = """
seeds = {seeds}
{more}
[datasets.sample]
input = "{data}"
[shardings.random]
strategy = "random"
[shardings.other]
{other}
[models.cnn]
model = "cnn"
[protocols.asp]
protocol = "asp"
[training]
{training}
"""


def write_plan(folder: Path, **values: str) -> Path:
    usual = {"seeds": "3", "more": "", "data": "nowhere", "other": 'strategy = "stratified"', "training": "epochs = 1"}
    path = folder / "plan.toml"
    path.write_text(PLAN.format(**usual | values))
    return path


def test_runs_are_every_combination_seed_after_seed() -> None:
    plan = make_plan(seeds=2, protocols={"asp": {"protocol": "asp"}, "bsp": {"protocol": "bsp"}})
    names = [str(run) for run in plan.runs()]
    assert names[:4] == [
        "made-up/random/cnn/asp/0",
        "made-up/random/cnn/bsp/0",
        "made-up/stratified/cnn/asp/0",
        "made-up/stratified/cnn/bsp/0",
    ]
    assert len(names) == len(set(names)) == 8
    assert names[4:] == [name.removesuffix("0") + "1" for name in names[:4]]


def test_cells_can_be_left_out() -> None:
    plan = make_plan(("random", "stratified", "round_robin"), skip=["*/stratified/*", "made-up/round*"])
    assert [cell.sharding for cell in plan.cells()] == ["random"]


def test_lists_in_a_table_make_one_table_for_each_combination() -> None:
    tables: dict[str, dict[str, Any]] = {
        "shuffle": {},
        "e{epochs}-{sampling}-{augment}": {"epochs": [2, 1], "sampling": ["shuffle", "balanced"], "augment": [False]},
        "last": {"epochs": 3},
    }
    plan = make_plan(variants=tables, compare="variant")
    assert {name: dict(keys) for name, keys in plan.variants.items()} == {
        "shuffle": {},
        "e2-shuffle-false": {"epochs": 2, "sampling": "shuffle", "augment": False},
        "e2-balanced-false": {"epochs": 2, "sampling": "balanced", "augment": False},
        "e1-shuffle-false": {"epochs": 1, "sampling": "shuffle", "augment": False},
        "e1-balanced-false": {"epochs": 1, "sampling": "balanced", "augment": False},
        "last": {"epochs": 3},
    }
    assert list(plan.variants)[1:3] == ["e2-shuffle-false", "e2-balanced-false"]
    assert case_of(plan, Run(plan.cells()[2], 0), "s", Path("o")).config.data.sampling == "balanced"


def test_seeds_of_sources_that_do_not_vary_are_zero() -> None:
    plan = make_plan(vary=["order", "schedule"])
    run = Run(plan.cells()[0], 4)
    assert [plan.seed_of(source, run) for source in ("model", "order", "sharding", "schedule")] == [0, 4, 0, 4]


def test_each_source_of_randomness_has_its_own_seed_in_the_run() -> None:
    for source, where in (("model", "model_seed"), ("order", "seed"), ("schedule", "schedule_seed")):
        plan = make_plan(vary=[source])
        case = case_of(plan, Run(plan.cells()[0], 7), "s", Path("o"))
        assert case.simulated is not None
        found = {
            "seed": case.config.run.seed,
            "model_seed": case.config.model_seed,
            "schedule_seed": case.simulated.schedule_seed,
        }
        assert found == {key: 7 if key == where else 0 for key in found}


def test_a_cell_is_trained_as_its_tables_say() -> None:
    plan = make_plan(
        models={"small": {"model": "cnn", "norm": "group"}},
        protocols={"slow": {"protocol": "ssp", "staleness_bound": 2}},
        training={"epochs": 4, "batch_size": 60, "augment": False},
        virtual={"profile": "one-slow:3"},
    )
    case = case_of(plan, Run(plan.cells()[0], 1), "s", Path("o"))
    values = case.config.to_json()
    assert values["model"] == {"name": "cnn", "norm": "group"}
    assert values["protocol"] == {"name": "ssp", "staleness_bound": 2}
    assert (values["run"]["epochs"], values["data"]["batch_size"], values["data"]["augment"]) == (4, 60, False)
    assert case.simulated is not None
    assert case.simulated.to_json()["profile"] == "one-slow:3"
    assert case.config.processes.threads == 1


def test_a_plan_may_list_drops_of_the_rate() -> None:
    plan = make_plan(training={"epochs": 200, "drops": "100,150"})
    cell = plan.cells()[0]
    assert case_of(plan, Run(cell, 1), "s", Path("o")).config.optimiser.drops == (100, 150)
    assert cell_settings(plan, cell).training["--drops"] == (100, 150)
    with pytest.raises(UsageError, match="--drops and --recipe ch6 both set the schedule"):
        case_of(make_plan(training={"epochs": 200, "drops": 90, "recipe": "ch6"}), Run(cell, 1), "s", Path("o"))


def test_on_real_processes_a_case_is_a_configuration_alone() -> None:
    plan = make_plan(backend="processes", training={"epochs": 2, "servers": 2})
    case = case_of(plan, Run(plan.cells()[0], 1), "s", Path("o"))
    assert isinstance(case.config, Config)
    assert case.simulated is None
    assert case.config.processes.servers == 2


def test_what_decides_the_training_holds_defaults_and_no_seeds() -> None:
    plan = make_plan()
    found = cell_settings(plan, plan.cells()[0]).training
    assert found["--learning-rate"] == 0.01
    assert not {"--seed", "--model-seed", "--output", "--shards"} & set(found)


def test_a_variant_overrides_all_other_tables() -> None:
    variants = {"plain": {}, "few": {"workers": 4, "epochs": 2, "protocol": "bsp", "profile": "one-slow:2"}}
    plan = make_plan(variants=variants, virtual={"profile": "homogeneous"}, compare="variant", seeds=1)
    assert [str(run) for run in plan.runs()][:2] == ["made-up/random/cnn/asp/plain/0", "made-up/random/cnn/asp/few/0"]
    plain, few = (case_of(plan, Run(cell, 1), "s", Path("o")) for cell in plan.cells()[:2])
    assert (plain.config.run.epochs, plain.config.protocol.name) == (3, "asp")
    assert (few.config.run.epochs, few.config.protocol.name) == (2, "bsp")
    assert [case.simulated.to_json()["profile"] for case in (plain, few) if case.simulated] == [
        "homogeneous",
        "one-slow:2",
    ]
    assert [plan.workers_of(cell) for cell in plan.cells()[:2]] == [12, 4]
    assert (plan.baseline, list(plan.members)) == ("plain", ["plain", "few"])


def test_an_exchange_takes_the_place_of_a_protocol_and_its_flags() -> None:
    variants = {"matcha": {"exchange": "matcha"}, "plain": {}}
    plan = make_plan(protocols={"ssp": {"protocol": "ssp", "staleness_bound": 2}}, variants=variants, compare="variant")
    matcha, plain = (case_of(plan, Run(cell, 1), "s", Path("o")).config.to_json() for cell in plan.cells()[:2])
    assert matcha["exchange"]["name"] == "matcha"
    assert plain["protocol"] == {"name": "ssp", "staleness_bound": 2}


def test_a_missing_example_table_is_one_line_before_any_run(tmp_path: Path) -> None:
    variants = {"hard": {"sampling": "curriculum", "example_table": str(tmp_path / "none")}}
    plan = make_plan(("random",), variants=variants)
    with pytest.raises(DataError, match=r"--example-table \S+none does not exist"):
        cases._check_cell(plan, plan.cells()[0])


@pytest.mark.parametrize("backend", ["virtual", "processes"])
def test_a_variant_is_any_sampler_exchange_or_repartition(backend: str) -> None:
    variants: dict[str, dict[str, Any]] = {
        "representative": {"sampling": "representative"},
        "matcha": {"exchange": "matcha", "topology": "ring"},
        "switch": {"exchange": "sync-switch", "fraction": 0.25},
        "reduced": {"exchange": "all-reduce"},
        "importance": {"repartition": "importance", "protocol": "bsp", "warmup_epochs": 1, "ignore_epochs": 0},
    }
    plan = make_plan(variants=variants, backend=backend, compare="variant")
    configs = {cell.variant: case_of(plan, Run(cell, 1), "s", Path("o")).config.to_json() for cell in plan.cells()}
    assert configs["representative"]["sampler"]["name"] == "representative"
    exchanges = {name: config["exchange"]["name"] for name, config in configs.items()}
    assert (exchanges["matcha"], exchanges["switch"], exchanges["reduced"]) == ("matcha", "sync-switch", "all-reduce")
    assert exchanges["representative"] == "parameter-server"
    assert configs["importance"]["data"]["repartition"] == "importance"


def test_shards_of_other_numbers_of_workers_are_other_sets(tmp_path: Path) -> None:
    variants = {name: {"workers": workers} for name, workers in (("a", 2), ("b", 3), ("c", 2))}
    shardings = {"random": {"strategy": "random"}, "blocks": {"strategy": "round_robin", "order": "class-blocks"}}
    sets = Sets(make_plan(variants=variants, shardings=shardings), tmp_path)
    runs = [Run(Cell("made-up", "blocks", "cnn", "asp", name), 0) for name in variants]
    keys = [sets.key(run) for run in runs]
    assert keys[0] == keys[2] != keys[1]
    tasks = [sets._task(key) for key in keys[:2]]
    assert ["--workers=2" in tasks[0]["shard"], "--workers=3" in tasks[1]["shard"]] == [True, True]
    assert [task["derive"]["derivation"]["workers"] for task in tasks] == [2, 3]
    assert tasks[0]["derive"]["target"] != tasks[1]["derive"]["target"]
    # The order of the rows depends on the workers, and so do the fingerprints of the training images.
    assert sets.owner(runs[0]) == sets.owner(runs[2]) != sets.owner(runs[1])


def test_a_sharding_with_a_seed_has_the_same_shards_in_every_run(tmp_path: Path) -> None:
    sets = Sets(
        make_plan(shardings={"fixed": {"strategy": "random", "seed": 3}, "random": {"strategy": "random"}}), tmp_path
    )
    fixed, varied = (
        [sets.key(Run(Cell("made-up", name, "cnn", "asp"), seed)) for seed in (0, 1)] for name in ("fixed", "random")
    )
    assert fixed[0] == fixed[1]
    assert varied[0] != varied[1]
    assert [flag for flag in sets._task(fixed[0])["shard"] if flag.startswith("--seed")] == ["--seed=3"]
    assert [flag for flag in sets._task(varied[1])["shard"] if flag.startswith("--seed")] == ["--seed=1"]


def test_sizes_that_are_drawn_differ_between_seeds(tmp_path: Path) -> None:
    """Sizes of which the seed decides, under a strategy that has none."""
    sets = Sets(make_plan(shardings={"sizes": {"strategy": "stratified", "ratios": "lognormal:0.5"}}), tmp_path)
    keys = [sets.key(Run(Cell("made-up", "sizes", "cnn", "asp"), seed)) for seed in (0, 1)]
    assert keys[0] != keys[1]
    assert [flag for flag in sets._task(keys[1])["shard"] if flag.startswith("--seed")] == ["--seed=1"]


def test_a_crossed_design_has_every_set_with_every_other_seed() -> None:
    plan = make_plan(seeds=12, sets=3)
    cell = plan.cells()[0]
    pairs = [tuple(plan.seed_of(source, Run(cell, seed)) for source in ("sharding", "order")) for seed in plan.seeds]
    assert sorted(pairs) == [(number, order) for number in range(3) for order in range(4)]
    assert "sets" not in make_plan().identity()
    for values in ({"sets": 1}, {"sets": 3, "vary": ["order"]}, {"sets": 3, "vary": ["sharding"]}):
        with pytest.raises(UsageError, match=r"sets = \d must be at least 2, and vary must name sharding and another"):
            make_plan(**values)


def test_targets_and_times_do_not_make_another_plan() -> None:
    plan = make_plan(target=0.5, target_loss=0.37, times=[60, 120.5])
    assert (plan.target_loss, plan.times) == (0.37, (60, 120.5))
    assert plan.identity() == make_plan().identity()


def test_crossed_runs_are_not_compared_with_another_study() -> None:
    with pytest.raises(UsageError, match="beside compares independent runs"):
        make_plan(sets=3, beside="other")


def test_keys_are_flags() -> None:
    keys = {"batch_size": 12, "norm": "group", "augment": False, "start": True, "learning_rate": 1e-05}
    flags = {"--batch-size", "--norm", "--augment", "--start", "--learning-rate", "--help", "--help-all"}
    said = ["--batch-size=12", "--norm=group", "--no-augment", "--start", "--learning-rate=1e-05"]
    assert argv_of(keys, flags) == said
    for key in ("batch", "other", "help", "help_all"):  # an abbreviation is no flag, nor is one that is not about a run
        with pytest.raises(UsageError, match=f"{key} = 1: there is no such flag"):
            argv_of({key: 1}, flags)


@pytest.mark.parametrize("name", plan_names())
def test_shipped_plans_name_existing_strategies_and_flags(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the data, which are not in this folder: no other line may come."""
    monkeypatch.chdir(tmp_path)
    plan = find_plan(name)
    with pytest.raises(DataError, match=r"does not exist; check --input"):
        check_plan(plan)
    for cell in plan.cells():
        case_of(plan, Run(cell, 0), "s", Path("o"))
    assert len(list(plan.runs())) > 1


@pytest.mark.parametrize("name", plan_names())
def test_shipped_plans_say_how_to_fetch_their_data(name: str) -> None:
    comment = "".join(
        line for line in (ROOT / "conf" / "study" / f"{name}.toml").read_text().splitlines(True) if line.startswith("#")
    )
    inputs = {keys["input"] for keys in find_plan(name).datasets.values()}
    fetched = {folder.rstrip(".,;") for folder in re.findall(r"make fetch NAME=\w+ TO=(\S+)", comment)}
    assert fetched >= {each for each in inputs if each.startswith("data/cifar")}


@pytest.mark.parametrize("name", ["sync-switch", "sync-switch-quick"])
def test_the_search_for_a_fraction_is_between_bsp_and_asp(name: str) -> None:
    plan = find_plan(name)
    fractions = []
    for cell in plan.cells():
        config = case_of(plan, Run(cell, 0), "s", Path("o")).config
        if isinstance(config.exchange, SyncSwitch):
            assert cell.protocol == f"sync-switch-{config.exchange.fraction:g}"
            fractions.append(config.exchange.fraction)
        else:
            assert config.protocol.name == cell.protocol
    assert fractions == sorted(set(fractions))
    assert len(fractions) >= 4
    assert {cell.protocol for cell in plan.cells()} > {"bsp", "asp"}
    assert (plan.compare, plan.baseline) == ("protocol", "bsp")


def test_the_plans_of_small_shards_differ_as_they_say() -> None:
    long_tailed, balanced = find_plan("sharding-high-dose"), find_plan("sharding-high-dose-balanced")
    same = (
        "shardings",
        "models",
        "protocols",
        "variants",
        "training",
        "virtual",
        "seeds",
        "workers",
        "margin",
        "baseline",
    )
    assert [getattr(long_tailed, name) for name in same] == [getattr(balanced, name) for name in same]
    # One random set for all seeds, next to one for every seed.
    sets = Sets(long_tailed, Path("s"))
    keys = {
        name: {sets.key(run).seed for run in long_tailed.runs() if run.cell.sharding == name}
        for name in ("random", "random-fixed", "stratified")
    }
    assert keys == {"random": set(range(50)), "random-fixed": {None}, "stratified": {None}}


def test_the_crossed_plan_has_cells_of_the_high_dose() -> None:
    plan, other = find_plan("sharding-crossed"), find_plan("sharding-high-dose")
    assert plan.cells() == [cell for cell in other.cells() if cell.sharding == "random"]
    assert [cell_settings(plan, cell).training for cell in plan.cells()] == [
        cell_settings(other, cell).training for cell in plan.cells()
    ]
    cell = plan.cells()[0]
    pairs = [(plan.seed_of("sharding", Run(cell, seed)), plan.seed_of("model", Run(cell, seed))) for seed in plan.seeds]
    # The first ten runs are one seed with all sets.
    assert pairs == [(number, seed) for seed in range(10) for number in range(10)]


BAD_PLANS: list[tuple[dict[str, str], str]] = [
    ({"seeds": "0"}, "seeds must be from 1 to 100000, got 0"),
    ({"seeds": "[1, 2, 1]"}, "seeds names 1 twice"),
    ({"seeds": '"many"'}, "seeds = 'many' is neither a number of seeds nor a list of them"),
    ({"seeds": "[-1]"}, "seeds = [-1] is neither a number of seeds nor a list of them"),
    ({"more": "workers = 0"}, "workers must be at least 1, got 0"),
    ({"more": 'workers = "12"'}, "workers = '12' is not a whole number"),
    ({"more": "target = 1.5"}, "target must be an accuracy more than 0 and at most 1, got 1.5"),
    ({"more": 'target = "high"'}, "target = 'high' is not an accuracy such as 0.4"),
    ({"more": "target_loss = 0"}, "target_loss must be a loss more than 0, got 0"),
    ({"more": "target_loss = nan"}, "target_loss must be a loss more than 0, got nan"),
    ({"more": "target_loss = true"}, "target_loss = True is not a loss such as 0.37"),
    ({"more": "times = 60"}, "times = 60 is not a list of seconds such as [60, 120]"),
    ({"more": 'times = ["60"]'}, "times = ['60'] is not a list of seconds such as [60, 120]"),
    ({"more": "times = [true]"}, "times = [True] is not a list of seconds such as [60, 120]"),
    ({"more": "times = [0, 60]"}, "times must be seconds more than 0 that increase, got [0, 60]"),
    ({"more": "times = [60, 60]"}, "times must be seconds more than 0 that increase, got [60, 60]"),
    ({"more": "times = [60, inf]"}, "times must be seconds more than 0 that increase, got [60, inf]"),
    ({"more": "times = [nan]"}, "times must be seconds more than 0 that increase, got [nan]"),
    ({"more": 'backend = "spark"'}, "backend must be one of virtual, processes, got 'spark'"),
    ({"more": 'vary = ["weather"]'}, "vary must be one of model, order, sharding, schedule, got 'weather'"),
    ({"more": "vary = []"}, "vary names nothing: every seed would be the same run"),
    ({"more": 'vary = "model"'}, "vary = 'model' is not a list of texts"),
    ({"more": 'baseline = "nobody"'}, "baseline must be one of random, other, got 'nobody'"),
    ({"more": 'compare = "datasets"'}, "compare must be one of sharding, protocol, model, variant, got 'datasets'"),
    ({"more": 'compare = "variant"'}, 'compare = "variant" needs tables [variants.NAME]; there are none'),
    ({"more": "[variants.few]\nworkers = 0"}, "[variants.few]: workers must be a whole number of at least 1, got 0"),
    (
        {"more": "[variants.few]\nworkers = 2.5"},
        "[variants.few]: workers must be a whole number of at least 1, got 2.5",
    ),
    ({"more": "margin = 2"}, "margin must be an accuracy more than 0 and below 1, got 2"),
    ({"more": 'beside = "../x"'}, "beside must be the name of a study's folder next to this one's, got '../x'"),
    ({"more": "beside = 2"}, "beside = 2 is not a text"),
    ({"more": "margim = 0.1"}, "unknown key 'margim'"),
    ({"more": 'skip = ["*/random/*"]'}, "skip leaves out the baseline, random, with which the others are compared"),
    ({"more": 'skip = ["nothing"]'}, "skip: no cell is named nothing"),
    ({"more": 'skip = ["*"]'}, "skip leaves nothing to train"),
    ({"training": "epochs = [1]"}, "training.epochs = [1] is not the value of a flag"),
    ({"other": "clusters = [[2]]"}, "shardings.other.clusters = [[2]] is not the value of a flag"),
    ({"other": "clusters = []"}, "[shardings.other]: clusters = [] lists no value"),
    (
        {"other": "clusters = [2, 3]"},
        "[shardings.other]: clusters lists several values, so the name must contain {clusters}, and be quoted",
    ),
    (
        {"more": '[variants."e{epochs}"]\nepochs = [1, 2, 1]'},
        "[variants.e{epochs}]: there are two tables [variants.e1]",
    ),
    (
        {"more": f'[variants."e{{epochs}}-b{{batch_size}}"]\nepochs = {[*range(50)]}\nbatch_size = {[*range(50)]}'},
        "[variants.e{epochs}-b{batch_size}]: its lists combine to 2,500 tables; at most 1,000 are possible",
    ),
    ({"more": '[variants."e{epoch}"]\nepochs = 1'}, "[variants.e{epoch}]: a name has letters, digits"),
    ({"training": 'epochs = 1\n"model-seed" = 5'}, "training.model-seed is not the name of a flag"),
    ({"training": 'epochs = 1\n"" = 5'}, "training. is not the name of a flag"),
    ({"seeds": "[true]"}, "seeds = [True] is neither a number of seeds nor a list of them"),
]


@pytest.mark.parametrize(("values", "said"), BAD_PLANS)
def test_a_plan_that_cannot_be_is_one_line(values: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        read_plan(write_plan(tmp_path, **values))
    assert said in str(raised.value)
    assert str(raised.value).count("\n") == 0 or "cannot be read" in str(raised.value)


@pytest.mark.parametrize("table", ["datasets", "shardings", "models", "protocols"])
def test_what_should_be_a_table_of_tables_is_one_line(table: str) -> None:
    for value in (3, {"name": 3}):
        with pytest.raises(UsageError, match=rf"^{table}(\.name)? = 3 is not a table: write \[{table}\.NAME\]$"):
            plan_of({"seeds": 2, table: value})


BAD_TABLES: list[tuple[dict[str, Any], str]] = [
    ({"shardings": {"x": {"strategy": "magic"}}}, "[shardings.x]: argument --strategy: invalid choice: 'magic'"),
    ({"shardings": {"x": {"strategy": "random", "clusters": 3}}}, "--strategy random has no --clusters 3"),
    ({"shardings": {"x": {}}}, "[shardings.x]: the following arguments are required: --strategy"),
    (
        {"vary": ["sharding"], "shardings": {"x": {"strategy": "random", "seed": 3}}},
        "[shardings.x]: its shards are the same",
    ),
    (
        {"shardings": {"x": {"strategy": "random", "order": "odd"}}},
        "order must be given, class-blocks or dirichlet:ALPHA, got 'odd'",
    ),
    (
        {"shardings": {"x": {"strategy": "round_robin", "order": "dirichlet:0"}}},
        "--dirichlet must be a positive number, got 0.0",
    ),
    ({"training": {"epochs": 0}}, "--epochs must be at least 1, got 0"),
    ({"training": {}}, "give the length of the run"),
    ({"training": {"epochs": 1, "output": "x"}}, "[training]: output is set by the study"),
    ({"models": {"m": {"model": "vgg"}}}, "--model vgg is neither one of"),
    (
        {"models": {"m": {"model": "no_module_here:net"}}},
        "--model no_module_here:net: there is no module no_module_here",
    ),
    ({"models": {"m": {"model": "json:net"}}}, "has no function net"),
    ({"training": {"epochs": 1, "tensorboard": True}}, "[training]: tensorboard is set by the study"),
    ({"shardings": {"x": {"strategy": "random", "unlabelled": True}}}, "[shardings.x]: unlabelled = true"),
    ({"protocols": {"p": {"protocol": "later"}}}, "argument --protocol: invalid choice: 'later'"),
    ({"protocols": {"p": {"protocol": "asp", "speed": 1}}}, "speed = 1: there is no such flag"),
    ({"training": {"epochs": 1, "outp": "/x"}}, "outp = '/x': there is no such flag"),
    ({"variants": {"v": {"seed": 3}}}, "[variants.v]: seed is set by the study"),
    ({"variants": {"v": {"pace": 3}}}, "made-up/random/cnn/asp/v: pace = 3: there is no such flag"),
    ({"variants": {"v": {"workers": 401, "batch_size": 500}}}, "workers = 401 is more than the 400 rows"),
    ({"variants": {"v": {"workers": 200}}}, "made-up/random/cnn/asp/v: --batch-size 128 is the mini-batch of all 200"),
    ({"training": {"epochs": 1, "help": True}}, "help = True: there is no such flag"),
    ({"shardings": {"x": {"strategy": "random", "config": "y"}}}, "config = 'y': there is no such flag"),
    ({"workers": 401}, "workers = 401 is more than the 400 rows"),
    ({"vary": ["sharding"]}, "[shardings.stratified]: its shards are the same for every seed"),
    (
        {"vary": ["sharding"], "shardings": {"x": {"strategy": "stratified", "ratios": "linear"}}},
        "[shardings.x]: its shards are the same for every seed",
    ),
    ({"sets": 4}, "[shardings.stratified]: its shards are the same for every seed, so that there are no sets = 4"),
    (
        {"sets": 4, "shardings": {"x": {"strategy": "random", "seed": 1000}}},
        "[shardings.x]: its shards are the same for every seed, so that there are no sets = 4",
    ),
    ({"virtual": {"compute": "quadratic"}}, "a study trains on its shards: leave out compute and workers"),
    ({"virtual": {"profile": "slow"}}, "made-up/random/cnn/asp:"),
    ({"virtual": {"failures": "worker:20@1+1"}}, "--failures worker:20@1+1: the run has workers 0..11"),
    ({"training": {"epochs": 1, "batch_size": 2}}, "--batch-size 2 is the mini-batch of all 12 workers together"),
    ({"protocols": {"p": {"protocol": "k-bsp", "k": 40}}}, "made-up/random/cnn/p: --k 40"),
    ({"shardings": {"x": {"strategy": "random", "ratios": "1,2"}}}, "[shardings.x]: --ratios"),
]


@pytest.mark.parametrize(("tables", "said"), BAD_TABLES)
def test_a_table_that_no_command_takes_is_one_line(tables: dict[str, Any], said: str, tmp_path: Path) -> None:
    """A table that no command takes is one line before anything runs."""
    data = tmp_path / "data"
    assert ended("sample", "--to", str(data), "--rows", "400", "--test-rows", "40") == 0
    with pytest.raises(UsageError) as raised:
        check_plan(make_plan(datasets={"made-up": {"input": str(data)}}, **tables))
    assert said in str(raised.value)


def test_a_trace_without_a_run_is_named_with_its_cell(tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert ended("sample", "--to", str(data), "--rows", "400", "--test-rows", "40") == 0
    plan = make_plan(datasets={"made-up": {"input": str(data)}}, virtual={"profile": f"trace:{tmp_path / 'none'}"})
    with pytest.raises(DataError, match=r"^made-up/random/cnn/asp.*: --profile trace:RUN: .* contains no run"):
        check_plan(plan)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"shrink": 7}, "--shrink 7 must divide the images' height and width, 32 and 32"),
        ({"labels": "coarse"}, "--labels coarse: "),
        ({"order": "class-blocks"}, "order is set by the study"),
        ({"dirichlet": 0.3}, "dirichlet is set by the study"),
        ({"long_tail": 0.5}, "--long-tail must be at least 1"),
        ({"shrunk": 2}, "shrunk = 2: there is no such flag"),
    ],
)
def test_a_data_set_that_cannot_be_derived_is_one_line(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    """A data set that cannot be derived is one line before anything runs."""
    data = tmp_path / "data"
    assert ended("sample", "--to", str(data), "--rows", "400", "--test-rows", "40") == 0
    with pytest.raises(UsageError) as raised:
        check_plan(make_plan(datasets={"made-up": {"input": str(data), **keys}}))
    assert f"[datasets.made-up]: {said}" in str(raised.value)


def test_a_ready_set_is_of_one_data_set(tmp_path: Path) -> None:
    plan = make_plan(datasets={"a": {}, "b": {}}, shardings={"mine": {"shards": "x"}})
    with pytest.raises(UsageError, match=r"\[shardings.mine\]: a ready set is of one data set, not of a, b: use skip"):
        check_plan(plan)


def test_missing_data_or_evaluation_rows_are_one_line(tmp_path: Path) -> None:
    """Data that are not there or have no evaluation rows are one line."""
    with pytest.raises(DataError, match="nowhere does not exist"):
        check_plan(make_plan())
    assert ended("sample", "--to", str(tmp_path / "d"), "--rows", "400", "--test-rows", "0") == 0
    with pytest.raises(UsageError, match=r"\[datasets.made-up\]: .* has no evaluation rows"):
        check_plan(make_plan(datasets={"made-up": {"input": str(tmp_path / "d")}}))


def test_a_command_line_that_asks_for_nothing_sensible_is_refused(tmp_path: Path) -> None:
    plan = str(write_plan(tmp_path))
    out = str(tmp_path / "study")
    for argv, said in (
        ([plan, "--output", out, "--jobs", "0"], "--jobs must be at least 1, got 0"),
        ([plan, "--output", out, "--seeds", "0"], "seeds must be from 1 to 100000, got 0"),
        ([plan, "--output", out, "--share", "3/2"], "--share 3/2 is not I/N"),
        ([plan, "--output", out, "--merge", str(tmp_path / "no")], "contains no ledger.jsonl"),
        ([plan, "--output", str(tmp_path)], "holds other files; choose a folder that is empty"),
        ([plan, "--output", out, "--report-only"], "contains no ledger"),
        (["nobody", "--output", out], "the plan nobody is neither a TOML file nor a plan of conf/study"),
        ([str(tmp_path / "no.toml"), "--output", out], "does not exist"),
    ):
        with pytest.raises(UsageError) as raised:
            main(argv)
        assert said in str(raised.value)
    assert not (tmp_path / "study").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]


def test_names_of_sets_and_runs_never_meet() -> None:
    """Whatever the parts are called: what joins them is in no name."""
    keys = {
        str(SetKey(dataset, sharding, seed, 12))
        for dataset in ("s", "s-x")
        for sharding in ("x-random", "random")
        for seed in (0, None)
    }
    assert len(keys) == 8
    with pytest.raises(UsageError, match="a name has letters"):
        make_plan(models={"a,b": {"model": "cnn"}})
    with pytest.raises(UsageError, match="at most 60"):
        make_plan(models={"m" * 61: {"model": "cnn"}})
    with pytest.raises(UsageError, match="names of runs are file names with at most 200"):
        make_plan(
            models={"m" * 60: {"model": "cnn"}},
            shardings={"s" * 60: {}, "r": {}},
            datasets={"d" * 60: {}},
            protocols={"p" * 60: {}},
        )


def test_hosts_share_all_seeds_and_none_twice_and_each_has_every_cell() -> None:
    """Or a comparison of two members would be one of two hosts."""
    plan = make_plan(seeds=5)
    parts = [share_of_runs(plan, part, 3) for part in (1, 2, 3)]
    assert sorted(run for part in parts for run in part) == sorted(plan.runs())
    assert [sorted({run.seed for run in part}) for part in parts] == [[0, 3], [1, 4], [2]]
    assert all({run.cell for run in part} == set(plan.cells()) for part in parts)
    with pytest.raises(UsageError, match="--share 6/6: the plan has only 5 seeds"):
        share_of_runs(plan, 6, 6)
    assert share("2/3") == (2, 3)


def test_a_number_of_seeds_is_the_first_ones() -> None:
    assert seeds_of(3) == (0, 1, 2)
    assert seeds_of([5, 2]) == (5, 2)


def test_a_name_that_would_be_two_folders_is_refused() -> None:
    with pytest.raises(UsageError, match="a name has letters"):
        make_plan(models={"a/b": {"model": "cnn"}})


def test_a_cell_is_named_by_its_axes() -> None:
    assert str(Run(Cell("d", "s", "m", "p"), 3)) == "d/s/m/p/3"
