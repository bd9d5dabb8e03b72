"""Test the data that parts and versions of the program exchange: one rule for missing and unknown keys, one line for each
refusal. The rule is written down in pipeline.core.json_values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import DataError, UsageError
from pipeline.core.json_values import build
from tests.support.configs import make_config
from tests.support.references import events as documented_events
from trainer.cluster.launcher import LaunchArguments, Part
from trainer.config import Config, Data, RunFacts, RunSpec
from trainer.options import Role
from trainer.protocols.bsp import BSP
from trainer.run_files import METRICS
from trainer.runlog.events import log_event
from trainer.runlog.kinds.base import OtherEvent
from trainer.runlog.kinds.parse import KINDS, event_from_json
from trainer.runlog.kinds.run import RollbackEvent, WarningEvent
from trainer.runlog.read import read_events
from trainer.transport.status import NOT_READY, RunStatus

STATUS = RunStatus(ready=True, finished=False, diverged=None, version=7, epoch=0.5, loss=float("nan"))


@dataclass(frozen=True)
class Contract:
    needed: int
    optional: float = 0.5


def test_a_missing_key_takes_its_default_or_is_refused() -> None:
    assert build(Contract, {"needed": 1}) == Contract(1, 0.5)
    with pytest.raises(ValueError, match=r"^it lacks 'needed'$"):
        build(Contract, {"optional": 1.0})


def test_an_unknown_key_is_refused_or_ignored_by_rule() -> None:
    values = {"needed": 1, "of_a_later_version": 2}
    with pytest.raises(ValueError, match=r"^unknown key 'of_a_later_version'$"):
        build(Contract, values)
    assert build(Contract, values, ignore_unknown=True) == Contract(1)


def test_a_long_unknown_key_is_quoted_in_part() -> None:
    with pytest.raises(ValueError, match=r"^unknown key 'x{80}'$"):
        build(Contract, {"x" * 10_000: 1})


def sent(status: RunStatus) -> dict[str, Any]:
    """The status as it arrives: ``allow_nan`` refuses what is no JSON."""
    values: dict[str, Any] = json.loads(json.dumps(status.to_json(), allow_nan=False))
    return values


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("protocol", "bsp", "protocol of Config must be an object of the class Protocol, got 'bsp'"),
        ("protocol", BSP, "protocol of Config must be an object of the class Protocol, got <class"),
        ("model", "cnn", "model of Config must be an object of the class ModelSpec, got 'cnn'"),
        ("data", "/shards", "data of Config must be an object of the class Data, got '/shards'"),
    ],
)
def test_a_part_of_another_type_is_refused_in_one_line(part: str, value: Any, words: str) -> None:
    parts: dict[str, Any] = {"data": Data("/shards"), "run": RunSpec("/run", steps=1)}
    with pytest.raises(UsageError, match=re.escape(words)):
        Config(**parts | {part: value})


def test_a_status_is_read_as_it_was_sent() -> None:
    read = RunStatus.from_json(sent(STATUS))
    assert read.loss is None, "the loss of a diverged run is no number in JSON"
    assert (read.ready, read.version, read.epoch) == (True, 7, 0.5)
    assert RunStatus.from_json(sent(NOT_READY)) == NOT_READY


def test_a_status_of_a_later_version_is_read() -> None:
    assert RunStatus.from_json(sent(NOT_READY) | {"of_a_later_version": 1}) == NOT_READY


@pytest.mark.parametrize("name", [item.name for item in fields(RunStatus)])
def test_a_status_lacking_a_field_is_read_or_refused(name: str) -> None:
    values = {key: value for key, value in sent(NOT_READY).items() if key != name}
    if name not in ("ready", "finished", "diverged"):
        assert RunStatus.from_json(values) == NOT_READY
        return
    with pytest.raises(DataError, match=f"^server 0 sent a status that is not read here: it lacks '{name}'; [^\n]*$"):
        RunStatus.from_json(values)


@pytest.mark.parametrize("value", [None, "7", -(1 << 70), 1e400, [], {}, True])
def test_a_status_of_another_type_is_refused_in_one_line(value: object) -> None:
    with pytest.raises(DataError, match="'version' is ") as refused:
        RunStatus.from_json(sent(STATUS) | {"version": value})
    assert "\n" not in str(refused.value)


# --- launch arguments and facts ---------------------------------------------------------------------------------------

ARGUMENTS = LaunchArguments(
    Part(1, (Role("server", 2), Role("worker", 3), Role("evaluator"))),
    rendezvous="tcp://host:7000",
    token="a secret of the run",
    config=make_config("shards", "run", steps=3),
    shards="digest",
    report=True,
    tensorboard=False,
    store="",
)
FACTS = RunFacts(2, 100, 10, 4, "digest", (1 << 64) - 1, (2, 1), classifies=False)


def test_launch_arguments_and_facts_are_read_as_they_were_sent() -> None:
    assert LaunchArguments.from_json(json.loads(json.dumps(ARGUMENTS.to_json()))) == ARGUMENTS
    assert RunFacts.from_json(json.loads(json.dumps(FACTS.to_json()))) == FACTS
    assert ARGUMENTS.token not in repr(ARGUMENTS)


Change = Callable[[dict[str, Any]], dict[str, Any]]
BROKEN: dict[str, tuple[Change, str]] = {
    "no arguments": (lambda values: {}, "it lacks 'part'"),
    "a key of a later version": (lambda values: values | {"later": 1}, "unknown key 'later'"),
    "an option of a later version": (lambda values: values | {"options": {"later": 1}}, "unknown key 'later'"),
    "a number as text": (lambda values: values | {"part": "1"}, "'index' is '1', not int"),
    "roles of no run": (lambda values: values | {"roles": "boss:0"}, "'boss:0' is not server:N"),
    "roles of another type": (lambda values: values | {"roles": 7}, "'7' is not server:N"),
    "no options": (lambda values: values | {"options": None}, "'options' is a NoneType, not an object"),
    "no configuration": (lambda values: values | {"config": {}}, "it lacks 'data'"),
    "a configuration of text": (lambda values: values | {"config": "x"}, "'config' is a str, not an object"),
    "a token of another type": (lambda values: values | {"token": 7}, "'token' is '7', not str"),
}


@pytest.mark.parametrize("key", ARGUMENTS.to_json())
def test_launch_arguments_that_lack_a_key_are_refused(key: str) -> None:
    values = ARGUMENTS.to_json()
    del values[key]
    assert f"it lacks '{key}'" in refusal(values)


@pytest.mark.parametrize("case", BROKEN)
def test_broken_launch_arguments_are_refused_in_one_line(case: str) -> None:
    change, words = BROKEN[case]
    assert words in refusal(change(ARGUMENTS.to_json()))


def refusal(values: dict[str, Any]) -> str:
    """The line with which launch arguments are refused."""
    with pytest.raises(DataError) as refused:
        LaunchArguments.from_json(values)
    line = str(refused.value)
    assert "\n" not in line
    assert ARGUMENTS.token not in line
    return line


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rows": None}, "'rows' is 'None', not int"),
        ({"ratios": 5}, "'ratios' or 'fingerprint' is of another type"),
        ({"ratios": ["a"]}, "'ratios' or 'fingerprint' is of another type"),
        ({"fingerprint": 5}, "'ratios' or 'fingerprint' is of another type"),
        ({"fingerprint": "xyz"}, "invalid literal for int"),
        ({"later": 1}, "unknown key 'later'"),
    ],
)
def test_broken_facts_are_refused_in_one_line(values: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=re.escape(words)) as refused:
        RunFacts.from_json(FACTS.to_json() | values)
    assert "\n" not in str(refused.value)


# --- events -----------------------------------------------------------------------------------------------------------


def test_the_reference_lists_the_kinds_of_events_and_their_keys() -> None:
    """trainer/FILES.md, against the fields of the dataclasses; any event may name a version and a generation."""
    common = {"event", "time", "version", "generation"}
    fields_by_kind = {name: {item.name for item in fields(kind)} - {"kind"} | common for name, kind in KINDS.items()}
    assert {name: keys | common for name, keys in documented_events().items()} == fields_by_kind


def test_an_event_is_written_with_the_fields_of_its_kind(tmp_path: Path) -> None:
    log_event(tmp_path, "rollback", from_version=2, to_version=1, cause="x")
    log_event(tmp_path, "of a later version", anything=[1])
    with pytest.raises(TypeError, match="unexpected keyword argument 'to'"):
        log_event(tmp_path, "rollback", from_version=2, to=1)
    with pytest.raises(TypeError, match="missing"):
        log_event(tmp_path, "eval", loss=0.5)
    rollback, other = read_events(tmp_path / METRICS)
    assert rollback == RollbackEvent(time=rollback.time, from_version=2, to_version=1, cause="x")
    assert other == OtherEvent(kind="of a later version", time=other.time, values={"anything": [1]})


def test_a_key_of_a_later_version_costs_no_event() -> None:
    assert event_from_json({"event": "warning", "message": "x", "later": 1}) == WarningEvent(message="x")


@pytest.mark.parametrize(
    "counts",
    [
        {"class_rows": [4, 0], "class_correct": [3]},
        {"neighbourhood_rows": [4], "neighbourhood_correct": []},
        {"confusion": [[3, 1], [0]]},
    ],
)
def test_an_evaluation_with_incomplete_counts_is_refused(counts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="counts by class or neighbourhood are incomplete"):
        event_from_json({"event": "eval", "version": 1, **counts})


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_that_lacks_a_key_is_refused(kind: str) -> None:
    """A reader leaves such a line out, as one that a full disk cut off."""
    needed = {item.name: item.type for item in fields(KINDS[kind]) if item.default is item.default_factory}
    samples = {"int": 1, "bool": True, "str": "x", "str | None": "x", "list[Any]": [], "dict[str, list[int]]": {}}
    values = {name: samples.get(str(hint), 0.5) for name, hint in needed.items()}
    assert event_from_json({"event": kind, **values}).kind == kind
    for name in values:
        rest = {key: value for key, value in values.items() if key != name}
        with pytest.raises(ValueError, match=f"^it lacks '{name}'$"):
            event_from_json({"event": kind, **rest})
