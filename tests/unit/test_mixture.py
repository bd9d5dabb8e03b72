"""Mixtures of several sets: exact shares at every position, through resumption and a change of the shares."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core import command_line
from pipeline.core.errors import DataError, UsageError
from pipeline.core.storage.store import Store
from pipeline.core.storage.uri import is_remote
from tests.support.configs import make_config
from tests.support.tiers import only
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_bare_shard, write_shards
from tests.support.virtual_runs import QUIET, RESUME, final
from trainer import Result
from trainer.checkpoints.prune import WAITING, prune
from trainer.checkpoints.read import read_state, versions
from trainer.checkpoints.state import folder_of
from trainer.config import SEPARATOR, Config
from trainer.data import mixture
from trainer.data.loading import load_eval, load_worker
from trainer.data.mixture import open_mixture, sources_of
from trainer.data.opening import open_shards
from trainer.data.pinned import open_pinned
from trainer.flags import build_parser, config_of
from trainer.report.page import write_report
from trainer.sampling.base import Population, SelectionStream
from trainer.sampling.mixture import changed_mix, is_mix, mixture_stream, parse_mix, rows_by_source, source_plans
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.failures import parse_failures
from trainer.simulation.profiles import parse_profile
from trainer.simulation.replay import replay

SHARES = [0.5, 0.3, 0.2]
BATCH = 7


def population_of(sizes: list[int], seed: int = 3) -> tuple[Population, np.ndarray]:
    sources = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    return Population(sources, None, None, BATCH, 0.0, 1, seed, 2), sources


def assert_exact(drawn: np.ndarray, shares: list[float]) -> None:
    """Check that up to every position each source has its share, within one."""
    for source, share in enumerate(shares):
        counts = np.cumsum(drawn == source)
        assert (np.abs(counts - share * np.arange(1, len(drawn) + 1)) < 1 + 1e-9).all()


def drawn_places(stream: SelectionStream, clocks: int) -> np.ndarray:
    return np.concatenate([np.arange(1000)[stream(clock).places] for clock in range(clocks)])


# The stream


@pytest.mark.slow
@given(
    parts=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    sizes=st.lists(st.integers(1, 30), min_size=5, max_size=5),
    change=st.integers(1, 30),
    seed=st.integers(0, 2**30),
)
def test_a_source_has_its_share_at_every_position(parts: list[int], sizes: list[int], change: int, seed: int) -> None:
    """Before and after a change of the shares, and its rows are drawn in passes over all of them."""
    population, sources = population_of(sizes[: len(parts)], seed)
    texts = [",".join(map(str, order)) for order in (parts, parts[::-1])]
    whole = mixture_stream(parse_mix(texts[0]), population, sources)
    changed = mixture_stream(parse_mix(f"{texts[0]};{change}:{texts[1]}"), population, sources)
    places = drawn_places(changed, 60)
    assert np.array_equal(places[: change * BATCH], drawn_places(whole, change))
    assert_exact(sources[places[: change * BATCH]], [part / sum(parts) for part in parts])
    assert_exact(sources[places[change * BATCH :]], [part / sum(parts) for part in parts[::-1]])
    for source in range(len(parts)):
        rows = places[sources[places] == source]
        size = int((sources == source).sum())
        for begin in range(0, len(rows) - size + 1, size):
            assert len(set(rows[begin : begin + size].tolist())) == size
    assert np.array_equal(np.arange(len(sources))[changed(41).places], places[41 * BATCH : 42 * BATCH])


@given(
    change=st.integers(1, 30),
    pushes=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), max_size=12),
    seed=st.integers(0, 2**30),
)
def test_rows_of_pushes_are_counted_by_source(change: int, pushes: list[tuple[int, int]], seed: int) -> None:
    """Count pushes of any number of mini-batches, with any gaps, before, over and after a change of the shares."""
    population, sources = population_of([5, 9, 4], seed)
    spans = parse_mix(f"3,1,1;{change}:1,2,4")
    stream = mixture_stream(spans, population, sources)
    clocks: list[int] = []
    drawn: list[int] = []
    clock = 0
    for gap, count in pushes:
        clocks.append(clock + gap)
        clock += gap + count
        drawn += range(clock - count, clock)
    expected = np.zeros((2, 3), np.int64)
    for each in drawn:
        expected[int(each >= change)] += np.bincount(sources[stream(each).places], minlength=3)
    plans = source_plans(spans, BATCH, seed, population.worker)
    examples = BATCH * np.array([count for _, count in pushes], np.int64)
    assert np.array_equal(rows_by_source(plans, BATCH, np.array(clocks, np.int64), examples), expected)


def test_decimal_shares_are_exact() -> None:
    assert parse_mix("0.5,0.3,0.2")[0].shares == (5, 3, 2)
    assert parse_mix("1,1,2")[0].shares == (1, 1, 2)
    assert parse_mix("0.001,0.999")[0].shares == (1, 999)
    assert parse_mix("3,1;40:1,3") == ((0, (3, 1)), (40, (1, 3)))
    wrong = ["0.5,0", "1,-1", "a,b", "0.3333333,0.6666667", "1,2;1,2", "1,2;5:1,2,3", "1,2;5:1,1;5:2,1", "1/0,1", ";"]
    assert not any(map(is_mix, wrong))
    assert parse_mix("1e-20,3E-20")[0].shares == (1, 3)
    # Of the other exponents, some would take hours.
    assert not any(map(is_mix, ["1e21,1e21", "1,1e-21", "1e,1", "1e+99_999,1"]))


def test_a_change_counts_from_the_first_clock_ahead() -> None:
    assert changed_mix("1,2", "2,4", 9) == "1,2"
    assert changed_mix("1,2", "2,1", 9) == "1,2;9:2,1"
    assert changed_mix("1,2;9:2,1", "2,1", 30) == "1,2;9:2,1"
    assert changed_mix("1,2;9:2,1", "1,1", 9) == "1,2;9:1,1", "no worker has drawn by the shares between"
    assert changed_mix("1,2", "1,1", 0) == "1,1"


# Runs


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three sets of three shards, with equal ids."""
    folders = []
    for number, size in enumerate((40, 20, 50)):
        parts = [rows_of(size, 10 * number + worker, 100 * worker) for worker in range(3)]
        root = tmp_path_factory.mktemp(f"set{number}")
        folders.append(str(write_shards(root, parts, None if number == 1 else EVAL_ROWS)))
    return SEPARATOR.join(folders)


def run(sets: str, output: Path, options: Any = QUIET, **values: Any) -> Result:
    machines = {name: values.pop(name) for name in ("profile", "failures", "workers") if name in values}
    common: dict[str, Any] = {"model": "logistic", "batch_size": 24, "threads": 1, "steps": 36, "mix": "0.5,0.3,0.2"}
    config = make_config(sets, output, example_ledger=True, **common | values)
    return simulate(config, SimulationSettings(**machines), options)


def accepted_rows(done: Result, batch: int = 8) -> pd.DataFrame:
    """Return worker, step, id and set of each example in accepted gradients, from the ids of the example ledger."""
    assert isinstance(done.output, Path)
    files = sorted((done.output / "examples").iterdir())
    ledger = pd.concat([pq.read_table(file).to_pandas() for file in files])
    pushes = done.pushes()
    pushes = pushes[pushes["accepted"] == 1]
    examples = pushes["examples"].to_numpy()
    # A push may sum the gradients of several mini-batches.
    later = np.concatenate([np.arange(count) // batch for count in examples.tolist()])
    columns = {name: np.repeat(pushes[name].to_numpy(), examples) for name in ("worker", "clock")}
    columns["clock"] += later
    ids = ledger["id"].to_numpy()
    return pd.DataFrame({**columns, "id": ids, "source": sources_of(ids)})


def drawn_sources(done: Result) -> dict[int, np.ndarray]:
    """Return the source of each example of a run, by worker."""
    rows = accepted_rows(done)
    return {worker: rows["source"].to_numpy()[rows["worker"] == worker] for worker in range(3)}


def assert_counted(done: Result, shares: dict[int, list[float]], batch: int = 8) -> None:
    """Check the rows of each set in the result against the ids. shares: what was asked for, by its first step."""
    rows = accepted_rows(done, batch)
    part_of_row = np.searchsorted(list(shares), rows["clock"], side="right") - 1
    assert done.mixture is not None
    assert [part["first_step"] for part in done.mixture] == list(shares)
    for number, (part, asked) in enumerate(zip(done.mixture, shares.values(), strict=True)):
        counts = np.bincount(rows["source"][part_of_row == number], minlength=3)
        assert [each["rows"] for each in part["sets"]] == counts.tolist()
        assert [each["share"] for each in part["sets"]] == pytest.approx(counts / counts.sum())
        assert [each["asked"] for each in part["sets"]] == pytest.approx(asked)
    assert sum(each["rows"] for part in done.mixture for each in part["sets"]) == done.examples


@pytest.mark.parametrize("pair", [{"protocol": "asp"}, {"exchange": "all-reduce"}], ids=["asp", "all-reduce"])
def test_every_worker_of_a_run_has_the_shares(pair: dict[str, Any], sets: str, tmp_path: Path) -> None:
    done = run(sets, tmp_path / "run", **pair)
    for drawn in drawn_sources(done).values():
        assert len(drawn) == 36 * 8
        assert_exact(drawn, SHARES)
    assert_counted(done, {0: SHARES})
    assert replay(done.output).is_equal


WAYS: dict[str, dict[str, Any]] = {
    "refused gradients": {"protocol": "k-batch-bsp"},
    "pushes of several steps": {"protocol": "downpour"},
    "own models": {"exchange": "d-psgd"},
    "killed worker": {"protocol": "asp", "failures": parse_failures("worker:1@0.5+0.5")},
    "killed server": {"protocol": "ssp", "failures": parse_failures("server@1+0.5"), "checkpoint_every_s": 0.4},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_result_counts_the_rows_of_each_set(way: str, sets: str, tmp_path: Path) -> None:
    """Count neither rows of refused gradients nor those of gradients that a roll-back undoes."""
    done = run(sets, tmp_path / "run", profile=parse_profile("lognormal:0.5"), **WAYS[way])
    assert_counted(done, {0: SHARES})
    assert (done.rejected > 0) == (way == "refused gradients")
    assert done.rollbacks == (way == "killed server")


@pytest.mark.usefixtures("undrawn")
def test_the_report_has_the_rows_of_each_set(sets: str, tmp_path: Path) -> None:
    """Resume with other shares: both parts of the run are in the table."""
    run(sets, tmp_path / "run", steps=6, protocol="bsp")
    done = run(sets, tmp_path / "run", RESUME, steps=20, protocol="bsp", mix="1,1,2")
    assert_counted(done, {0: SHARES, 6: [0.25, 0.25, 0.5]})
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    assert done.mixture is not None
    for part in done.mixture:
        for each in part["sets"]:
            figures = (part["first_step"], f"{each['asked']:.2%}", each["rows"], f"{each['share']:.2%}")
            assert [each["shards"], *map(str, figures)] in rows


def cut_in_the_middle(run: Path) -> int:
    """Leave of a run what a kill in its middle leaves, and return the greatest clock of its newest checkpoint."""
    found = versions(run / "checkpoints")
    middle = found[len(found) // 2]
    for later in found:
        if later > middle:
            shutil.rmtree(folder_of(run / "checkpoints", later))
    (run / "result.json").unlink()
    return max(read_state(run / "checkpoints", middle).clocks.values())


@pytest.mark.slow
@pytest.mark.parametrize("pair", [{"protocol": "bsp"}, {"protocol": "asp"}], ids=["bsp", "asp"])
def test_a_resumed_run_keeps_or_changes_its_shares(
    pair: dict[str, Any], sets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune, "__defaults__", (1000, WAITING))
    whole = run(sets, tmp_path / "whole", **pair)
    same = Path(shutil.copytree(tmp_path / "whole", tmp_path / "same"))
    other = Path(shutil.copytree(tmp_path / "whole", tmp_path / "other"))
    clock = cut_in_the_middle(same)
    kept = run(sets, same, RESUME, workers=3, **pair)
    assert all(
        np.array_equal(one, two)
        for one, two in zip(drawn_sources(whole).values(), drawn_sources(kept).values(), strict=True)
    )
    if pair["protocol"] == "bsp":
        assert final(kept).tobytes() == final(whole).tobytes()
    assert cut_in_the_middle(other) == clock
    changed = run(sets, other, RESUME, mix="0.2,0.2,0.6", **pair)
    for drawn in drawn_sources(changed).values():
        assert_exact(drawn[: clock * 8], SHARES)
        assert_exact(drawn[clock * 8 :], [0.2, 0.2, 0.6])
    assert_counted(kept, {0: SHARES})
    assert_counted(changed, {0: SHARES, clock: [0.2, 0.2, 0.6]})
    saved = json.loads((other / "config.json").read_text())["config"]["data"]["mix"]
    assert saved == f"0.5,0.3,0.2;{clock}:0.2,0.2,0.6"
    assert replay(changed.output).is_equal


IN_STEP: list[dict[str, Any]] = [{"protocol": "bsp"}, {"exchange": "all-reduce"}, {"exchange": "matcha"}]
OTHER_WAYS: list[dict[str, Any]] = [*IN_STEP, {"protocol": "asp"}, {"protocol": "ssp"}, {"protocol": "k-asp"}]


@pytest.mark.parametrize("way", only(OTHER_WAYS[3:4], OTHER_WAYS), ids=str)
def test_other_workers_complete_the_passes_of_each_set(
    way: dict[str, Any], sets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill workers at steps of their own, and change shares with the workers: each row is drawn once per pass of its set."""
    monkeypatch.setattr(prune, "__defaults__", (1000, WAITING))
    values = way | {"profile": parse_profile("lognormal:0.5"), "checkpoint_every_s": 0.4}
    values |= {} if way in IN_STEP else {"stop": "local"}
    output = tmp_path / "run"
    run(sets, output, **values)
    clock = cut_in_the_middle(output)
    run(sets, output, RESUME, workers=5, steps=30, batch_size=30, **values)
    done = run(sets, output, RESUME, workers=2, steps=50, batch_size=30, mix="1,1,2", **values)
    entries = json.loads((output / "config.json").read_text())["config"]["cohorts"]["entries"]
    first, second, third = (entry["clock"] for entry in entries)
    assert (first, second, [entry["left_out"] for entry in entries]) == (0, clock, [0, 0, 0])
    rows = accepted_rows(done, 100)
    for source in range(3):
        counts = np.unique(rows["id"][rows["source"] == source], return_counts=True)[1]
        assert len(counts) == 3 * (40, 20, 50)[source]
        assert np.ptp(counts) <= 1
    for (begin, end), workers, shares in (
        ((0, second), 3, SHARES),
        ((second, third), 5, SHARES),
        ((third, 1000), 2, [0.25, 0.25, 0.5]),
    ):
        part = rows[(rows["clock"] >= begin) & (rows["clock"] < end)]
        assert sorted(part["worker"].unique()) == list(range(workers))
        for worker in range(workers):
            assert_exact(part["source"].to_numpy()[part["worker"] == worker], shares)
    assert_counted(done, {0: SHARES, third: [0.25, 0.25, 0.5]}, batch=100)
    assert replay(done.output).is_equal


# The sets


def test_a_mixture_has_the_rows_of_its_sets(sets: str, tmp_path: Path) -> None:
    """A mixture gives each set ids of its own, has one mean, and its digest does not depend on the folder."""
    uris = sets.split(SEPARATOR)
    mixed = open_mixture(uris)
    parts = [open_shards(uri) for uri in uris]
    assert mixed.rows == 3 * (40 + 20 + 50)
    for worker in range(3):
        rows = load_worker(mixed, worker)
        assert len(set(rows.ids.tolist())) == len(rows) == 110
        for number, part in enumerate(parts):
            own = load_worker(part, worker)
            is_own = sources_of(rows.ids) == number
            assert np.array_equal(rows.images_NCHW[is_own], own.images_NCHW)
            assert np.array_equal(rows.ids[is_own], own.ids + (number << 40))
    evaluation = load_eval(mixed)
    assert evaluation is not None
    assert len(evaluation) == 2 * len(EVAL_ROWS)
    copies = [str(shutil.copytree(uri, tmp_path / str(number))) for number, uri in enumerate(uris)]
    assert open_mixture(copies).digest == mixed.digest
    assert open_mixture(copies[::-1]).digest != mixed.digest


@pytest.mark.parametrize("places", [("a", "b"), ("a", "a/b"), ("a/b", "a")])
@pytest.mark.parametrize("is_bare", [True, False])
def test_sets_with_equal_or_nested_roots_stay_apart(places: tuple[str, str], is_bare: bool, tmp_path: Path) -> None:
    """Mix sets of one worker, committed ones or their only shards."""
    folders = [write_shards(tmp_path / place, [rows_of(9, seed)], None) for seed, place in enumerate(places)]
    if is_bare:
        for folder in folders:
            write_bare_shard(folder / "part.parquet", 0, 9)
            (folder / "manifest.json").unlink()
    ids = load_worker(open_mixture([str(folder) for folder in folders]), 0).ids
    assert sources_of(ids).tolist() == [0] * 9 + [1] * 9


def test_a_mixture_reads_by_the_store_of_a_remote_set(sets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    local, remote = (open_shards(uri) for uri in sets.split(SEPARATOR)[:2])
    remote = replace(remote, store=Store((("key", "value"),)), uri="s3://bucket/set")
    monkeypatch.setattr(mixture, "open_shards", lambda uri, **_: remote if is_remote(uri) else local)
    assert open_mixture([local.uri, remote.uri]).store is remote.store


def test_sets_that_cannot_be_mixed_are_one_line(sets: str, tmp_path: Path) -> None:
    first = sets.split(SEPARATOR)[0]
    two = str(write_shards(tmp_path, [rows_of(9, 1), rows_of(9, 2, 50)], None))
    for uris, line in (
        ([first, two], "differ in workers, 3 and 2"),
        ([first, first], "have the same rows, .*: name each set once, with the sum of its shares"),
        ([two, first, first], "have the same rows"),
    ):
        with pytest.raises(UsageError, match=line) as error:
            open_mixture(uris)
        assert "\n" not in str(error.value)
    with pytest.raises(
        UsageError, match=r"no Parquet file, and no folder with any; .* or --mix, the share of each set"
    ):
        open_pinned(make_config(sets).data)


def test_a_process_of_a_run_lists_no_files_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start has listed a folder for each worker, and every file is checked when it is read."""
    sets = [write_shards(tmp_path / name, [rows_of(20, 1)], EVAL_ROWS) for name in "ab"]
    for data in (make_config(sets[0]).data, make_config(SEPARATOR.join(map(str, sets)), mix="1,1").data):
        digest = open_pinned(data).digest
        with monkeypatch.context() as patch:
            patch.setattr("trainer.data.opening.missing_file", lambda *_: "a file is missing")
            assert open_pinned(data, digest=digest).digest == digest
            with pytest.raises(DataError, match=r"^a file is missing: the set is damaged"):
                open_pinned(data)


def config_from(*words: str) -> Config:
    return config_of(command_line.parse(build_parser(), ["--output", "o", "--steps", "3", *words]))


def test_flags_name_several_sets(tmp_path: Path) -> None:
    config = config_from("--shards", str(tmp_path / "a"), "hdfs://h:1/b", "--mix", "1,3")
    assert config.data.shards == f"{tmp_path / 'a'}{SEPARATOR}hdfs://h:1/b"
    assert Config.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert "--mix" not in config.essentials(), "a resumed run may change it"
    assert config_from("--shards", "/a").data.shards == "/a"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--mix", "1,2,3"), "give as many shares as --shards names sets, 2"),
        (("--mix", "1,0"), "--mix must be positive shares"),
        (("--mix", "1,2", "--sampling", "balanced"), "leave out --sampling balanced"),
        (("--mix", "1,2", "--follow"), "leave out --follow"),
    ],
)
def test_a_mixture_that_cannot_be_is_one_line(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(UsageError, match=line) as error:
        config_from("--shards", "/a", "/b", *words)
    assert "\n" not in str(error.value)


def test_a_worker_without_rows_of_a_set_is_refused() -> None:
    population, sources = population_of([5, 4])
    with pytest.raises(UsageError, match="worker 2 has no rows of set 2"):
        mixture_stream(parse_mix("1,1,1"), replace(population), sources)
