"""The context of a run: places are resolved once, and the shards are opened once, at their first use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.configs import make_config
from tests.support.trainer_sets import rows_of, write_shards
from trainer.context import RunContext
from trainer.data import opening, pinned
from trainer.data.shards import Shards
from trainer.runlog.run_record import SavedRun


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sets that were opened so far."""
    uris: list[str] = []
    open_shards = opening.open_shards

    def counted(uri: str, **options: bool) -> Shards:
        uris.append(uri)
        return open_shards(uri, **options)

    monkeypatch.setattr(pinned, "open_shards", counted)
    return uris


def test_a_context_opens_its_shards_once(tmp_path: Path, opened: list[str]) -> None:
    """Also if it is pinned, and if other contexts of the same set are derived from it."""
    folder = write_shards(tmp_path / "shards", [rows_of(10, 1), rows_of(10, 2)], None)
    context = RunContext.from_config(make_config(folder, tmp_path / "run"))
    assert context.home == tmp_path / "run"
    assert opened == []
    pinned = context.pinned(SavedRun())
    assert pinned is context
    derived = replace(context, config=make_config(folder, tmp_path / "other"), home=tmp_path / "other")
    assert derived.shards is context.shards
    assert context.shards.num_workers == 2
    assert opened == [str(folder)]


def test_a_context_without_shards_opens_none(tmp_path: Path, opened: list[str]) -> None:
    assert RunContext.from_config(make_config("", tmp_path)).home == tmp_path
    assert opened == []
