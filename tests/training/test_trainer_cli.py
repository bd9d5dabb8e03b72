"""The trainer's command line: flags over TOML over defaults, and whole lives of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trainer_runs import Training
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from tests.unit.test_run_folder import content
from tests.unit.test_trainer_cli import trainer
from trainer.__main__ import main
from trainer.home.place import listing
from trainer.runlog.run_folder import OWNED


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set for two workers, whose 80 examples are of the evaluator's tests."""
    return write_shards(tmp_path_factory.mktemp("cli"), [rows_of(30, 2), rows_of(50, 3, 100)], EVAL_ROWS)


@pytest.mark.full
def test_one_life_of_a_run(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained, found finished, refused, made longer, replaced: as a user does it."""
    common = ["--model", "logistic", "--batch-size", "8", "--servers", "2", "--threads", "1"]
    first = Training(shards, tmp_path / "run", *common, "--steps", 3, "--resume")
    assert first.wait() == 0, first.said()
    assert "holds no run to resume; a new run starts" in first.said()
    assert "8 over all 2 workers, 4 each" in first.said()
    assert first.result()["updates"] == 6
    assert [name for name in listing(first.output) if not OWNED.fullmatch(name)] == []

    again = ["--shards", str(shards), "--output", str(first.output), *common]
    before = content(first.output)
    assert main([*again, "--steps", "3"]) == 0
    assert "finished already, nothing to do" in capsys.readouterr().out
    assert content(first.output) == before
    done = trainer(*again, "--steps", 3, "--seed", 1)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {first.output} holds a run with --seed 0, not 1")

    longer = Training(shards, first.output, *common, "--steps", 5, "--resume", "--no-report")
    assert longer.wait() == 0, longer.said()
    assert longer.result()["updates"] == 10
    assert longer.events("start")[-1]["resumed_from"] == 6

    other = Training(shards, first.output, *common, "--steps", 2, "--seed", 1, "--overwrite", "--no-report")
    assert other.wait() == 0, other.said()
    assert other.result()["updates"] == 4
    assert [event["resumed_from"] for event in other.events("start")] == [None]
