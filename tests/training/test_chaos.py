"""A short campaign of ``make chaos``, and that its checks can fail."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.campaigns import training as chaos

pytestmark = pytest.mark.full


def test_the_same_seed_draws_the_same_acts() -> None:
    assert list(islice(chaos.acts(7), 50)) == list(islice(chaos.acts(7), 50))
    assert list(islice(chaos.acts(7), 50)) != list(islice(chaos.acts(8), 50))


def test_ten_kills_leave_runs_as_if_undisturbed(shards: Path, tmp_path: Path) -> None:
    """Two on a run of each kind: kills, freezes, and cut or blocked connections of two hosts."""
    kinds = ("bsp", "asp", "all-reduce", "strategy-switch", "matcha")
    tally = chaos.campaign(shards, tmp_path, kills=10, seed=20, only=kinds, acts_a_run=2)
    assert tally["runs"] >= len(kinds)
    assert {what.partition(" ")[0] for what in tally} >= {"kill", "freeze"}


def test_a_run_that_is_not_what_it_must_be_is_told(shards: Path, tmp_path: Path) -> None:
    run = chaos.Disturbed(shards, tmp_path / "run", "bsp")
    try:
        run.finish()
        right, path = run.hosts[0].vector(), tmp_path / "run" / "result.json"
        chaos.check(run, right)
        with pytest.raises(chaos.Failed, match="not those of an undisturbed run"):
            chaos.check(run, np.nextafter(right, np.float32(9)))
        result = json.loads(path.read_text())
        for change, complaint in (
            ({"passes": {"whole": 3, "true": 2}}, "not every row was trained once"),
            ({"cause": "failed"}, "result.json says failed"),
        ):
            path.write_text(json.dumps(result | change))
            with pytest.raises(chaos.Failed, match=complaint):
                chaos.check(run, right)
    finally:
        run.close()
