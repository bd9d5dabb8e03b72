"""The ledger of a study: whole lines only, one a run, of one plan and one data set."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.contract import Manifest
from tests.support.made_up_study import make_plan, make_records, normal
from tests.unit.test_quality import commit, make_images, measured
from trainer.study.check import RESULTS
from trainer.study.plan.study_plan import Run, StudyPlan
from trainer.study.run.ledger import Contents, StudyLedger, dumps, environments, parse, run_of
from trainer.study.run.runner import batches
from trainer.study.run.sets import SetKey, facts_of

DRAW = normal({"random": 0.01, "stratified": 0.01})


def contents_of(ledger: StudyLedger) -> Contents:
    """As a study has it whose shards all change with the seed."""
    return Contents(ledger.records.values(), lambda run: ("given", str(run.seed)))


def merge(mine: StudyLedger, other: StudyLedger, plan: StudyPlan) -> int:
    return mine.merge(other, plan, contents_of(mine))


def filled(path: Path, count: int | None = None, **changes: object) -> StudyLedger:
    ledger = StudyLedger(path)
    for record in make_records(make_plan(), DRAW, **changes)[:count]:
        ledger.append(record)
    return ledger


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    written = filled(tmp_path / "l")
    assert StudyLedger(tmp_path / "l").records == written.records
    plan = make_plan(seeds=3)
    assert [str(run_of(record)) for record in written.records_of_plan(plan)] == [str(run) for run in plan.runs()]


def test_a_line_from_before_there_were_variants_has_none() -> None:
    line = next((RESULTS / "sharding-long" / "ledger.jsonl").open("rb"))
    run = run_of(parse(line))
    assert (run.cell.protocol, run.cell.variant, run.seed) == ("asp", "", 0)
    assert str(run) == "cifar10-16x16/random/cnn/asp/0"


def test_a_run_of_a_variant_is_read_back(tmp_path: Path) -> None:
    plan = make_plan(seeds=2, variants={"few": {"workers": 2}, "many": {"workers": 8}})
    for record in make_records(plan, DRAW):
        StudyLedger(tmp_path / "l").append(record)
    assert [run_of(record) for record in StudyLedger(tmp_path / "l").records_of_plan(plan)] == list(plan.runs())


@pytest.mark.parametrize("cut", [1, 5, 200])
def test_a_line_that_a_killed_process_did_not_finish_is_no_run(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "l"
    filled(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    ledger = StudyLedger(path, owned=True)
    assert len(ledger.records) == 2
    record = make_records(make_plan(), DRAW)[2]
    ledger.append(record)
    assert path.read_bytes() == whole


def test_a_line_that_is_none_is_broken_data(tmp_path: Path) -> None:
    path = tmp_path / "l"
    filled(path, 2)
    path.write_bytes(path.read_bytes() + b'{"run": 3}\n')
    with pytest.raises(DataError, match="line 3 is no line of a ledger"):
        StudyLedger(path)


DAMAGES: list[dict[str, object]] = [
    {"data": {}},
    {"curve": {"epoch": [1, 2], "accuracy": [0.5]}},
    {"curve": {"epoch": [1], "accuracy": ["half"]}},
    {"curve": {"epoch": [1], "accuracy": [0.5], "train_loss": ["low"]}},
    {"curve": 3},
    {"sharding": {"mmd_ratio": "x"}},
    {"sharding": {"class_counts": [1, 2]}},
    {"sharding": {"shard_counts": [[1, 2, 3, 4, 5], [1, 2]]}},
    {"sharding": {"shard_counts": 5}},
    {"staleness": "x"},
    {"wall_s": None},
    {"seeds": {"model": 99}},
    {"failed": "it diverged"},
    {"final_accuracy": None},
    {"final_accuracy": 1.5},
    {"predictions": "not packed"},
    {"predictions": 3},
    {"class_accuracy": ["x"]},
    {"neighbourhoods": {"rows": [1], "accuracy": []}},
    {"curve": {"epoch": [1], "accuracy": [0.5], "sent_bytes": []}},
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_line_with_what_no_run_wrote_is_broken_data(damage: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "l"
    whole = filled(path, 2)
    line = dumps(list(whole.records.values())[1] | damage)
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0] + line)
    with pytest.raises(DataError, match="line 2 is no line of a ledger"):
        StudyLedger(path)


def test_a_line_without_what_every_run_writes_is_broken_data(tmp_path: Path) -> None:
    path = tmp_path / "l"
    record = next(iter(filled(path, 1).records.values()))
    for key in ("run", "seeds", "data", "shards", "sharding", "wall_s", "failed", "curve", "parameters", "staleness"):
        path.write_bytes(dumps({name: value for name, value in record.items() if name != key}))
        with pytest.raises(DataError, match="line 1 is no line of a ledger"):
            StudyLedger(path)
    path.write_bytes(b"[" * 100_000 + b"\n")
    with pytest.raises(DataError, match="line 1 is no line of a ledger"):
        StudyLedger(path)


def test_a_run_on_real_targets_has_no_accuracy(tmp_path: Path) -> None:
    curve = {"epoch": [1, 2], "accuracy": [None, None], "loss": [2.0, 1.0]}
    nothing = dict.fromkeys(("final_accuracy", "best_accuracy", "train_accuracy"))
    filled(tmp_path / "l", 2, **nothing, curve=curve)
    for record in StudyLedger(tmp_path / "l").records.values():
        assert (record["final_accuracy"], record["failed"], record["curve"]) == (None, None, curve)


@pytest.mark.parametrize(
    ("workers", "classes", "missing"),
    [(1, 4, {"mmd_ratio", "mean_ratio", "chi_square"}), (2, 1, {"chi_square"}), (2, 4, set())],
)
def test_facts_about_classes_need_several_shards_and_classes(
    tmp_path: Path, workers: int, classes: int, missing: set[str]
) -> None:
    """Leave out what a single shard or a single class does not have."""
    images, labels = make_images(40)
    manifest = commit(tmp_path, images, labels % classes, np.arange(40) % workers, workers)
    quality = measured(tmp_path, manifest).to_dict()
    facts = facts_of(Manifest.from_json(manifest), json.loads(json.dumps(quality)))
    assert (quality["classes"] is None) == ("chi_square" in missing)
    assert {name for name in ("mmd_ratio", "mean_ratio", "chi_square") if facts.get(name) is None} == missing
    of_classes = {"chi_square", "cramers_v", "class_counts", "shard_counts"}
    assert of_classes & facts.keys() == (set() if "chi_square" in missing else of_classes)
    [record] = make_records(make_plan(("random",), seeds=1), lambda _: 0.5, sharding=facts)
    assert parse(dumps(record))["sharding"] == facts


def test_two_hosts_ledgers_become_one(tmp_path: Path) -> None:
    whole = filled(tmp_path / "whole")
    records = list(whole.records.values())
    one, two = StudyLedger(tmp_path / "one"), StudyLedger(tmp_path / "two")
    for at, record in enumerate(records):
        (one if at % 2 else two).append(record)
    two.append(records[1])  # both did it, with the same end
    assert merge(one, two, make_plan()) == len(records) // 2
    assert one.records == whole.records
    assert StudyLedger(tmp_path / "one").records == whole.records
    assert merge(one, two, make_plan()) == 0


def test_a_run_with_another_result_elsewhere_is_refused(tmp_path: Path) -> None:
    """A run that ended otherwise elsewhere is refused and nothing is taken."""
    one, two = filled(tmp_path / "one", 3), StudyLedger(tmp_path / "two")
    for record in make_records(make_plan(), normal({"random": 0.01, "stratified": 0.01}, seed=5)):
        two.append(record)
    before = (tmp_path / "one").read_bytes()
    with pytest.raises(
        DataError, match=r"with other final_accuracy: .* \(unknown processor, torch 2\) and .*seeds of its own"
    ):
        merge(one, two, make_plan())
    assert (tmp_path / "one").read_bytes() == before


def test_a_ledger_of_another_plan_is_refused(tmp_path: Path) -> None:
    one, two = filled(tmp_path / "one", 1), filled(tmp_path / "two")
    with pytest.raises(UsageError, match="which the plan has not"):
        merge(one, two, make_plan(("random",)))


@pytest.mark.parametrize(("side", "words"), [("train", "training images"), ("eval", "evaluation images")])
def test_other_data_than_before_are_refused_for_any_sharding(side: str, words: str, tmp_path: Path) -> None:
    """Other data than before are refused whatever the way of sharding."""
    ledger = filled(tmp_path / "l", 4)
    record = make_records(make_plan(), DRAW)[5]
    with pytest.raises(DataError, match=f"has other {words} than made-up/random/cnn/asp/0"):
        contents_of(ledger).add(record | {"data": record["data"] | {side: "other"}})
    two, before = filled(tmp_path / "m"), (tmp_path / "l").read_bytes()
    two.records[record["run"]]["data"][side] = "other"
    with pytest.raises(DataError, match=words):
        merge(ledger, two, make_plan())
    assert (tmp_path / "l").read_bytes() == before


def test_rows_in_another_order_may_have_another_fingerprint(tmp_path: Path) -> None:
    """The fingerprint is over ids too."""
    records = make_records(make_plan(), DRAW)
    for record in records:
        record["data"] = {"train": f"of {run_of(record).cell.sharding}", "eval": "e"}
    Contents(records, lambda run: (run.cell.sharding, str(run.seed)))
    with pytest.raises(DataError, match="training images"):
        Contents(records, lambda run: ("given", str(run.seed)))


def test_shards_that_no_seed_changes_are_the_same_in_every_run() -> None:
    """A ready set that was changed for another, or one that was made again otherwise."""
    records = make_records(make_plan(), DRAW)
    with pytest.raises(DataError, match=r"has other shards than made-up/random/cnn/asp/0 \(random-1 and random-0\)"):
        Contents(records, lambda run: ("ready", "None"))


@pytest.mark.parametrize(
    "change",
    [
        {"final_accuracy": "high"},
        {"final_accuracy": 7.5},
        {"final_accuracy": float("nan")},
        {"environment": None},
        {"data": 3},
        {"run": "a/b/c/d"},
    ],
)
def test_a_line_that_no_run_wrote_is_broken_data(change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "l"
    filled(path, 1)
    path.write_text(path.read_text() + json.dumps(make_records(make_plan(), DRAW)[1] | change) + "\n")
    with pytest.raises(DataError, match="line 2 is no line of a ledger"):
        StudyLedger(path)


def test_a_run_that_is_there_twice_must_have_ended_alike(tmp_path: Path) -> None:
    path = tmp_path / "l"
    filled(path, 2)
    first = path.read_text().splitlines()[0]
    path.write_text(path.read_text() + first + "\n")
    assert len(StudyLedger(path).records) == 2
    path.write_text(path.read_text() + json.dumps(json.loads(first) | {"parameters": "other"}) + "\n")
    with pytest.raises(DataError, match="line 4 has the run made-up/random/cnn/asp/0 again, with another end"):
        StudyLedger(path)


def test_only_the_owner_of_a_ledger_cuts_an_unfinished_line_off(tmp_path: Path) -> None:
    """Another study may read it while its own writes."""
    path = tmp_path / "l"
    filled(path, 2)
    torn = path.read_bytes() + b'{"run":"made-up/ra'
    path.write_bytes(torn)
    assert len(StudyLedger(path).records) == 2
    assert path.read_bytes() == torn
    assert len(StudyLedger(path, owned=True).records) == 2
    assert len(path.read_bytes()) < len(torn)


def test_machines_are_told_once_each(tmp_path: Path) -> None:
    first = make_records(make_plan(), DRAW)
    second = make_records(make_plan(), DRAW, environment={"torch": "3"})
    assert environments([*first, *second]) == [
        (first[0]["environment"], len(first)),
        ({"torch": "3"}, len(second)),
    ]


def test_runs_go_in_their_order_some_sets_at_a_time() -> None:
    """Where one set serves all seeds of a member, that member is no farther than the others."""
    runs = list(make_plan(seeds=5).runs())

    def key(run: Run) -> SetKey:
        return SetKey("made-up", run.cell.sharding, run.seed if run.cell.sharding == "random" else None, 12)

    parts = list(batches(runs, key, 3))
    assert [run for part in parts for run in part] == runs
    assert [len(set(map(key, part))) for part in parts] == [3, 3, 2]
    assert list(batches([], key, 3)) == []


def test_merging_keeps_the_own_results_of_real_processes(tmp_path: Path) -> None:
    """Runs on real processes end otherwise on every host and ones own stay."""
    one, two = filled(tmp_path / "one", 3), StudyLedger(tmp_path / "two")
    for record in make_records(make_plan(backend="processes"), normal({"random": 0.01, "stratified": 0.01}, seed=5)):
        two.append(record)
    before = dict(one.records)
    assert merge(one, two, make_plan(backend="processes")) == 7
    assert {name: one.records[name] for name in before} == before
    changed = make_records(make_plan(), DRAW)[0]
    two.records[changed["run"]] = changed | {"shards": "others"}
    with pytest.raises(DataError, match="with other shards"):
        merge(one, two, make_plan(backend="processes"))
