"""What passes between parts and versions of the program: one rule for missing and unknown keys, and one line for each
refusal. The rule is written down in pipeline.core.json_values."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

import pytest

from pipeline.core.errors import DataError
from pipeline.core.json_values import build
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
