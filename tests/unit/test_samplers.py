"""Every sampler of the registry: draws each row as often as it promises, and the same rows wherever and whenever asked."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core import command_line
from pipeline.core.errors import DataError, UsageError
from tests.clusters.machine import ROOT
from tests.support.configs import make_config
from tests.support.samplers import TABLE, make_sampler, places, population_of, stream_of
from tests.support.trainer_sets import CLASSES, EVAL_ROWS, rows_of, write_shards
from tests.support.virtual_runs import QUIET, RESUME, final
from trainer import Result, load
from trainer.checkpoints.prune import WAITING, prune
from trainer.checkpoints.read import versions
from trainer.checkpoints.state import folder_of
from trainer.config import Config
from trainer.data import batches
from trainer.data.batches import build_batches, build_sampler
from trainer.data.deal import deal, dealt_sizes
from trainer.data.example_table import values_of
from trainer.data.loading import load_worker
from trainer.data.neighbourhoods import NeighbourhoodModel
from trainer.data.opening import open_shards
from trainer.data.sampling import TableRowSampler
from trainer.exchange import EXCHANGES
from trainer.flags import build_parser, config_of
from trainer.lifecycle.prepare import check_validation
from trainer.protocols import PROTOCOLS
from trainer.sampling import SAMPLERS, Sampler
from trainer.sampling.base import Population, Selection, TableSampler, check_selection
from trainer.sampling.curriculum import CurriculumSampler
from trainer.sampling.data_aware import DataAwareSampler
from trainer.sampling.orders import level_pattern
from trainer.sampling.shuffle import ShuffleSampler
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.failures import parse_failures
from trainer.simulation.profiles import parse_profile
from trainer.simulation.replay import replay

every_sampler = pytest.mark.parametrize("name", SAMPLERS)


# How often each row is drawn. The oracles count the drawn rows, and know no sampler's order.


def assert_passes(sampler: Sampler, population: Population, drawn: list[list[int]]) -> None:
    rows = len(population)
    stream = [place for batch in drawn for place in batch]
    for begin in range(0, len(stream) - rows + 1, rows):
        assert sorted(stream[begin : begin + rows]) == list(range(rows))


def assert_independent(sampler: Sampler, population: Population, drawn: list[list[int]]) -> None:
    """No row twice in a mini-batch, and the count of a row within four standard deviations of its expectation."""
    assert all(len(set(batch)) == len(batch) for batch in drawn)
    counts = Counter(place for batch in drawn for place in batch)
    mean = len(drawn) * population.share
    deviation = (mean * (1 - population.share)) ** 0.5
    assert all(abs(counts[place] - mean) < 4.5 * deviation for place in range(len(population)))


def assert_balanced(sampler: Sampler, population: Population, drawn: list[list[int]]) -> None:
    groups = population.labels
    for batch in drawn:
        counts = Counter(groups[batch].tolist())
        assert max(counts.values()) - min(counts[group] for group in np.unique(groups).tolist()) <= 1
    counts = Counter(place for batch in drawn for place in batch)
    for group in np.unique(groups):
        rows = [counts[place] for place in np.flatnonzero(groups == group).tolist()]
        assert max(rows) - min(rows) <= 1


def assert_representative(sampler: Sampler, population: Population, drawn: list[list[int]]) -> None:
    assert_passes(sampler, population, drawn)
    for batch in drawn:
        counts = Counter(population.labels[batch].tolist())
        for group, size in Counter(population.labels.tolist()).items():
            assert abs(counts[group] - len(batch) * size / len(population)) < 2


def assert_weighted(sampler: Sampler, population: Population, drawn: list[list[int]]) -> None:
    assert population.values is not None
    rows = len(population)
    stream = [place for batch in drawn for place in batch]
    expected = rows * population.values / population.values.sum()
    for begin in range(0, len(stream) - rows + 1, rows):
        counts = np.bincount(stream[begin : begin + rows], minlength=rows)
        assert (np.abs(counts - expected) < 1 + 1e-9).all()
    total = np.bincount(stream, minlength=rows) / (len(stream) / rows)
    assert np.abs(total - expected).max() < 0.3, "the rounding has no bias"


def assert_easy_first(sampler: Sampler, population: Population, drawn: list[list[int]]) -> None:
    """Passes over a growing share of the easiest rows, by the linear rule; all rows in the end."""
    assert isinstance(sampler, CurriculumSampler)
    assert population.values is not None
    ease = np.argsort(population.values).tolist()
    stream = [place for batch in drawn for place in batch]
    position, sizes = 0, []
    while position < len(stream):
        epoch = position / (population.batch_size * population.epoch_steps)
        share = sampler.easy_share + (1 - sampler.easy_share) * min(1.0, epoch / sampler.all_after)
        sizes.append(int(np.ceil(round(share * len(population), 9))))
        part = stream[position : position + sizes[-1]]
        position += sizes[-1]
        if len(part) == sizes[-1]:
            assert sorted(part) == sorted(ease[: sizes[-1]])
    assert sizes[0] == int(np.ceil(0.2 * len(population)))
    assert sizes[-1] == len(population)


def assert_by_weight(population: Population, drawn: list[list[int]], passes: int, weights: np.ndarray) -> None:
    """Every row in each of the first passes, then as often as numpy draws it, one row after the other by its weight."""
    rows, batch = len(population), population.batch_size
    first = -(-passes * rows // batch)
    stream = [place for each in drawn[:first] for place in each]
    assert_passes(make_sampler("shuffle"), population, [stream[: passes * rows]])
    if batch >= rows:
        assert all(min(np.bincount(each, minlength=rows)) >= batch // rows for each in drawn[first:])
        return
    assert all(len(set(each)) == batch for each in drawn[first:])
    counts = np.bincount([place for each in drawn[first:] for place in each], minlength=rows) / len(drawn[first:])
    rng = np.random.default_rng(0)
    expected = np.zeros(rows)
    for _ in range(2000):
        expected[rng.choice(rows, batch, replace=False, p=weights / weights.sum())] += 1 / 2000
    deviation = np.sqrt(expected * (1 - expected) * (1 / len(drawn[first:]) + 1 / 2000)) + 1e-3
    assert (np.abs(counts - expected) < 4.5 * deviation).all()


def assert_by_rank(sampler: Sampler, population: Population, drawn: list[list[int]]) -> None:
    losses = TABLE[2 : len(population) + 2]
    assert_by_weight(population, drawn, 1, 100.0 ** (-np.argsort(np.argsort(-losses)) / len(losses)))


def assert_by_entropy(sampler: Sampler, population: Population, drawn: list[list[int]]) -> None:
    """The codes in the table are those of no prediction (0 and 1), of a wrong one (2) and of a correct one (3)."""
    codes = np.rint(TABLE[2 : len(population) + 2])
    assert_by_weight(population, drawn, 10, np.where(codes < 2, 100.0, 1.0))


def weak_shares(population: Population, uniform_share: float = 0.5) -> dict[int, float]:
    """The probability of each class by the formula, in the worker's shard."""
    sizes = Counter(population.labels.tolist())
    weak = {group: size * float(TABLE[group]) for group, size in sizes.items()}
    rest = uniform_share / len(population)
    return {
        group: (1 - uniform_share) * weak[group] / sum(weak.values()) + rest * size for group, size in sizes.items()
    }


def assert_weak_groups(sampler: Sampler, population: Population, drawn: list[list[int]]) -> None:
    """Chi-square of the draws of groups, by shares in the first epoch, then by weakness; no row twice before all."""
    sizes = Counter(population.labels.tolist())
    for begin, end, expected in (
        (0, population.epoch_steps, {group: size / len(population) for group, size in sizes.items()}),
        (population.epoch_steps, len(drawn), weak_shares(population)),
    ):
        stream = [place for batch in drawn[begin:end] for place in batch]
        counts = Counter(population.labels[stream].tolist())
        assert counts.keys() <= sizes.keys()
        parts = [
            (counts[group] - len(stream) * share) ** 2 / (len(stream) * share) for group, share in expected.items()
        ]
        assert sum(parts) < 25, "at most 3 degrees of freedom"
    for batch in drawn:
        rows = Counter(batch)
        for group, size in sizes.items():
            members = [rows[place] for place in np.flatnonzero(population.labels == group).tolist()]
            assert max(members) - min(members) <= 1
            assert len(members) == size


PROMISES: dict[str, Callable[[Sampler, Population, list[list[int]]], None]] = {
    "shuffle": assert_passes,
    "bernoulli": assert_independent,
    "balanced": assert_balanced,
    "representative": assert_representative,
    "weighted": assert_weighted,
    "curriculum": assert_easy_first,
    "recency": assert_by_rank,
    "sliding-window": assert_by_entropy,
    "data-aware": assert_weak_groups,
}


@every_sampler
@pytest.mark.parametrize("sizes", [[40, 25, 3, 1], [13], [9, 9, 9]])
@pytest.mark.parametrize("batch", [7, 16])
def test_every_row_is_drawn_as_often_as_promised(name: str, sizes: list[int], batch: int) -> None:
    population = population_of(sizes, batch)
    sampler = make_sampler(name)
    PROMISES[name](sampler, population, places(sampler, population, range(400)))


@every_sampler
def test_a_sampler_says_whether_it_makes_passes(name: str) -> None:
    """A run that changes its workers completes a pass if the sampler does, and its log then has the ends of passes."""
    sampler = make_sampler(name)
    selection = stream_of(sampler, population_of([9, 9]))(0)
    assert sampler.makes_passes == (selection.passes is not None)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    seed=st.integers(0, 2**30),
)
def test_a_level_pattern_has_shares_of_every_beginning(sizes: list[int], seed: int) -> None:
    pattern = level_pattern(np.array(sizes), np.random.default_rng(seed)).tolist()
    counts = [0] * len(sizes)
    for length, group in enumerate(pattern, 1):
        counts[group] += 1
        shares = [length * size / sum(sizes) for size in sizes]
        assert all(np.floor(share) <= count <= np.ceil(share) for share, count in zip(shares, counts, strict=True))
    assert counts == sizes


# The same rows, wherever and whenever


@every_sampler
def test_a_mini_batch_depends_on_its_clock_alone(name: str) -> None:
    """A worker that resumes at any clock, jumps or repeats draws what it would have drawn."""
    population = population_of([20, 9, 2])
    sampler = make_sampler(name)
    whole = places(sampler, population, range(60))
    jumping = stream_of(sampler, population)
    every = np.arange(len(population))
    for clock in np.random.default_rng(0).integers(0, 60, 40).tolist():
        assert every[jumping(clock).places].tolist() == whole[clock]
        assert places(sampler, population, range(clock, clock + 1)) == [whole[clock]]


@every_sampler
def test_seeds_and_workers_draw_differently(name: str) -> None:
    population = population_of([20, 9, 2])
    one = places(make_sampler(name), population, range(4))
    for other in (replace(population, seed=4), replace(population, worker=2)):
        assert places(make_sampler(name), other, range(4)) != one


PROGRAM = """
import json, sys
from tests.support.samplers import SAMPLERS, make_sampler, places, population_of
print(json.dumps({name: places(make_sampler(name), population_of([20, 9, 2]), range(9)) for name in SAMPLERS}))
"""


@pytest.mark.slow
def test_another_process_draws_the_same_rows() -> None:
    """The other process has another hash seed and another working folder."""
    environment = {"PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd="/", env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = {name: places(make_sampler(name), population_of([20, 9, 2]), range(9)) for name in SAMPLERS}
    assert json.loads(done.stdout) == expected


# In runs


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of unequal sizes."""
    parts = [rows_of(48, 2), rows_of(40, 3, 100), rows_of(45, 4, 200)]
    return write_shards(tmp_path_factory.mktemp("set"), parts, EVAL_ROWS)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights and losses of all rows of ``shards``, and of others."""
    ids = np.arange(400)
    rng = np.random.default_rng(5)
    columns = {"id": ids, "weight": rng.uniform(0, 2, 400), "loss": rng.uniform(0, 3, 400)}
    path = tmp_path_factory.mktemp("table") / "table.parquet"
    pq.write_table(pa.table(columns), path)
    return str(path)


def run(shards: Path, table: str, output: Path, name: str, options: Any = QUIET, **values: Any) -> Result:
    common: dict[str, Any] = {"model": "logistic", "batch_size": 24, "threads": 1, "epochs": 3, "sampling": name}
    common |= {"example_table": table} if SAMPLERS[name].column else {}
    common |= {"window": 2} if name == "sliding-window" else {}
    settings = {key: values.pop(key) for key in ("failures", "profile") if key in values}
    return simulate(make_config(shards, output, **common | values), SimulationSettings(**settings), options)


def pairs() -> dict[str, dict[str, Any]]:
    """Every protocol on servers, and every other exchange of virtual time; k of 2 and a switch in the middle."""
    found: dict[str, dict[str, Any]] = {}
    for name, kind in PROTOCOLS.items():
        found[name] = {"protocol": name} | {item.name: 2 for item in fields(kind) if item.name == "k"}
    for name, exchange in EXCHANGES.items():
        if exchange.in_virtual_time and name != "parameter-server":
            found[name] = {"exchange": name} | {item.name: 0.5 for item in fields(exchange) if item.name == "alpha"}
    return found


PAIRS = pairs()


def is_exact(pair: dict[str, Any]) -> bool:
    """Return whether the bits do not depend on the times of gradients."""
    exchange = EXCHANGES[pair.get("exchange", "parameter-server")]()
    stages = [protocol for _, protocol in exchange.stages()]
    return all(each.reproducible for each in stages or [PROTOCOLS[exchange.protocol or pair["protocol"]]()])


def is_refused(kind: type[Sampler], pair: dict[str, Any]) -> bool:
    """Return whether a step would not read the losses of the worker's last one."""
    protocol = PROTOCOLS.get(pair.get("protocol", ""))
    has_rows = issubclass(kind, TableSampler) and kind.has_row_entries
    return has_rows and protocol is not None and not protocol.reads_own_writes


def cases() -> list[Any]:
    """Every sampler with asp or all-reduce; with the other, or with all if it has a table, in the full tier."""
    chosen = []
    for number, (name, kind) in enumerate(SAMPLERS.items()):
        first, second = ("asp", "all-reduce") if number % 2 else ("all-reduce", "asp")
        others = [word for word in PAIRS if word != first] if issubclass(kind, TableSampler) else [second]
        others = [word for word in others if not is_refused(kind, PAIRS[word])]
        chosen.append(pytest.param(name, PAIRS[first], id=f"{name}-{first}"))
        chosen += [pytest.param(name, PAIRS[word], id=f"{name}-{word}", marks=pytest.mark.full) for word in others]
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pair"), cases())
def test_a_run_resumes_and_replays_with_its_bits(
    name: str, pair: dict[str, Any], shards: Path, table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a checkpoint in the middle. An asynchronous run resumes with fresh gradients, but by the same draws."""
    monkeypatch.setattr(prune, "__defaults__", (1000, WAITING))
    whole = run(shards, table, tmp_path / "whole", name, **pair)
    again = run(shards, table, tmp_path / "again", name, **pair)
    assert final(again).tobytes() == final(whole).tobytes()
    found = versions(tmp_path / "whole" / "checkpoints")
    (tmp_path / "whole" / "result.json").unlink()
    middle = found[len(found) // 2]
    for later in found:
        if later > middle:
            shutil.rmtree(folder_of(tmp_path / "whole" / "checkpoints", later))
    resumed = run(shards, table, tmp_path / "whole", name, RESUME, **pair)
    assert resumed.examples == again.examples
    assert replay(resumed.output).is_equal
    if is_exact(pair):
        assert final(resumed).tobytes() == final(again).tobytes()


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("representative", "recency") else pytest.param(name, marks=pytest.mark.full)
        for name in SAMPLERS
    ],
)
def test_a_death_does_not_change_what_bsp_draws(name: str, shards: Path, table: str, tmp_path: Path) -> None:
    calm = run(shards, table, tmp_path / "calm", name, protocol="bsp")
    failures = parse_failures("worker:1@0.25+0.2,server@0.9+0.1")
    hurt = run(shards, table, tmp_path / "hurt", name, protocol="bsp", failures=failures)
    assert hurt.restarts["worker"] == 1
    assert final(hurt).tobytes() == final(calm).tobytes()


VALIDATION: dict[str, Any] = {"weakness": "validation-loss", "recipe": "constant", "augment": False}


@pytest.mark.parametrize("pair", [{"protocol": "bsp"}, {"exchange": "all-reduce"}], ids=["bsp", "all-reduce"])
def test_the_table_has_validation_losses_of_the_last_epoch(pair: dict[str, Any], table: str, tmp_path: Path) -> None:
    """The oracle is the model file of a run that ends a step earlier, 5 steps being an epoch of 133 rows in 24s.

    A single worker of three has an evaluation row of class 3."""
    labels = EVAL_ROWS.labels % (CLASSES - 1)
    labels[5] = CLASSES - 1
    parts = [rows_of(48, 2), rows_of(40, 3, 100), rows_of(45, 4, 200)]
    shards = write_shards(tmp_path / "set", parts, replace(EVAL_ROWS, labels=labels))
    epoch = len(pd.unique(np.concatenate([load_worker(open_shards(str(shards)), w).ids for w in range(3)]))) // 24
    values = VALIDATION | pair | {"epochs": None}
    before = run(shards, table, tmp_path / "before", "data-aware", steps=2 * epoch - 1, **values)
    after = run(shards, table, tmp_path / "after", "data-aware", steps=2 * epoch, **values)
    first = run(shards, table, tmp_path / "first", "data-aware", steps=epoch, **values)
    np.testing.assert_array_equal(final(before)[-CLASSES:], final(first)[-CLASSES:])
    with torch.no_grad():
        logits = load(str(before.output))(torch.from_numpy(np.asarray(EVAL_ROWS.images_NCHW)))
        losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="none").numpy()
    expected = [losses[labels == label].mean() for label in range(CLASSES)]
    np.testing.assert_allclose(final(after)[-CLASSES:], expected, rtol=1e-4)


@pytest.mark.parametrize("pair", [{"protocol": "asp"}, {"exchange": "strategy-switch", "alpha": 0.5}])
def test_uneven_workers_leave_no_earlier_weakness(pair: dict[str, Any], table: str, tmp_path: Path) -> None:
    """The oracle is the model at the end of a run whose parameters hardly change, so that all workers measure it."""
    labels = EVAL_ROWS.labels % (CLASSES - 1)
    parts = [rows_of(48, 2), rows_of(40, 3, 100), rows_of(45, 4, 200)]
    shards = write_shards(tmp_path / "set", parts, replace(EVAL_ROWS, labels=labels))
    values = VALIDATION | pair | {"learning_rate": 1e-9, "model": "perceptron"}
    profile = parse_profile("lognormal:1")
    done = run(shards, table, tmp_path / "run", "data-aware", profile=profile, **values)
    with torch.no_grad():
        logits = load(str(done.output))(torch.from_numpy(np.asarray(EVAL_ROWS.images_NCHW)))
        losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="none").numpy()
    opened = open_shards(str(shards))
    config = make_config(shards, sampling="data-aware", batch_size=24, **values)
    made = build_batches(config, opened, load_worker(opened, 1), 1, 3).sampler
    assert isinstance(made, TableRowSampler)
    assert made.validation is not None
    found = made.validation.losses_of_groups(final(done)[-3 * CLASSES :])
    expected = [losses[labels == label].mean() for label in range(CLASSES - 1)]
    np.testing.assert_allclose(found, [*expected, 1.0], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair",
    [
        {"protocol": "asp"},
        pytest.param({"protocol": "ssp", "staleness_bound": 1}, marks=pytest.mark.full),
        pytest.param({"exchange": "d-psgd"}, marks=pytest.mark.full),
    ],
)
def test_draws_by_validation_losses_resume_and_replay(
    pair: dict[str, Any], shards: Path, table: str, tmp_path: Path
) -> None:
    values = {"weakness": "validation-loss", "model": "cnn"} | pair
    whole = run(shards, table, tmp_path / "whole", "data-aware", **values)
    assert replay(whole.output).is_equal
    run(shards, table, tmp_path / "parts", "data-aware", **values | {"epochs": 2})
    parts = run(shards, table, tmp_path / "parts", "data-aware", RESUME, **values)
    assert parts.examples == whole.examples
    assert replay(parts.output).is_equal


def test_validation_losses_need_evaluation_rows_with_groups(tmp_path: Path) -> None:
    bare = write_shards(tmp_path / "set", [rows_of(48, 2), rows_of(40, 3, 100)], None)
    with pytest.raises(UsageError, match="--weakness validation-loss needs evaluation rows, which the shard set lacks"):
        run(bare, "", tmp_path / "run", "data-aware", weakness="validation-loss")
    assert not (tmp_path / "run").exists()
    sampler = DataAwareSampler(weakness="validation-loss", sampling_groups="neighbourhood")
    whole = open_shards(str(write_shards(tmp_path / "whole", [rows_of(48, 2)], EVAL_ROWS)))
    with pytest.raises(UsageError, match="that keeps its model: give --sampling-groups class, or --weakness loss"):
        check_validation(sampler, whole)


def with_targets(folder: Path) -> Path:
    """Give each row of a set a real target, its id, and a neighbourhood, its class."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for file in [*(file for worker in manifest["workers"] for file in worker["files"]), *manifest["eval"]["files"]]:
        path = folder / file["path"]
        table = pq.read_table(path)
        table = table.append_column("target", table["id"].cast(pa.float32()))
        pq.write_table(table.append_column("neighbourhood", table["label"]), path)
        file |= {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    manifest["labels"]["columns"] = ["label", "target"]
    manifest["neighbourhoods"] = [{"size": 12, "sparse": False}] * CLASSES
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(
    ("pair", "measured", "entry", "part", "shares"),
    [
        ({"exchange": "all-reduce"}, slice(1, None, 2), 0, 0.5, [[1, 1, 1, 1]]),
        ({"exchange": "d-psgd"}, slice(None), 0, 1, [[1, 1, 1, 1]]),
        ({"protocol": "asp"}, slice(1, None, 2), CLASSES, 1, [[0.5, 1, 1, 1], [0.5, 0, 0, 0]]),
    ],
    ids=["all-reduce", "d-psgd", "asp"],
)
def test_validation_losses_of_real_targets(
    pair: dict[str, Any],
    measured: slice,
    entry: int,
    part: float,
    shares: list[list[float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = open_shards(str(with_targets(write_shards(tmp_path, [rows_of(48, 2), rows_of(48, 3, 100)], EVAL_ROWS))))
    model = NeighbourhoodModel(np.ones((opened.layout.record_bytes, 1)), 0, np.array([[0.0], [1e9]]))
    monkeypatch.setattr(batches, "read_model", lambda _: model)
    values = {"weakness": "validation-loss", "sampling_groups": "neighbourhood"} | pair
    config = make_config(opened.uri, model="linear", batch_size=96, sampling="data-aware", **values)
    made = build_batches(config, opened, load_worker(opened, 1, targets=True), 1, 2)
    validation = made.sampler.draw(0, np.ones(CLASSES * len(shares), np.float32)).validation
    assert validation is not None
    assert validation.rows.labels.tolist() == EVAL_ROWS.ids[measured].tolist()
    # All rows are nearest to the first centre.
    assert set(validation.keys.tolist()) == {entry}
    assert validation.parts[entry] == part
    assert validation.shares.tolist() == shares


@pytest.mark.parametrize("pair", [{"protocol": "bsp"}, {"exchange": "all-reduce"}], ids=["bsp", "all-reduce"])
def test_a_loss_table_has_what_the_ledger_says(pair: dict[str, Any], shards: Path, table: str, tmp_path: Path) -> None:
    """The last loss or predictions of each row; data-aware: the running means, merged update by update."""
    opened = open_shards(str(shards))
    rows = [load_worker(opened, worker) for worker in range(3)]
    ids = np.concatenate([part.ids for part in rows])
    labels = dict(zip(ids.tolist(), np.concatenate([part.labels for part in rows]).tolist(), strict=True))
    for name in ("recency", "sliding-window", "data-aware"):
        done = run(shards, table, tmp_path / name, name, example_ledger=True, **pair)
        files = sorted((tmp_path / name / "examples").iterdir())
        ledger = pd.concat([pq.read_table(file).to_pandas() for file in files])
        if name == "recency":
            last = ledger.groupby("id")["loss"].last()
            np.testing.assert_allclose(final(done)[-len(ids) :], last.loc[ids].to_numpy(), rtol=1e-5)
            continue
        if name == "sliding-window":
            # A row that is in a mini-batch twice, where one pass ends and the next begins, counts once.
            ledger["batch"] = np.arange(len(ledger)) // 8
            distinct = ledger.drop_duplicates(["batch", "id"], keep="last").groupby("id")["correct"]
            digits = distinct.agg(lambda hits: int("1" + "".join(f"{hit:d}" for hit in hits[-2:]), 2))
            np.testing.assert_allclose(final(done)[-len(ids) :], digits.loc[ids].to_numpy(), rtol=1e-5)
            continue
        means = np.ones(CLASSES)
        for begin in range(0, len(ledger), 24):
            before = means.copy()
            for worker in range(3):
                part = ledger.iloc[begin + 8 * worker : begin + 8 * worker + 8]
                for label, losses in part.groupby(part["id"].map(labels))["loss"]:
                    means[int(label)] += 0.1 * (losses.mean() - before[int(label)]) / 3
        np.testing.assert_allclose(final(done)[-CLASSES:], means, rtol=1e-4)
        assert "_loss_table" not in done.weights(), "it is no part of the model"


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_dealt_rows_have_an_entry_of_the_table_each(workers: int, shards: Path) -> None:
    """Whichever of the virtual workers has them: as many entries as rows, each for one row."""
    opened = open_shards(str(shards))
    config = make_config(shards, sampling="recency", batch_size=30)
    dealt = deal(opened, workers)
    assert dealt_sizes(opened, workers) == [len(rows) for rows in dealt]
    samplers = [build_sampler(config, opened, rows, worker, workers) for worker, rows in enumerate(dealt)]
    table = np.full(133, -1, np.float32)
    keys = {int(key) for sampler in samplers for clock in range(60) for key in sampler.draw(clock, table).keys}  # type: ignore[union-attr]
    assert keys == set(range(133))


def test_representative_passes_have_the_prints_of_all_rows(shards: Path, table: str, tmp_path: Path) -> None:
    done = run(shards, table, tmp_path / "run", "representative")
    assert done.passes["whole"] >= 2
    assert run(shards, table, tmp_path / "balanced", "balanced").passes["whole"] == 0


@pytest.mark.parametrize("all_after", [0.0, 1.0, 9.7, 10_000.0])
def test_a_curriculum_has_a_span_per_number_of_rows(all_after: float) -> None:
    """The passes of the spans are those of the rule, counted from pass to pass."""
    population = population_of([23], 3, epoch_steps=2)
    sampler = make_sampler("curriculum", all_after=all_after)
    assert isinstance(sampler, CurriculumSampler)
    spans = sampler.spans(population)
    position = number = rows = 0
    firsts = []
    while rows < 23:
        grown = min(1.0, position / 6 / all_after) if all_after else 1.0
        if (size := int(np.ceil(23 * (0.2 + 0.8 * grown)))) != rows:
            rows = size
            firsts.append((position, rows, number))
        position, number = position + rows, number + 1
    assert spans == firsts
    assert len(spans) <= 19


# The table


def write(path: Path, **columns: Any) -> str:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_the_last_epoch_of_a_row_counts(tmp_path: Path) -> None:
    """In whichever file of the folder it is, and the last value in it, as in the ledger of an asynchronous run."""
    write(tmp_path / "t" / "b.parquet", id=[1, 2, 3, 3, 1], epoch=[1, 1, 1, 1, 3], loss=[9.0, 9.0, 7.0, 0.5, 0.125])
    write(tmp_path / "t" / "a.parquet", id=[2, 1, 7], epoch=[2, 3, 1], loss=[0.25, 8.0, 5.0])
    sampler = make_sampler("curriculum", str(tmp_path / "t"))
    values = values_of(sampler, np.array([3, 1, 2, 1]))
    assert values is not None
    assert values.tolist() == [0.5, 0.125, 0.25, 0.125]
    assert values_of(make_sampler("shuffle"), np.array([1])) is None


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"id": [1, 2]}, "has no column weight"),
        ({"weight": [1.0]}, "has no column id"),
        ({"id": [1, 2], "weight": [1.0, 1.0]}, "has no weight for 1 of 3 rows, such as id 5: add them"),
        ({"id": [1, 2, 5, 5], "weight": [1.0] * 4}, "has several values of one row"),
        ({"id": [1, 2, 5], "weight": [1.0, float("nan"), 1.0]}, "the weight of id 2 is no finite number"),
        ({"id": [1, 2, 5], "weight": ["a", "b", "c"]}, "column weight holds nulls, or no numbers"),
        ({"id": [1, 2, None], "weight": [1.0, 2.0, 3.0]}, "column id holds nulls, or no numbers"),
    ],
)
def test_a_table_that_cannot_be_is_one_line(columns: dict[str, Any], line: str, tmp_path: Path) -> None:
    path = write(tmp_path / "table.parquet", **columns)
    with pytest.raises(DataError, match=line) as error:
        values_of(make_sampler("weighted", path), np.array([1, 2, 5]))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "line"), [(None, "does not exist"), (b"no parquet", "table"), ("folder", "holds no .parquet files")]
)
def test_a_missing_table_ends_the_start(content: Any, line: str, shards: Path, tmp_path: Path) -> None:
    """Before anything of the run is written."""
    path = tmp_path / "table"
    if content == "folder":
        path.mkdir()
    elif content:
        path.write_bytes(content)
    with pytest.raises(DataError, match=line):
        run(shards, str(path), tmp_path / "run", "weighted")
    assert not (tmp_path / "run" / "config.json").exists()


def test_the_sum_of_weights_may_be_larger_than_any_float() -> None:
    population = population_of([40])
    weights = np.random.default_rng(0).choice([0.25, 0.5, 1.0], 40)
    sampler = make_sampler("weighted")
    small, large = (sampler.stream(replace(population, values=weights * scale)) for scale in (1.0, 1.5e308))
    assert all(np.array_equal(small(clock).places, large(clock).places) for clock in range(9))


def test_weights_that_sum_to_nothing_are_refused() -> None:
    population = replace(population_of([4]), values=np.zeros(4))
    with pytest.raises(UsageError, match="of worker 1's rows must be 0 or more, and not all 0"):
        make_sampler("weighted").stream(population)


@pytest.mark.parametrize(
    ("places", "weights", "line"),
    [
        (np.arange(3), None, "shuffle selected 3 rows for a mini-batch of 4: select 4, or set its fixed_size to False"),
        (np.arange(40) < 4, None, r"shuffle selected bool \[40\]: a Selection has int64 \[B\]"),
        ([1, 2, 3, 4], None, r"shuffle selected list \[4\]: "),
        (np.array([0, 1, 2, 77]), None, "selected rows 0 to 77 of a worker with the rows 0 to 39"),
        (np.array([0, -1, 2, 3]), None, "selected rows -1 to 3 of a worker"),
        (np.arange(4), np.ones(1, np.float32), "gave 1 weights for 4 rows: give one per row"),
    ],
)
def test_a_selection_of_other_rows_names_its_sampler(places: Any, weights: Any, line: str) -> None:
    """Numpy would take a mask, a negative place or a single weight for something else, without a word."""
    population = population_of([40], batch=4)
    good = Selection(np.arange(4), weights=np.ones(4, np.float32))
    assert check_selection(good, ShuffleSampler(), population) is good
    with pytest.raises(UsageError, match=line):
        check_selection(Selection(places, weights=weights), ShuffleSampler(), population)


@pytest.mark.parametrize(("name", "method"), [("shuffle", "stream"), ("data-aware", "table_stream")])
def test_a_run_ends_at_a_selection_of_other_rows(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str
) -> None:
    monkeypatch.setattr(SAMPLERS[name], method, lambda *_: lambda *_: Selection(np.array([-1])))
    with pytest.raises(UsageError, match=f"--sampling {name} selected "):
        run(shards, "", tmp_path / "run", name)


def test_a_selection_of_something_else_names_its_sampler() -> None:
    selected: Any = np.arange(4)
    with pytest.raises(UsageError, match=r"--sampling shuffle selected NoneType \[\]: a Selection has"):
        check_selection(selected, ShuffleSampler(), population_of([40], batch=4))


# The command line and the documents


def config_from(*words: str) -> Config:
    common = ["--shards", "s", "--output", "o", "--steps", "3"]
    return config_of(command_line.parse(build_parser(), [*common, *words]))


@every_sampler
def test_a_configuration_keeps_its_sampler_when_saved(name: str) -> None:
    words = ("--example-table", "/t") if SAMPLERS[name].column else ()
    config = config_from("--sampling", name, *words)
    assert config.sampler == make_sampler(name, "/t")
    assert config.data.sampling == name
    assert Config.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert make_config(sampling=name, **{"example_table": "/t"} if words else {}).sampler == config.sampler


@pytest.mark.parametrize("name", ["balanced", "representative", "data-aware"])
def test_groups_under_their_first_name_are_read(name: str) -> None:
    """Runs of 26 November 2026 have them in config.json."""
    saved = make_config(sampling=name).to_json()
    saved["sampler"]["group_by"] = saved["sampler"].pop("sampling_groups")
    assert Config.from_json(saved).to_json() == make_config(sampling=name).to_json()


def test_a_configuration_without_a_sampler_is_as_before() -> None:
    """Neither a saved configuration nor the identity of a run has changed for shuffle and bernoulli."""
    for name in ("shuffle", "bernoulli"):
        config = make_config(sampling=name)
        assert "sampler" not in config.to_json()
        assert config.essentials()["--sampling"] == name
        assert Config.from_json(config.to_json()).sampler == SAMPLERS[name]()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--sampling", "curriculum"), "--sampling curriculum needs --example-table"),
        (("--sampling", "shuffle", "--sampling-groups", "class"), "--sampling shuffle has no --sampling-groups class"),
        (("--sampling", "balanced", "--follow"), "--sampling balanced does not make"),
        (("--sampling", "recency", "--batch-norm", "last"), "--batch-norm last keeps one's: leave it out"),
        (
            ("--sampling", "recency", "--protocol", "k-batch-asp"),
            "k-batch-asp may apply them later: give another",
        ),
    ],
)
def test_flags_that_do_not_fit_are_one_line(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(UsageError, match=line) as error:
        config_from(*words)
    assert "\n" not in str(error.value)


def test_groups_that_a_set_lacks_are_refused(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--sampling-groups .* the shard set has none; .* --strategy distribution_aware,"
    ):
        run(shards, "", tmp_path / "run", "balanced", sampling_groups="neighbourhood")
    with pytest.raises(UsageError, match="needs classes"):
        make_sampler("balanced").check(has_classes=False, has_neighbourhoods=True)
    make_sampler("balanced", sampling_groups="neighbourhood").check(has_classes=False, has_neighbourhoods=True)


@pytest.mark.parametrize(("name", "weakness"), [("data-aware", "error"), ("sliding-window", None)])
def test_errors_of_real_targets_are_refused(name: str, weakness: str | None, tmp_path: Path) -> None:
    targets = with_targets(write_shards(tmp_path / "set", [rows_of(48, 2), rows_of(48, 3, 100)], EVAL_ROWS))
    own: dict[str, Any] = {"weakness": weakness} if weakness else {}
    groups = {"sampling_groups": "neighbourhood"} if weakness else {}
    with pytest.raises(UsageError, match=r"counts (wrong|correct) predictions of classes, but the model fits real"):
        run(targets, "", tmp_path / "run", name, model="linear", **own, **groups)
    assert not (tmp_path / "run").exists()
    make_sampler(name, **own).check(has_classes=True, has_neighbourhoods=False)


@every_sampler
def test_a_sampler_has_flags_and_a_row_of_its_readme(name: str) -> None:
    kind = SAMPLERS[name]
    assert kind.summary
    known = {word for action in build_parser()._actions for word in action.option_strings}
    assert {f"--{item.name.replace('_', '-')}" for item in fields(kind)} <= known
    assert f"\n| `{name}` | " in (ROOT / "trainer" / "data" / "README.md").read_text()
