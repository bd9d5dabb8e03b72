"""Damaged files of every kind, drawn with a fixed seed; `python -m tests.campaigns.fuzz` draws others."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError
from tests.campaigns import fuzz
from tests.campaigns.fuzz_kinds import KINDS, Kind
from tests.campaigns.mutations import FORMS, VALUES

SEED = 1


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("files", [3, pytest.param(40, marks=pytest.mark.full)])
def test_damaged_files_are_refused_in_a_line_or_read(name: str, files: int) -> None:
    failures = fuzz.fuzz(name, range(files), SEED).failures
    assert not failures, "\n".join(map(str, failures))


@pytest.mark.parametrize(
    ("name", "seed", "number"),
    [
        ("cifar-pickle", 1795629465, 2117),  # an error of pickle quoted all of a string
        ("manifest", 1795626571, 3886),  # chunks left a row out
        ("shards", 1795629465, 3812),  # statistics without a minimum
        ("shards-sealed", 1795629465, 3859),  # pyarrow ended the process at a column's metadata
    ],
)
def test_a_file_that_was_a_fault_once(name: str, seed: int, number: int) -> None:
    failures = fuzz.fuzz(name, [number], seed).failures
    assert not failures, "\n".join(map(str, failures))


def test_a_mutation_leaves_nothing_to_the_next_one() -> None:
    """Values that are put into one file must not change with it, or a file's number would not tell its content."""
    before = json.dumps(VALUES)
    rng = np.random.default_rng(0)
    for _ in range(500):
        FORMS["json"](b'{"a": {"b": [1, {"c": 2}]}, "d": [3, 4]}', rng)
    assert json.dumps(VALUES) == before


def reads(end: Any) -> Kind:
    """A kind of one file, whose damaged file is read by a function of its path."""

    def read(folder: Path) -> object:
        path = folder / "file"
        return None if path.read_bytes() == b"whole" else end(path)

    return Kind(lambda folder: (folder / "file").write_bytes(b"whole"), read, {"file": ("bytes",)}, is_exact=True)


def fails(path: Path) -> None:
    raise ZeroDivisionError("as it is")


def hangs(path: Path) -> None:
    while True:
        time.sleep(0.01)


def is_killed(path: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuses_in_two_lines(path: Path) -> None:
    raise DataError("one\ntwo")


def refuses(path: Path) -> None:
    raise DataError(f"{path} is damaged")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "words"),
    [
        (fails, "ZeroDivisionError: as it is"),
        (hangs, "takes more than"),
        (refuses_in_two_lines, "not one line"),
        (lambda path: np.ones(1 << 30), "MemoryError"),
        (lambda path: path.with_name("other").write_bytes(b""), "does open"),
        (is_killed, "the process ends (-9)"),
        (lambda path: "other content", "reads other content"),
        (refuses, ""),
    ],
)
def test_the_campaign_sees_what_is_forbidden(end: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "one", reads(end))
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    found = fuzz.fuzz("one", range(2), SEED)
    assert found.counts == {"failure" if words else "refused": 2}
    assert all(words in str(failure) and "--kind one --seed 1 --only" in str(failure) for failure in found.failures)


def test_damage_is_the_same_for_the_same_number(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        KINDS["manifest"].make(tmp_path / name)
        fuzz.damage(KINDS["manifest"], tmp_path / name, np.random.default_rng([1, 2]))
    one, two = ([path.read_bytes() for path in sorted((tmp_path / name).rglob("*.json"))] for name in ("one", "two"))
    assert one == two
    assert set(FORMS) == {form for kind in KINDS.values() for forms in kind.files.values() for form in forms}
