"""Runs that are resumed with other workers or another mini-batch: every row once in every pass, whatever was interrupted."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.core import command_line
from pipeline.core.errors import DataError, UsageError
from tests.support.configs import make_config
from tests.support.draws import ids_in_steps
from tests.support.tiers import only
from tests.support.trainer_runs import lines_of
from tests.support.trainer_sets import CLASSES, EVAL_ROWS, append_rows, rows_of, write_shards
from tests.support.virtual_runs import QUIET, RESUME, final
from trainer import Options, Result, load, regroup, train
from trainer.checkpoints.prune import WAITING, prune
from trainer.checkpoints.read import newest, read_state, versions
from trainer.checkpoints.resumption import Resumption, read_resumption
from trainer.checkpoints.state import folder_of
from trainer.config import Config, RunFacts
from trainer.context import RunContext
from trainer.coordination.cohorts import SINGLE, CheckpointProgress, Cohort, Cohorts, CohortSize, next_cohort
from trainer.coordination.passes import WORD
from trainer.data.batches import build_batches
from trainer.data.cohorts import CohortBatches, ShiftedSampler, build_cohort_batches
from trainer.data.deal import deal
from trainer.data.follow import Stretch
from trainer.data.loading import load_worker
from trainer.data.opening import open_shards
from trainer.data.pinned import pin_generation
from trainer.data.rows import Rows
from trainer.data.sampling import RowSampler, TableRowSampler
from trainer.flags import build_parser, options_of
from trainer.lifecycle.prepare import main as prepare
from trainer.regroup import confirm, describe_cohorts, has_followed_stream, obstacle, regrouped
from trainer.report.settings import flags_in_words
from trainer.rules import begin_cohort, worker_rate
from trainer.runlog.kinds.peers import GossipEvent, PoolEvent
from trainer.runlog.kinds.training import PassEvent
from trainer.runlog.read import iter_events, read_pushes, surviving_events
from trainer.runlog.run_folder import prepare_folder
from trainer.runlog.run_record import RunRecord, SavedRun, read_record, saved_run
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.failures import parse_failures
from trainer.simulation.profiles import parse_profile
from trainer.simulation.replay import replay
from trainer.worker.follow import record

ROWS = (40, 29, 45)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    parts = [rows_of(size, 10 + number, 100 * number) for number, size in enumerate(ROWS)]
    return str(write_shards(tmp_path_factory.mktemp("set"), parts, EVAL_ROWS))


def run(shards: str, output: Path, options: Any = QUIET, workers: int | None = None, **values: Any) -> Result:
    machines = {name: values.pop(name) for name in ("profile", "failures") if name in values}
    common: dict[str, Any] = {"model": "logistic", "batch_size": 24, "threads": 1, "example_ledger": True}
    return simulate(
        make_config(shards, output, **common | values), SimulationSettings(workers=workers, **machines), options
    )


def fingerprint_of(shards: str, generation: int | None = None) -> int:
    """The sum of the hashes of all rows of a set whose manifest has none."""
    opened = pin_generation(open_shards(shards), generation)
    return sum(int(hash_) for worker in range(3) for hash_ in load_worker(opened, worker).hashes) % WORD


def assert_whole_passes(output: Path, least: int) -> None:
    """Check the fingerprints of the passes, and the ids of the example ledger, which are counted independently."""
    live = [each for each in surviving_events(iter_events(output / "metrics.jsonl")) if isinstance(each, PassEvent)]
    assert [each.first for each in live] == [1, *(each.last + 1 for each in live[:-1])]
    assert live[-1].last >= least
    data = json.loads((output / "config.json").read_text())["config"]["data"]
    total = fingerprint_of(data["shards"], data["generation"])
    assert [each.fingerprint for each in live] == [
        f"{total * (each.last - each.first + 1) % WORD:016x}" for each in live
    ]
    counts = np.unique(ids_of_ledger(output), return_counts=True)[1]
    assert len(counts) == sum(ROWS)
    assert counts.min() >= live[-1].last


def entries_of(output: Path) -> list[dict[str, Any]]:
    """The cohorts in config.json."""
    entries: list[dict[str, Any]] = json.loads((output / "config.json").read_text())["config"]["cohorts"]["entries"]
    return entries


def cut(run: Path, place: float) -> None:
    """Leave of a run what a kill leaves, with the checkpoint at a share of those that it has."""
    found = versions(run / "checkpoints")
    kept = found[int(place * (len(found) - 1))]
    for later in found:
        if later > kept:
            shutil.rmtree(folder_of(run / "checkpoints", later))
    (run / "result.json").unlink()


WAYS: dict[str, dict[str, Any]] = {
    "all-reduce": {"exchange": "all-reduce"},
    # With longer pushes, workers are so far ahead of others that rows are left out.
    "downpour": {"protocol": "downpour", "push_every": 2},
    "representative": {"protocol": "ssp", "sampling": "representative"},
    "d-psgd": {"exchange": "d-psgd"},
    "matcha": {"exchange": "matcha", "order": "grad-then-avg", "topology": "complete"},
}
EITHER: list[dict[str, Any]] = [{"protocol": "asp"}, {"exchange": "d-psgd"}]


PROTOCOLS = ["bsp", "asp", "ssp", "dssp", "n-softsync", "k-asp", *WAYS]


@pytest.mark.parametrize("way", only(PROTOCOLS, [*PROTOCOLS, "k-batch-asp"]))
def test_other_workers_complete_the_interrupted_pass(way: str, shards: str, tmp_path: Path) -> None:
    """More workers than shards, then one with another mini-batch, at ends by --steps in the middle of a pass."""
    values = WAYS.get(way, {"protocol": way}) | {"profile": parse_profile("lognormal:0.5")}
    output = tmp_path / "run"
    run(shards, output, steps=7, **values)
    run(shards, output, RESUME, 5, steps=14, batch_size=30, **values)
    run(shards, output, RESUME, 1, steps=40, batch_size=11, **values)
    assert_whole_passes(output, 4)
    assert [start["plan"]["num_workers"] for start in lines_of(output / "metrics.jsonl", "start")] == [3, 5, 1]
    assert replay(output).is_equal


@pytest.mark.parametrize("way", only(["asp"], ["bsp", "asp", "all-reduce", "d-psgd"]))
def test_rows_of_a_streamed_set_are_dealt_anew(way: str, tmp_path: Path) -> None:
    """Change the workers of runs on a generation of a set that grows meanwhile, and then ask for rows of later ones."""
    parts = [rows_of(size, 10 + number, 100 * number) for number, size in enumerate(ROWS)]
    shards = write_shards(tmp_path / "set", parts, EVAL_ROWS)
    append_rows(shards, [rows_of(5, 20 + number, 500 + 100 * number) for number in range(3)])
    values = WAYS.get(way, {"protocol": way}) | {"profile": parse_profile("lognormal:0.5")}
    output = tmp_path / "run"
    run(str(shards), output, steps=7, generation=0, **values)
    append_rows(shards, [rows_of(7, 30 + number, 800 + 100 * number) for number in range(3)])
    run(str(shards), output, RESUME, 5, steps=14, batch_size=30, **values)
    run(str(shards), output, RESUME, 1, steps=40, batch_size=11, **values)
    assert_whole_passes(output, 4)
    assert read_record(output).config.data.generation == 0
    assert replay(output).is_equal


def test_workers_that_have_followed_a_stream_stay(shards: str, tmp_path: Path) -> None:
    """Refuse other workers with --follow, and without it as soon as a worker has recorded where it added rows."""
    config = make_config(shards, tmp_path / "run", generation=0)
    assert not has_followed_stream(config, tmp_path / "run")
    assert obstacle(config, 5, has_followed=False) is None
    follows = make_config(shards, generation=0, follow=True)
    assert "--follow adds" in str(obstacle(follows, 5, has_followed=False))
    record(tmp_path / "run", 1, Stretch(40, 1, 45, 1))
    assert has_followed_stream(config, tmp_path / "run")
    assert "its workers have added rows of a stream" in str(obstacle(config, 5, has_followed=True))


@pytest.mark.parametrize("protocol", only(["k-bsp"], ["k-bsp", "k-batch-bsp"]))
def test_rows_of_refused_gradients_are_not_trained_again(protocol: str, shards: str, tmp_path: Path) -> None:
    """Find every row in one gradient per pass, accepted or refused, also in passes that other workers complete."""
    values: dict[str, Any] = {"protocol": protocol, "profile": parse_profile("lognormal:0.5")}
    output = tmp_path / "run"
    run(shards, output, steps=3, **values)
    run(shards, output, RESUME, 5, steps=6, batch_size=30, **values)
    run(shards, output, RESUME, 1, steps=60, batch_size=11, **values)
    assert [entry["left_out"] for entry in entries_of(output)] == [0, 0, 0]
    drawn = ids_of_gradients(output)
    assert drawn[True] == ids_of_ledger(output), "the draws are those of the run"
    refused = drawn[False]
    assert len(refused) > 100
    live = [each for each in surviving_events(iter_events(output / "metrics.jsonl")) if isinstance(each, PassEvent)]
    passes = live[-1].last
    counts = np.unique(drawn[True] + refused, return_counts=True)[1]
    assert (len(counts), counts.min(), counts.max()) == (sum(ROWS), passes, passes + 1)
    opened = open_shards(shards)
    hashes: dict[int, int] = {}
    for worker in range(3):
        rows = load_worker(opened, worker)
        hashes |= dict(zip(rows.ids.tolist(), map(int, rows.hashes), strict=True))
    trained = sum(int(str(each.fingerprint), 16) for each in live)
    assert (trained + sum(hashes[id_] for id_ in refused)) % WORD == passes * fingerprint_of(shards) % WORD
    assert replay(output).is_equal


def ids_of_gradients(output: Path) -> dict[bool, list[int]]:
    """Return the ids of the rows of accepted gradients (True) and of refused ones, drawn again by the log of a run.

    Gradients after the checkpoint with which other workers begin do not count."""
    config = read_record(output).config
    entries = config.cohorts.entries
    pushes = read_pushes(output / "pushes.csv")
    drawn: dict[bool, list[int]] = {True: [], False: []}
    for number, cohort in enumerate(entries):
        data = replace(config.data, batch_size=cohort.batch_size)
        part = replace(config, data=data, cohorts=Cohorts(entries[: number + 1]) if number else SINGLE)
        opened = open_shards(part.data.shards)
        if number:
            batches = [each.batches for each in build_cohort_batches(part, opened, targets=False)]
        else:
            batches = [build_batches(part, opened, load_worker(opened, worker), worker, 3) for worker in range(3)]
        ends = entries[number + 1].ends if number + 1 < len(entries) else [math.inf] * cohort.workers
        for push in pushes[pushes["clock"] >= cohort.clock].itertuples():
            if push.worker < cohort.workers and push.clock < ends[push.worker]:
                draw = batches[push.worker].sampler.draw(push.clock)
                drawn[push.accepted == 1] += draw.rows.ids[draw.places].tolist()
    return drawn


def ids_of_ledger(output: Path) -> list[int]:
    """Return the ids of the example ledger in order."""
    files = sorted((output / "examples").iterdir())
    return [id_ for file in files for id_ in pq.read_table(file, columns=["id"])["id"].to_pylist()]


IN_STEP: list[dict[str, Any]] = [{"protocol": "bsp"}, {"exchange": "all-reduce"}, {"exchange": "d-psgd"}]


@pytest.mark.parametrize("way", only(IN_STEP[:1], IN_STEP), ids=lambda way: next(iter(way.values())))
def test_random_deals_continue_with_other_workers(way: dict[str, Any], shards: str, tmp_path: Path) -> None:
    """Draw every row once in each epoch by workers in step, also in epochs with a change of workers and mini-batch."""
    values = way | {"repartition": "random"}
    output = tmp_path / "run"
    run(shards, output, steps=7, **values)
    run(shards, output, RESUME, 5, steps=14, batch_size=30, **values)
    run(shards, output, RESUME, 1, steps=40, batch_size=11, **values)
    assert [entry["left_out"] for entry in entries_of(output)] == [0, 0, 0]
    ids = ids_in_steps(output)
    assert len(ids) == 7 * 24 + 7 * 30 + 26 * 11
    for begin in range(0, len(ids), sum(ROWS)):
        epoch = ids[begin : begin + sum(ROWS)]
        assert len(np.unique(epoch)) == len(epoch)
    assert replay(output).is_equal


@pytest.mark.parametrize("protocol", only(["asp"], ["asp", "ssp", "downpour", "k-batch-asp"]))
def test_random_deals_are_completed_by_other_workers(
    protocol: str, shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill workers at different steps, possibly in different epochs: no row is lacking or drawn twice in an epoch."""
    monkeypatch.setattr(prune, "__defaults__", (1000, WAITING))
    values: dict[str, Any] = {"protocol": protocol, "repartition": "random", "stop": "local"}
    values |= {"checkpoint_every_s": 0.4, "profile": parse_profile("lognormal:0.5")}
    output = tmp_path / "run"
    run(shards, output, epochs=5, **values)
    cut(output, 0.5)
    run(shards, output, RESUME, 4, epochs=9, **values)
    [_, cohort] = entries_of(output)
    assert len(set(cohort["ends"])) > 1
    assert cohort["left_out"] == 0
    # All workers end at the same step: of the last epoch some rows are drawn.
    counts = np.unique(ids_of_ledger(output), return_counts=True)[1]
    assert len(counts) == sum(ROWS)
    assert np.ptp(counts) <= 1
    assert replay(output).is_equal


GOSSIPS: list[dict[str, Any]] = [
    {"protocol": "ssp", "selector": "hem"},
    {"protocol": "bsp", "sampling": "representative"},
    {"protocol": "downpour"},
    {"exchange": "all-reduce", "selector": "spl"},
    {"exchange": "d-psgd"},
]


@pytest.mark.parametrize("way", only(GOSSIPS[:1], GOSSIPS), ids=str)
def test_other_workers_exchange_examples(way: dict[str, Any], tmp_path: Path) -> None:
    """Complete passes of own rows among steps with examples of others; no worker gets an example of earlier workers."""
    # Equal shards, so that no worker is whole passes ahead of others.
    parts = [rows_of(sum(ROWS) // 3, 10 + number, 100 * number) for number in range(3)]
    shards = str(write_shards(tmp_path / "set", parts, EVAL_ROWS))
    values = way | {"gossip": 3, "gossip_every": 2, "profile": parse_profile("lognormal:0.5")}
    output = tmp_path / "run"
    run(shards, output, steps=40, **values)
    run(shards, output, RESUME, 5, steps=90, batch_size=30, **values)
    run(shards, output, RESUME, 2, steps=180, batch_size=11, **values)
    assert_whole_passes(output, 4)
    entries = entries_of(output)
    assert [len(entry["foreign"]) for entry in entries] == [0, 3, 5]
    assert all(min(entry["foreign"]) > 1 for entry in entries[1:])
    live = surviving_events(iter_events(output / "metrics.jsonl"))
    rounds: dict[int, set[str]] = {}  # the workers that have given the examples of a round
    givers: dict[int, list[set[str]]] = {0: [], 1: [], 2: []}
    for event in live:
        if isinstance(event, GossipEvent):
            rounds[event.round] = set(event.ids)
        elif isinstance(event, PoolEvent):
            cohort = max(number for number, entry in enumerate(entries) if entry["version"] < event.version_or_zero())
            givers[cohort].append(rounds[event.round])
    assert [set.union(*each) for each in givers.values()] == [set("012"), set("01234"), set("01")]
    assert replay(output).is_equal


@pytest.mark.parametrize("way", EITHER)
def test_a_killed_run_resumes_with_other_workers(
    way: dict[str, Any], shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first checkpoint of the new workers it is as if they had not begun; later all of it counts."""
    monkeypatch.setattr(prune, "__defaults__", (1000, WAITING))
    values: dict[str, Any] = way | {"checkpoint_every_s": 0.4, "epochs": 5}
    output = tmp_path / "run"
    run(shards, output, **values)
    cut(output, 0.4)
    run(shards, output, RESUME, 4, **values)
    cut(output, 0.8)
    run(shards, output, RESUME, **values)
    assert_whole_passes(output, 3)
    assert replay(output).is_equal
    assert max(event["epoch"] for event in lines_of(output / "metrics.jsonl", "epoch")) == 5


SAMPLERS: list[dict[str, Any]] = [
    {"sampling": "bernoulli"},
    {"sampling": "balanced"},
    {"sampling": "weighted"},
    {"sampling": "curriculum"},
    {"sampling": "recency"},
    {"sampling": "data-aware"},
    {"sampling": "data-aware", "weakness": "validation-loss"},
    {"sampling": "bernoulli", "exchange": "d-psgd"},
    {"sampling": "data-aware", "exchange": "matcha"},
]


@pytest.fixture(scope="module")
def table(shards: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A weight and a loss of every row of the set."""
    opened = open_shards(shards)
    ids = np.concatenate([load_worker(opened, worker).ids for worker in range(3)])
    path = tmp_path_factory.mktemp("table") / "rows.parquet"
    values = np.random.default_rng(5).uniform(0.1, 2, len(ids))
    pq.write_table(pa.table({"id": ids, "weight": values, "loss": values}), path)
    return str(path)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda values: "-".join(values.values()))
def test_samplers_without_passes_continue_with_other_workers(
    sampler: dict[str, Any], shards: str, table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay and a resume in the middle draw the same mini-batches; every row is of one worker."""
    monkeypatch.setattr(prune, "__defaults__", (1000, WAITING))
    values = sampler | {"protocol": "bsp"}
    if sampler["sampling"] in ("weighted", "curriculum"):
        values["example_table"] = table
    output = tmp_path / "run"
    run(shards, output, steps=7, **values)
    run(shards, output, RESUME, 5, steps=14, batch_size=30, **values)
    end = final(run(shards, output, RESUME, 2, steps=30, **values)).tobytes()
    cut(output, 0.99)
    assert final(run(shards, output, RESUME, steps=30, **values)).tobytes() == end
    assert [entry["workers"] for entry in entries_of(output)] == [3, 5, 2]
    assert replay(output).is_equal
    draws = cohort_batches(output)
    ids = np.concatenate([rows.ids for _, rows in draws])
    assert len(np.unique(ids)) == len(ids) == sum(ROWS)


def test_evaluation_losses_change_their_workers(shards: str, tmp_path: Path) -> None:
    """Under asp each of three portions of the evaluation rows has entries of its own, whoever of the workers measures it."""
    values: dict[str, Any] = {"sampling": "data-aware", "weakness": "validation-loss", "model": "perceptron"}
    values |= {"protocol": "asp", "learning_rate": 1e-9, "recipe": "constant"}
    output = tmp_path / "run"
    run(shards, output, steps=7, **values)
    for workers, steps, measured in ((5, 14, 3), (2, 30, 2)):
        done = run(shards, output, RESUME, workers, steps=steps, **values)
        samplers = [batches.sampler for batches, _ in cohort_batches(output)]
        shifted = [each.sampler for each in samplers if isinstance(each, ShiftedSampler)]
        validations = [each.validation for each in shifted if isinstance(each, TableRowSampler) and each.validation]
        assert len(validations) == workers
        assert sum(len(each.keys) > 0 for each in validations) == measured
        assert sum(len(each.keys) for each in validations) == len(EVAL_ROWS)
        with torch.no_grad():
            logits = load(str(output))(torch.from_numpy(np.asarray(EVAL_ROWS.images_NCHW)))
        losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(EVAL_ROWS.labels), reduction="none").numpy()
        expected = [losses[EVAL_ROWS.labels == label].mean() for label in range(CLASSES)]
        means = validations[0].losses_of_groups(final(done)[-3 * CLASSES :])
        np.testing.assert_allclose(means, expected, rtol=1e-4)
    assert replay(output).is_equal


def cohort_batches(output: Path) -> list[CohortBatches]:
    """Return the mini-batches of the present workers of a run."""
    context = RunContext.from_config(read_record(output).config)
    return build_cohort_batches(context.config, context.shards, targets=False)


def test_a_curriculum_continues_at_its_epoch(shards: str, table: str, tmp_path: Path) -> None:
    """At epoch 2 of 4 new workers draw from the easiest six tenths of their rows, with orders of their own."""
    values: dict[str, Any] = {"sampling": "curriculum", "example_table": table, "protocol": "bsp"}
    values |= {"easy_share": 0.2, "all_after": 4.0}
    output = tmp_path / "run"
    run(shards, output, epochs=2, batch_size=38, **values)
    run(shards, output, RESUME, 2, epochs=3, batch_size=57, **values)
    read = pq.read_table(table).to_pydict()
    losses = dict(zip(read["id"], read["loss"], strict=True))
    [_, cohort] = entries_of(output)
    assert (cohort["clock"], cohort["epoch_steps"]) == (6, 4)
    for batches, rows in cohort_batches(output):
        draw = batches.sampler.draw(cohort["clock"])
        easiest = sorted(losses[id_] for id_ in rows.ids.tolist())[: math.ceil(0.6 * len(rows))]
        drawn = [losses[id_] for id_ in rows.ids[draw.places].tolist()]
        assert max(drawn) <= easiest[-1]
        assert max(drawn) > easiest[int(0.5 * len(easiest))]


def test_random_numbers_of_a_cohort_are_its_own(shards: str, tmp_path: Path) -> None:
    """With half the mini-batch, workers with the rows that they had would draw some mini-batches again."""
    output = tmp_path / "run"
    values: dict[str, Any] = {"sampling": "balanced", "protocol": "bsp"}
    run(shards, output, steps=2, **values)
    before = RunContext.from_config(read_record(output).config)
    rows = load_worker(before.shards, 0)
    old = build_batches(before.config, before.shards, rows, 0, 3).sampler
    run(shards, output, replace(RESUME, batch_size_given=True), 3, steps=20, batch_size=12, **values)
    new = cohort_batches(output)[0].batches.sampler
    [_, cohort] = entries_of(output)
    half = np.asarray(new.draw(cohort["clock"]).places)
    first = cohort["epoch_steps"] // 2
    assert cohort["epoch_steps"] % 2 == 0
    assert not np.array_equal(np.asarray(old.draw(first).places)[: len(half)], half)


@pytest.mark.parametrize("workers", [3, 8, 2])
def test_rows_keep_their_entries_in_a_loss_table(workers: int, shards: str, tmp_path: Path) -> None:
    """Whatever the number of workers with which a run begins, of which each has numbered its own rows."""
    output = tmp_path / "run"
    values: dict[str, Any] = {"sampling": "recency", "protocol": "bsp"}
    run(shards, output, QUIET, workers, steps=2, **values)
    context = RunContext.from_config(read_record(output).config)
    entries: dict[int, int] = {}
    for worker, rows in enumerate(deal(context.shards, workers)):
        sampler = build_batches(context.config, context.shards, rows, worker, workers).sampler
        entries |= entries_by_id(sampler, rows)
    run(shards, output, RESUME, 5, steps=12, **values)
    later: dict[int, int] = {}
    for batches, rows in cohort_batches(output):
        assert isinstance(batches.sampler, ShiftedSampler)
        later |= entries_by_id(batches.sampler.sampler, rows)
    assert later == entries
    assert sorted(entries.values()) == list(range(sum(ROWS)))


def entries_by_id(sampler: RowSampler, rows: Rows) -> dict[int, int]:
    assert isinstance(sampler, TableRowSampler)
    return dict(zip(rows.ids.tolist(), sampler.keys.tolist(), strict=True))


@pytest.mark.parametrize(
    "values",
    [
        {"protocol": "bsp"},
        {"exchange": "d-psgd"},
        {"protocol": "bsp", "repartition": "random"},
        {"protocol": "bsp", "gossip": 2},
    ],
)
def test_the_same_workers_have_the_same_bits(values: dict[str, Any], shards: str, tmp_path: Path) -> None:
    """A resume that asks for the number that the run has changes nothing."""
    run(shards, tmp_path / "run", steps=9, **values)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    kept = run(shards, tmp_path / "run", RESUME, 3, steps=20, **values)
    assert final(kept).tobytes() == final(run(shards, tmp_path / "other", RESUME, steps=20, **values)).tobytes()
    assert "cohorts" not in json.loads((tmp_path / "run" / "config.json").read_text())["config"]


def test_old_passes_of_slow_workers_are_left_out(shards: str, tmp_path: Path) -> None:
    """Far ahead of a slow worker, new workers would otherwise draw its rows alone, for dozens of passes."""
    values: dict[str, Any] = {"protocol": "asp", "profile": parse_profile("one-slow:3"), "epoch_checkpoints": False}
    output = tmp_path / "run"
    run(shards, output, steps=30, **values)
    run(shards, output, RESUME, 4, steps=72, **values)
    [_, cohort] = entries_of(output)
    assert cohort["left_out"] > 0
    text = describe_cohorts(
        replace(RunContext.from_config(make_config(output=output)), config=read_record(output).config)
    )
    assert text.endswith(
        f"--workers 4 --batch-size 24 from version 90 on, --workers 3 --batch-size 24 before; {cohort['left_out']} rows of"
        f" passes 1 to {cohort['turn']} were left out then, because some workers were whole passes ahead of others"
    )
    passes = [each for each in surviving_events(iter_events(output / "metrics.jsonl")) if isinstance(each, PassEvent)]
    # The first one covers the passes that are left out, and says that they lack rows.
    later = [each for each in passes if each.first > cohort["turn"] + 1]
    assert later
    assert {each.fingerprint for each in later} == {f"{fingerprint_of(shards):016x}"}
    assert replay(output).is_equal


def test_rounds_of_an_absent_worker_are_not_made_up_for(shards: str, tmp_path: Path) -> None:
    """Its rows are lacking in the pass that it missed, which says so, and in no later one."""
    values: dict[str, Any] = {"exchange": "d-psgd", "failures": parse_failures("worker:1@0.25+100")}
    output = tmp_path / "run"
    run(shards, output, steps=3, **values)
    assert read_state(output / "checkpoints", 3).clocks == {0: 3, 1: 2, 2: 3}
    run(shards, output, RESUME, 5, steps=30, **values)
    assert entries_of(output)[1]["ends"] == [3, 3, 3]
    passes = [each for each in surviving_events(iter_events(output / "metrics.jsonl")) if isinstance(each, PassEvent)]
    are_whole = [each.fingerprint == f"{fingerprint_of(shards):016x}" for each in passes]
    assert are_whole == [False, *[True] * (len(passes) - 1)]
    assert [(each.first, each.last) for each in passes] == [(number, number) for number in range(1, len(passes) + 1)]
    assert len(passes) > 4
    assert replay(output).is_equal


@pytest.mark.parametrize("way", EITHER)
def test_a_start_killed_before_the_first_checkpoint(
    way: dict[str, Any], shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain --resume has the workers and the mini-batch that the killed start asked for; others can be asked for."""
    monkeypatch.setattr(prune, "__defaults__", (1000, WAITING))
    output = tmp_path / "run"
    first = newest(run(shards, output, steps=7, **way).output / "checkpoints")
    run(shards, output, RESUME, 5, steps=14, batch_size=30, **way)
    for version in versions(output / "checkpoints"):
        if version > (first or 0):
            shutil.rmtree(folder_of(output / "checkpoints", version))
    (output / "result.json").unlink()
    shutil.copytree(output, tmp_path / "other")
    with pytest.raises(UsageError, match="a run with --batch-size 30, not 24"):
        run(shards, output, RESUME, steps=14, **way)
    run(shards, output, RESUME, steps=30, batch_size=30, **way)
    assert [entry["workers"] for entry in entries_of(output)] == [3, 5]
    assert_whole_passes(output, 4)
    assert replay(output).is_equal
    run(shards, tmp_path / "other", RESUME, 3, steps=14, **way)
    assert "cohorts" not in json.loads((tmp_path / "other" / "config.json").read_text())["config"]


@pytest.mark.parametrize("way", EITHER)
@pytest.mark.parametrize("kept", ["checkpoint", "record"])
def test_a_start_killed_before_the_first_update(
    kept: str, way: dict[str, Any], shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoint 0 has the clocks of the workers with which the run begins, whoever writes it."""
    monkeypatch.setattr(prune, "__defaults__", (1000, WAITING))
    output = tmp_path / "run"
    run(shards, output, steps=7, **way)
    for path in (output / "metrics.jsonl", output / "pushes.csv", output / "result.json", output / "examples"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for version in versions(output / "checkpoints"):
        if version or kept == "record":
            shutil.rmtree(folder_of(output / "checkpoints", version))
    for path in output.glob("*.safetensors"):
        path.unlink()
    run(shards, output, RESUME, 5, steps=20, **way)
    assert read_state(output / "checkpoints", 0).clocks == {0: 0, 1: 0, 2: 0}
    assert [entry["workers"] for entry in entries_of(output)] == [3, 5]
    assert_whole_passes(output, 3)
    assert replay(output).is_equal


def test_a_checkpoint_that_another_start_writes_meanwhile(shards: str, tmp_path: Path) -> None:
    """A start looks at the newest checkpoint before it has the lock, and again when it has it."""
    output = tmp_path / "run"
    values: dict[str, Any] = {"model": "logistic", "batch_size": 24, "threads": 1, "example_ledger": True}
    run(shards, output, steps=7)
    context = RunContext.from_config(make_config(shards, output, steps=30, **values))
    look = partial(regrouped, context, workers=5, options=RESUME, compute="real")
    seen = look(saved_run(output))
    confirm(seen, look(saved_run(output)))
    run(shards, output, RESUME, steps=9)
    with pytest.raises(UsageError, match="was written by another start just now"):
        confirm(seen, look(saved_run(output)))


def test_a_start_that_changes_nothing_reads_no_checkpoint(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the reads: a start that changes the workers reads the checkpoints once."""
    reads: list[Path] = []

    def counted(root: Path, config: Config) -> Resumption:
        reads.append(root)
        return read_resumption(root, config)

    monkeypatch.setattr(regroup, "read_resumption", counted)
    output = tmp_path / "run"
    run(shards, output, steps=7)
    config = replace(read_record(output).config, run=replace(read_record(output).config.run, steps=30))
    look = partial(regrouped, RunContext.from_config(config), saved_run(output), options=RESUME, compute="real")
    assert look(workers=None).config == look(workers=3).config == config
    assert reads == []
    assert look(workers=5).config.cohorts.present.version == newest(output / "checkpoints")
    assert reads == [output / "checkpoints"]


def test_clocks_of_other_workers_are_broken_data(shards: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run(shards, output, steps=7)
    run(shards, output, RESUME, 5, steps=14)
    config = read_record(output).config
    version = newest(output / "checkpoints") or 0
    state = read_state(output / "checkpoints", version)
    begun = config.cohorts.present
    assert begin_cohort(config, state) == state
    for other in (
        replace(state, clocks={0: 14, 1: 14}),
        replace(state, version=begun.version, clocks=dict.fromkeys(range(3), 8)),
        replace(state, version=begun.version, clocks=dict.fromkeys(range(5), 7)),
    ):
        with pytest.raises(DataError, match="has other clocks than the workers"):
            begin_cohort(config, other)
    file = folder_of(output / "checkpoints", version) / "state.json"
    file.write_bytes(replace(state, clocks={0: 14, 1: 14}).to_bytes())
    for workers in (None, 5, 2):
        with pytest.raises(DataError, match="has clocks of 2 workers, not 5"):
            run(shards, output, RESUME, workers, steps=30)


def test_a_run_past_the_requested_length_is_left_alone(shards: str, tmp_path: Path) -> None:
    """Its checkpoint would otherwise be written again, with the clocks of workers that have done nothing."""
    output = tmp_path / "run"
    version = newest(run(shards, output, steps=20).output / "checkpoints") or 0
    state = replace(read_state(output / "checkpoints", version), final=False)
    file = folder_of(output / "checkpoints", version) / "state.json"
    file.write_bytes(state.to_bytes())
    (output / "result.json").unlink()
    for steps in (10, 20):
        with pytest.raises(UsageError, match="finished at this length: --workers 5 --batch-size 24 instead of"):
            run(shards, output, RESUME, 5, steps=steps)
    assert file.read_bytes() == state.to_bytes()


def test_the_mini_batch_changes_only_on_demand(shards: str, tmp_path: Path) -> None:
    """A command line without --batch-size has a default, which is no wish."""
    output = tmp_path / "run"
    forgotten = replace(RESUME, batch_size_given=False)
    given = replace(RESUME, batch_size_given=True)
    run(shards, output, steps=7)
    run(shards, output, forgotten, 3, steps=8, batch_size=128)
    assert read_record(output).config.data.batch_size == 24
    run(shards, output, forgotten, 5, steps=14, batch_size=128)
    assert [entry["batch_size"] for entry in entries_of(output)] == [24, 24]
    run(shards, output, forgotten, 5, steps=16, batch_size=128)
    assert [entry["batch_size"] for entry in entries_of(output)] == [24, 24]
    with pytest.raises(UsageError, match="with --batch-size 24, not 30"):
        run(shards, output, RESUME, 5, steps=20, batch_size=30)
    run(shards, output, given, 5, steps=20, batch_size=30)
    assert [entry["batch_size"] for entry in entries_of(output)] == [24, 24, 30]
    with pytest.raises(UsageError, match="with --batch-size 30, not 128: give --batch-size 30"):
        run(shards, output, forgotten, steps=30, batch_size=128)


def test_a_command_line_says_whether_it_has_a_mini_batch(tmp_path: Path) -> None:
    """conf/trainer.toml has a default, a file of --config a wish."""
    (tmp_path / "own.toml").write_text("batch_size = 36")
    for argv, is_given in (
        ((), False),
        (("--batch-size", "128"), True),
        (("--config", str(tmp_path / "own.toml")), True),
    ):
        args = command_line.parse(build_parser(), ["--shards", "s", "--output", "o", "--steps", "1", *argv])
        assert options_of(args).batch_size_given is is_given


def test_a_finished_run_is_not_trained_again(shards: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run(shards, output, steps=7)
    run(shards, output, RESUME, 5, steps=14, batch_size=30)
    log = (output / "metrics.jsonl").read_bytes()
    for workers in (None, 5):
        run(shards, output, QUIET, workers, steps=14, batch_size=30)
        run(shards, output, RESUME, workers, steps=14, batch_size=30)
    assert (output / "metrics.jsonl").read_bytes() == log
    with pytest.raises(UsageError, match="with --batch-size 30, not 24; choose another --output"):
        run(shards, output, QUIET, steps=14)
    with pytest.raises(UsageError, match="--workers 5 --batch-size 30, not --workers 3 --batch-size 30; --resume"):
        run(shards, output, QUIET, 3, steps=14, batch_size=30)
    with pytest.raises(UsageError, match="--resume continues to the 20"):
        run(shards, output, QUIET, steps=20, batch_size=30)


def test_virtual_workers_are_kept(shards: str, tmp_path: Path) -> None:
    """A run that begins with more workers than shards resumes with them."""
    output = tmp_path / "run"
    run(shards, output, QUIET, 8, steps=5)
    run(shards, output, RESUME, steps=9)
    assert read_record(output).num_workers == 8
    run(shards, output, RESUME, 2, steps=12)
    run(shards, output, RESUME, steps=15)
    assert [entry["workers"] for entry in entries_of(output)] == [8, 2]
    assert replay(output).is_equal


def test_the_rate_counts_mini_batches_of_any_size() -> None:
    """The rate of inverse-sqrt continues where it was, although an epoch has another number of steps."""
    before = make_config(batch_size=10, epochs=4, recipe="inverse-sqrt", learning_rate=1.0)
    facts = RunFacts(3, 1000, 1, 0)
    first = Cohort(3, 10)
    progress = CheckpointProgress(150, 450, {0: 150, 1: 150, 2: 150})
    later = next_cohort(first, size=CohortSize(5, 25), progress=progress, turn=1, left_out=0, steps_per_epoch=(100, 40))
    data = replace(before.data, batch_size=25)
    config = replace(before, data=data, cohorts=Cohorts((first, later)))
    epoch = later.gradients(450, 5) / (5 * 40)
    assert epoch == 1.5
    rates = (3 * worker_rate(before, facts, 1.5), 5 * worker_rate(config, replace(facts, num_workers=5), epoch))
    assert rates == pytest.approx([151**-0.5] * 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries.__delitem__(slice(1, None)),
        lambda entries: entries[0].update(workers=0),
        lambda entries: entries[1].update(batch_size=0),
        lambda entries: entries[0].update(version=9),
        lambda entries: entries[1].update(ends=[7, 7]),
        lambda entries: entries[1].update(clock=8),
        lambda entries: entries[2].update(version=3),
        lambda entries: entries[2].update(turn=-1),
        lambda entries: entries[2].update(other=1),
    ],
)
def test_impossible_cohorts_are_broken_data(change: Callable[[Any], object]) -> None:
    first = Cohort(3, 24)
    second = Cohort(5, 30, 7, 21, 7, 1, 7, 5, (7, 7, 7))
    third = Cohort(2, 30, 9, 31, 9, 1, 9, 7, (9, 9, 9, 9, 9))
    values = json.loads(json.dumps(Cohorts((first, second, third)).to_json()))
    assert Cohorts.from_json(values) == Cohorts((first, second, third))
    change(values["entries"])
    with pytest.raises(ValueError, match=r"cohort|clocks|'other'"):
        Cohorts.from_json(values)


def test_damaged_cohorts_are_one_line(shards: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run(shards, output, steps=7)
    run(shards, output, RESUME, 5, steps=14)
    values = json.loads((output / "config.json").read_text())
    values["config"]["cohorts"]["entries"].pop()
    (output / "config.json").write_text(json.dumps(values))
    with pytest.raises(DataError, match=r"config.json is damaged, or of another version \(.+\); continue it with"):
        run(shards, output, RESUME, 5, steps=20)


def test_the_report_names_the_workers(shards: str, tmp_path: Path) -> None:
    """In words, not as a flag that does not exist."""
    config = replace(make_config(), cohorts=Cohorts((Cohort(3, 24), Cohort(5, 30, 7, 21, 7, 1, 7, 5, (7, 7, 7)))))
    rows = {row.flag: row.value for row in flags_in_words(config.to_json(), {})}
    assert rows["--workers"] == "3 with --batch-size 24; from version 7 on 5 with --batch-size 30"
    assert "--entries" not in rows


def test_other_workers_have_other_threads(tmp_path: Path) -> None:
    """On a cluster a resume keeps the threads per worker, unless the cores have another number of workers."""
    config = make_config(batch_size=24)
    cohorts = Cohorts((Cohort(3, 24), Cohort(5, 24, 7, 21, 7, 1, 7, 5, (7, 7, 7))))
    record = RunRecord(config, 3, 100, "set", threads=4)
    threads = []

    def check(asked: RunRecord, saved: SavedRun) -> RunRecord:
        threads.append(asked.threads)
        return replace(asked, threads=asked.threads or 4)

    for workers, own in ((3, config), (3, config), (5, replace(config, cohorts=cohorts))):
        asked = replace(record, config=own, num_workers=workers, threads=0)
        with prepare_folder(tmp_path, asked, resume=bool(threads), overwrite=False, check=check):
            (tmp_path / "metrics.jsonl").touch()
    assert threads == [0, 4, 0]


def test_workers_without_resume_are_refused(shards: str, tmp_path: Path) -> None:
    """The message leads to both ways to another number."""
    config = make_config(shards, tmp_path / "run", model="logistic")
    with pytest.raises(UsageError, match=r"--workers 5: .* per shard, 3; with --resume .*sharding reshard --workers 5"):
        train(config, Options(silent=True, workers=5))
    assert not (tmp_path / "run").exists()


def test_places_without_a_run_are_refused_as_before(shards: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for options in (RESUME, replace(RESUME, workers=5)):
        with pytest.raises(UsageError, match=r"is not a folder|per shard, 3"):
            train(make_config(shards, tmp_path / "file", model="logistic"), options)
    run(shards, tmp_path / "run", steps=4)
    with pytest.raises(UsageError, match="give --shards"):
        run("", tmp_path / "run", RESUME, 5, steps=8)


def test_what_cannot_change_its_workers_is_refused(shards: str, tmp_path: Path) -> None:
    output = tmp_path / "alone"
    run(shards, output, steps=8, gossip=2)
    with pytest.raises(UsageError, match="--gossip exchanges examples among at least two workers; resume with"):
        run(shards, output, RESUME, 1, steps=20, gossip=2)
    output = tmp_path / "deals"
    values: dict[str, Any] = {"repartition": "random", "steps": 8}
    run(shards, output, **values)
    with pytest.raises(UsageError, match="random needs a --batch-size of at most half of the 114 rows, got 58"):
        run(shards, output, RESUME, 2, **values | {"batch_size": 58, "steps": 20})
    output = tmp_path / "done"
    run(shards, output, epochs=1, protocol="bsp")
    with pytest.raises(UsageError, match="a run with --batch-size 24, not 25: give --batch-size 24, or also --workers"):
        run(shards, output, RESUME, epochs=2, protocol="bsp", batch_size=25)
    with pytest.raises(UsageError, match="finished at this length"):
        run(shards, output, RESUME, 2, epochs=1, protocol="bsp")
    with pytest.raises(UsageError, match="would have no rows"):
        run(shards, output, RESUME, 200, epochs=2, protocol="bsp", batch_size=300)


def test_other_workers_are_compared_by_the_tolerance(shards: str, tmp_path: Path) -> None:
    """End with the first update of the new workers, which any tolerance compares, as it does not the first of a run."""
    values: dict[str, Any] = {"protocol": "bsp", "tolerance": 1e6}
    assert not run(shards, tmp_path, steps=1, **values).converged
    done = run(shards, tmp_path, RESUME, 5, steps=8, **values)
    assert done.converged
    assert newest(tmp_path / "checkpoints") == 2
    before = (tmp_path / "result.json").read_bytes()
    with pytest.raises(UsageError, match="finished at this length: --workers 2 --batch-size 24 instead of --workers 5"):
        run(shards, tmp_path, RESUME, 2, steps=8, **values)
    assert (tmp_path / "result.json").read_bytes() == before
    assert run(shards, tmp_path, RESUME, 2, steps=12, **values).converged, "a longer run goes on"


def test_each_of_other_workers_has_as_many_rows_as_it_gives(shards: str) -> None:
    """Check the new workers, not the shards: of 114 rows, 6 workers have 19 each."""
    config = make_config(shards, model="logistic", batch_size=24, gossip=25)
    later = Cohort(6, 24, version=1, accepted=1, clock=1, ends=(1, 1, 1))
    changed = replace(config, cohorts=Cohorts((Cohort(3, 24), later)))
    receiver, sender = Pipe(duplex=False)
    prepare(config, "", None, False, False, sender)
    assert receiver.poll(), "the shards have 25 rows each"
    with pytest.raises(UsageError, match="--gossip 25 exceeds the 19 rows of a worker"):
        prepare(changed, "", None, False, False, sender)


def test_a_resume_with_other_workers_names_the_cause(shards: str, tmp_path: Path) -> None:
    """A damaged folder, other rows and another kind of run are not a wrong number of workers."""
    output = tmp_path / "run"
    run(shards, output, steps=4)
    with pytest.raises(UsageError, match="holds a run in virtual time"):
        train(make_config(shards, output, model="logistic"), replace(RESUME, workers=5))
    other = str(write_shards(tmp_path / "other", [rows_of(30, 9, 0), rows_of(30, 8, 30)], None))
    with pytest.raises(UsageError, match="holds a run with another shard set"):
        run(other, output, RESUME, 5, steps=8)
    for version in versions(output / "checkpoints"):
        (folder_of(output / "checkpoints", version) / "state.json").write_text("{")
    with pytest.raises(DataError, match="holds no whole checkpoint"):
        run(shards, output, RESUME, 5, steps=8)
    (output / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config.json is damaged"):
        train(make_config(shards, output, model="logistic"), replace(RESUME, workers=5))


def test_an_unfinished_first_checkpoint_changes_nothing(shards: str, tmp_path: Path) -> None:
    """A start may be killed while it writes checkpoint 0, with the cohorts in config.json already."""
    output = tmp_path / "run"
    run(shards, output, steps=7)
    for path in (output / "metrics.jsonl", output / "pushes.csv", output / "result.json", output / "examples"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for version in versions(output / "checkpoints"):
        if version:
            shutil.rmtree(folder_of(output / "checkpoints", version))
    (folder_of(output / "checkpoints", 0) / "state.json").unlink(missing_ok=True)
    shutil.copytree(output, tmp_path / "other")
    run(shards, output, RESUME, 5, steps=20)
    assert [entry["workers"] for entry in entries_of(output)] == [3, 5]
    record = json.loads((output / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(record))
    run(shards, tmp_path / "other", RESUME, steps=20)
    assert_whole_passes(tmp_path / "other", 3)


def test_a_change_before_the_first_update_is_finished_as_any(shards: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run(shards, output, steps=7)
    (output / "result.json").unlink()
    for version in versions(output / "checkpoints"):
        shutil.rmtree(folder_of(output / "checkpoints", version))
    run(shards, output, RESUME, 5, steps=14, batch_size=30)
    assert [entry["version"] for entry in entries_of(output)] == [0, 0]
    log = (output / "metrics.jsonl").read_bytes()
    run(shards, output, QUIET, 5, steps=14, batch_size=30)
    assert (output / "metrics.jsonl").read_bytes() == log
    with pytest.raises(UsageError, match="with --batch-size 30, not 24"):
        run(shards, output, QUIET, 5, steps=14)
