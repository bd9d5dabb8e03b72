"""The ledger of a study: whole lines only, one a run, of one plan and one data set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import DataError, UsageError
from tests.made_up_study import make_plan, make_records, normal
from trainer.study.ledger import Ledger, environments, run_of
from trainer.study.runner import batches, claim, cost_class, duration, remaining_s
from trainer.study.sets import SetKey

DRAW = normal({"random": 0.01, "stratified": 0.01})


def filled(path: Path, count: int | None = None, **changes: object) -> Ledger:
    ledger = Ledger(path)
    for record in make_records(make_plan(), DRAW, **changes)[:count]:
        ledger.append(record)
    return ledger


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    written = filled(tmp_path / "l")
    assert Ledger(tmp_path / "l").records == written.records
    plan = make_plan(seeds=3)
    assert [str(run_of(record)) for record in written.of_plan(plan)] == [str(run) for run in plan.runs()]


@pytest.mark.parametrize("cut", [1, 5, 200])
def test_a_line_that_a_killed_process_did_not_finish_is_no_run(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "l"
    filled(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    ledger = Ledger(path)
    assert len(ledger.records) == 2
    record = make_records(make_plan(), DRAW)[2]
    ledger.append(record)
    assert path.read_bytes() == whole


def test_a_line_that_is_none_is_broken_data(tmp_path: Path) -> None:
    path = tmp_path / "l"
    filled(path, 2)
    path.write_bytes(path.read_bytes() + b'{"run": 3}\n')
    with pytest.raises(DataError, match="line 3 is no line of a ledger"):
        Ledger(path)


def test_two_hosts_ledgers_become_one(tmp_path: Path) -> None:
    whole = filled(tmp_path / "whole")
    records = list(whole.records.values())
    one, two = Ledger(tmp_path / "one"), Ledger(tmp_path / "two")
    for at, record in enumerate(records):
        (one if at % 2 else two).append(record)
    two.append(records[1])  # both did it, with the same end
    assert one.merge(two, make_plan()) == len(records) // 2
    assert one.records == whole.records
    assert Ledger(tmp_path / "one").records == whole.records
    assert one.merge(two, make_plan()) == 0


def test_a_run_that_ended_otherwise_elsewhere_is_refused_and_nothing_is_taken(tmp_path: Path) -> None:
    one, two = filled(tmp_path / "one", 3), Ledger(tmp_path / "two")
    for record in make_records(make_plan(), normal({"random": 0.01, "stratified": 0.01}, seed=5)):
        two.append(record)
    before = (tmp_path / "one").read_bytes()
    with pytest.raises(DataError, match="with other final_accuracy"):
        one.merge(two, make_plan())
    assert (tmp_path / "one").read_bytes() == before


def test_a_ledger_of_another_plan_is_refused(tmp_path: Path) -> None:
    one, two = filled(tmp_path / "one", 1), filled(tmp_path / "two")
    with pytest.raises(UsageError, match="which the plan has not"):
        one.merge(two, make_plan(("random",)))


@pytest.mark.parametrize("side", ["train", "eval"])
def test_other_data_than_before_are_refused(side: str, tmp_path: Path) -> None:
    ledger = filled(tmp_path / "l", 4)
    record = make_records(make_plan(), DRAW)[4]
    with pytest.raises(DataError, match=f"is of other {side} images than made-up/random/cnn/asp/0"):
        ledger.append(record | {"data": record["data"] | {side: "other"}})


def test_machines_are_told_once_each(tmp_path: Path) -> None:
    first = make_records(make_plan(), DRAW)
    second = make_records(make_plan(), DRAW, environment={"torch": "3"})
    assert environments([*first, *second]) == [first[0]["environment"], {"torch": "3"}]


def test_a_folder_belongs_to_a_plan_whatever_its_seeds_and_places(tmp_path: Path) -> None:
    claim(make_plan(seeds=2), tmp_path)
    claim(make_plan(seeds=50, title="another title"), tmp_path)
    claim(make_plan(datasets={"made-up": {"input": "elsewhere"}}), tmp_path)
    claim(make_plan(("random", "stratified", "round_robin")), tmp_path)  # one more way to compare


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"workers": 4}, "workers was 12, now 4"),
        ({"training": {"epochs": 4}}, "training.epochs was 3, now 4"),
        ({"training": {"epochs": 3, "batch_size": 60}}, "training had no batch_size"),
        ({"ways": ("random",)}, "shardings.stratified is not in this one"),
        ({"models": {"cnn": {"model": "cnn", "norm": "group"}}}, "models.cnn had no norm"),
        ({"vary": ["model"]}, 'vary was ["model", "order", "schedule", "sharding"], now ["model"]'),
        ({"datasets": {"made-up": {"input": "nowhere", "shrink": 2}}}, "datasets.made-up had no shrink"),
    ],
)
def test_the_folder_of_another_plan_is_refused_with_what_differs(
    values: dict[str, object], said: str, tmp_path: Path
) -> None:
    claim(make_plan(), tmp_path)
    before = (tmp_path / "plan.json").read_bytes()
    with pytest.raises(UsageError) as raised:
        claim(make_plan(**values), tmp_path)  # type: ignore[arg-type]
    assert "is the study of another plan: " + said in str(raised.value)
    assert (tmp_path / "plan.json").read_bytes() == before


def test_a_default_that_changed_since_is_another_plan(tmp_path: Path) -> None:
    claim(make_plan(), tmp_path)
    stored = json.loads((tmp_path / "plan.json").read_bytes())
    stored["training"]["made-up/random/cnn/asp"]["--learning-rate"] = 0.5
    (tmp_path / "plan.json").write_text(json.dumps(stored))
    with pytest.raises(UsageError, match=r"--learning-rate was 0.5, now 0.01"):
        claim(make_plan(), tmp_path)


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds other files"):
        claim(make_plan(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_damaged_plan_is_broken_data(tmp_path: Path) -> None:
    claim(make_plan(), tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(DataError, match=r"plan.json is damaged"):
        claim(make_plan(), tmp_path)


def test_the_end_is_told_by_what_runs_of_a_kind_took() -> None:
    plan = make_plan(models={"cnn": {"model": "cnn"}, "big": {"model": "resnet20"}}, seeds=1)
    runs = list(plan.runs())
    assert {cost_class(run) for run in runs} == {"made-up/cnn", "made-up/big"}
    took = {"made-up/cnn": [10.0, 20.0], "made-up/big": [100.0]}
    assert remaining_s(runs, took, 2) == (2 * 15 + 2 * 100) / 2
    assert remaining_s(runs, {"made-up/cnn": [10.0]}, 1) == 40  # of the others nothing is known
    assert remaining_s(runs, {}, 1) == 0
    assert [duration(s) for s in (7300, 119, 20)] == ["about 2 h 02 min", "about 2 min", "less than a minute"]


def test_sets_are_made_some_at_a_time() -> None:
    runs = list(make_plan(seeds=5).runs())
    grouped = {SetKey("made-up", "random", at): [run] for at, run in enumerate(runs)}
    parts = list(batches(grouped, 4))
    assert [len(part) for part in parts] == [4, 4, 2]
    assert {key: value for part in parts for key, value in part.items()} == grouped
