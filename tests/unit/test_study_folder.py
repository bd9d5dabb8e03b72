"""The folder of a study: of one plan, whose every default it keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import DataError, UsageError
from tests.support.made_up_study import ledger_of, make_plan, make_records, normal
from trainer.study.plan.cases import sources
from trainer.study.plan.study_plan import StudyPlan
from trainer.study.report.write import write_report
from trainer.study.run import runner
from trainer.study.run.children import run_child
from trainer.study.run.folder import claim_folder, refuse_other_plan
from trainer.study.run.prepared import PREPARED, read_prepared, write_prepared
from trainer.study.run.sets import Sets

DRAW = normal({"random": 0.01, "stratified": 0.01})


def test_a_folder_belongs_to_a_plan_whatever_its_seeds_and_places(tmp_path: Path) -> None:
    claim_folder(make_plan(seeds=2), tmp_path)
    claim_folder(make_plan(seeds=50, title="another title"), tmp_path)
    claim_folder(make_plan(datasets={"made-up": {"input": "elsewhere"}}), tmp_path)
    claim_folder(make_plan(("random", "stratified", "round_robin")), tmp_path)  # one more way to compare


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
    claim_folder(make_plan(), tmp_path)
    before = (tmp_path / "plan.json").read_bytes()
    with pytest.raises(UsageError) as raised:
        claim_folder(make_plan(**values), tmp_path)  # type: ignore[arg-type]
    assert "is the study of another plan: " + said in str(raised.value)
    assert (tmp_path / "plan.json").read_bytes() == before


@pytest.mark.parametrize(
    ("values", "read", "place"),
    [
        ({"shardings": {"x": {"strategy": "random", "foo": 1}}}, Sets, "[shardings.x]"),
        ({"shardings": {"x": {"strategy": "random", "foo": 1}}}, refuse_other_plan, "[shardings.x]"),
        ({"training": {"epochs": 3, "foo": 1}}, refuse_other_plan, "made-up/random/cnn/asp"),
    ],
)
def test_a_wrong_flag_is_named_with_its_place_in_the_plan(
    values: dict[str, Any], read: Callable[[StudyPlan, Path], object], place: str, tmp_path: Path
) -> None:
    """Flags are read before they are checked: for the names of sets, and to compare the plan with the folder's."""
    claim_folder(make_plan(), tmp_path)
    with pytest.raises(UsageError) as raised:
        read(make_plan(**values), tmp_path)
    assert str(raised.value) == f"{place}: foo = 1: there is no such flag"


def test_crossed_sets_are_neither_added_nor_removed(tmp_path: Path) -> None:
    claim_folder(make_plan(), tmp_path / "plain")
    with pytest.raises(UsageError, match="is the study of another plan: sets was 0, now 3"):
        claim_folder(make_plan(sets=3), tmp_path / "plain")
    claim_folder(make_plan(sets=3), tmp_path / "crossed")
    claim_folder(make_plan(sets=3), tmp_path / "crossed")
    with pytest.raises(UsageError, match="is the study of another plan: sets was 3, now 0"):
        claim_folder(make_plan(), tmp_path / "crossed")


def test_a_part_of_a_plan_may_be_merged_and_another_plan_not(tmp_path: Path) -> None:
    claim_folder(make_plan(("random",), seeds=[7]), tmp_path)
    refuse_other_plan(make_plan(("random", "stratified")), tmp_path)
    with pytest.raises(UsageError, match=r"is the study of another plan: .*training.epochs was 3, now 4"):
        refuse_other_plan(make_plan(training={"epochs": 4}), tmp_path)
    with pytest.raises(UsageError, match="it is no study's folder"):
        refuse_other_plan(make_plan(), tmp_path / "nowhere")


def test_a_default_that_changed_since_is_another_plan(tmp_path: Path) -> None:
    claim_folder(make_plan(), tmp_path)
    stored = json.loads((tmp_path / "plan.json").read_bytes())
    stored["training"]["made-up/random/cnn/asp"]["--learning-rate"] = 0.5
    (tmp_path / "plan.json").write_text(json.dumps(stored))
    with pytest.raises(UsageError, match=r"--learning-rate was 0.5, now 0.01"):
        claim_folder(make_plan(), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("part", "name", "key", "value", "said"),
    [
        ("strategies", "stratified", "start", "carry", 'strategies.stratified.start was "carry", now "zero"'),
        ("simulations", "made-up/random/cnn/asp", "step_ms", 50, "asp.step_ms was 50, now 100.0"),
    ],
)
def test_so_is_one_of_a_strategy_or_of_virtual_time(
    part: str, name: str, key: str, value: object, said: str, tmp_path: Path
) -> None:
    claim_folder(make_plan(), tmp_path)
    stored = json.loads((tmp_path / "plan.json").read_bytes())
    stored[part][name][key] = value
    (tmp_path / "plan.json").write_text(json.dumps(stored))
    with pytest.raises(UsageError, match=said):
        claim_folder(make_plan(), tmp_path)
    del stored[part]  # as studies of older versions have it
    (tmp_path / "plan.json").write_text(json.dumps(stored))
    claim_folder(make_plan(), tmp_path)
    assert part in json.loads((tmp_path / "plan.json").read_bytes())


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds other files"):
        claim_folder(make_plan(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_protocol_with_a_time_of_its_own_is_added_in_any_place(tmp_path: Path) -> None:
    slow = {"slow": {"protocol": "asp", "step_ms": 50}}
    claim_folder(make_plan(), tmp_path)
    claim_folder(make_plan(protocols=slow | {"asp": {"protocol": "asp"}}), tmp_path)


@pytest.mark.slow
def test_an_edited_file_of_a_flag_is_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that a flag names and that was edited since is another plan."""
    monkeypatch.chdir(tmp_path)
    plan = make_plan(models={"mine": {"model": "my_net:make"}})
    Path("my_net.py").write_text("def make(shape, classes): ...")
    claim_folder(plan, tmp_path / "study")
    claim_folder(plan, tmp_path / "study")
    Path("my_net.py").write_text("def make(shape, classes): ...  # another")
    with pytest.raises(UsageError, match=r"is the study of another plan: sources.models.mine.model was "):
        claim_folder(plan, tmp_path / "study")
    Path("my_net.py").rename("moved")  # such as on a host that only merges
    refuse_other_plan(plan, tmp_path / "study")


def test_an_example_table_of_several_files_is_part_of_a_plan(tmp_path: Path) -> None:
    ledger = tmp_path / "examples"
    ledger.mkdir()
    (ledger / "1.parquet").write_bytes(b"1")
    plan = make_plan(variants={"hard": {"sampling": "curriculum", "example_table": str(ledger)}})
    digests = [sources(plan)]
    (ledger / "notes.txt").write_text("of no run")
    assert sources(plan) == digests[0]
    assert list(digests[0]) == ["variants.hard.example_table"]
    for name, content in (("1.parquet", b"2"), ("2.parquet", b"3")):
        (ledger / name).write_bytes(content)
        digests.append(sources(plan))
    assert len({*map(str, digests)}) == 3


@pytest.mark.parametrize("older", [False, True])
def test_a_study_with_an_example_table_moves_to_other_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, older: bool
) -> None:
    """The table is named relative to the current directory, which differs between checkouts and hosts."""
    plan = make_plan(variants={"hard": {"sampling": "curriculum", "example_table": "losses.parquet"}})
    for place in ("one", "other"):
        (tmp_path / place).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    claim_folder(plan, tmp_path / "study")
    content = (tmp_path / "study/plan.json").read_text()
    assert str(tmp_path) not in content
    if older:  # as older versions wrote it
        stored = json.loads(content)
        for flags in stored["training"].values():
            flags["--example-table"] = str(tmp_path / "one/losses.parquet")
        (tmp_path / "study/plan.json").write_text(json.dumps(stored))
    monkeypatch.chdir(tmp_path / "other")
    claim_folder(plan, tmp_path / "study")


@pytest.mark.slow
@pytest.mark.parametrize("tests", [3, {"margin": "x"}, {"baseline": None}, {"colour": "red"}])
def test_tests_that_no_study_began_with_are_broken_data(tests: object, tmp_path: Path) -> None:
    claim_folder(make_plan(), tmp_path)
    stored = json.loads((tmp_path / "plan.json").read_bytes())
    (tmp_path / "plan.json").write_text(json.dumps(stored | {"tests": tests}))
    with pytest.raises(DataError, match=r"plan.json is damaged"):
        claim_folder(make_plan(), tmp_path)


def test_a_damaged_plan_is_broken_data(tmp_path: Path) -> None:
    claim_folder(make_plan(), tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(DataError, match=r"plan.json is damaged"):
        claim_folder(make_plan(), tmp_path)


@pytest.mark.full
def test_every_report_names_a_test_that_was_changed_later(tmp_path: Path) -> None:
    """A test that was changed after the study began is in every report."""

    def told(plan: StudyPlan) -> list[str]:
        claim_folder(plan, tmp_path)
        text = write_report(plan, tmp_path, ledger_of(tmp_path, make_records(plan, DRAW)))
        for name in ("README.md", "report.html"):
            assert ("is chosen after seeing results" in (tmp_path / name).read_text()) == (
                "is chosen after seeing results" in text
            )
        return [line for line in text.splitlines() if "at first and is" in line]

    assert told(make_plan()) == []
    for _ in range(2):
        assert told(make_plan(margin=0.02)) == [
            "The margin was 0.005 at first and is 0.02 now: a test that is chosen after seeing results proves less."
        ]
    assert told(make_plan()) == []
    assert len(told(make_plan(margin=0.02, baseline="stratified"))) == 2


def test_runs_of_edited_code_load_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork executes the code that was loaded before, and the record has the digest of the files."""
    for name in ("run_forked", "run_child"):
        monkeypatch.setattr(runner, name, lambda *_, name=name, **__: (0, name))
    study = runner.Runner(make_plan(), tmp_path, 1, print)
    assert study.execute({}, tmp_path / "log") == (0, "run_forked")
    monkeypatch.setattr(runner, "code_digest", lambda: "another")
    assert study.execute({}, tmp_path / "log") == (0, "run_child")


@pytest.mark.slow
def test_a_process_of_its_own_tells_of_a_failure_in_a_line() -> None:
    plan = make_plan()
    task = {"plan": asdict(plan) | {"workers": 0}, "cell": next(iter(plan.runs())).cell, "seed": 0}
    code, line = run_child("trainer.study.run.measure", task | dict.fromkeys(("shards", "folder", "record"), "none"))
    assert code == UsageError.exit_code
    assert "workers" in line


def test_prepared_sets_are_added_to_those_recorded_before(tmp_path: Path) -> None:
    sets = {name: {"train": name, "eval": "e", "shards": "s"} for name in ("a", "b")}
    assert read_prepared(tmp_path) == {}
    for name in sets:
        write_prepared(tmp_path, {name: sets[name]})
    assert read_prepared(tmp_path) == sets


def test_a_deleted_prepared_set_needs_its_data_set_again(tmp_path: Path) -> None:
    """Unless all runs on it are in the ledger: sets are deleted after their last run."""
    plan = make_plan(("random",), seeds=1)
    runs = list(plan.runs())
    key = str(Sets(plan, tmp_path).key(runs[0]))
    write_prepared(tmp_path, {key: {"train": "t", "eval": "e", "shards": "s"}})
    assert Sets(plan, tmp_path).prepared_datasets(runs, runs) == set()
    assert Sets(plan, tmp_path).prepared_datasets(runs, []) == {"made-up"}
    (tmp_path / "sets" / key).mkdir(parents=True)
    assert Sets(plan, tmp_path).prepared_datasets(runs, runs) == {"made-up"}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"sets": []}', '{"sets": {"a": {}}}', '{"sets": {"a": {"train": 1}}}']
)
def test_a_damaged_record_of_prepared_sets_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / PREPARED).write_text(text)
    with pytest.raises(DataError, match=r"prepared\.json is damaged; restore it, or delete it"):
        read_prepared(tmp_path)
