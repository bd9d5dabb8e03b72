"""Stored studies: every number that is printed of them comes out of their ledgers again."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from pipeline.core.errors import DataError, UsageError
from tests.support.tiers import only
from trainer.study.check import RESULTS, check, main, recompute, stored_studies


@pytest.mark.parametrize("folder", only(stored_studies()[-1:], stored_studies()), ids=lambda folder: folder.name)
def test_every_number_printed_of_a_stored_study_is_that_of_its_ledger(folder: Path, tmp_path: Path) -> None:
    check(folder, tmp_path)


@pytest.mark.full
def test_the_answers_of_the_manual_are_the_pooled_ones(tmp_path: Path) -> None:
    """The pooled page has its published digest, and the manual's first rows have its numbers, ratios with two decimals."""
    assert main(["--output", str(tmp_path)]) == 0
    manual = (RESULTS.parents[2] / "trainer" / "study" / "README.md").read_text().splitlines()
    page = (tmp_path / "pooled.md").read_text().splitlines()
    for name, way in (("stratified", "stratified"), ("distribution_aware", "distribution_aware-k20")):
        cells = next(line for line in page if line.startswith(f"| {way} |")).split(" | ")
        ratio = re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.2f}", cells[3])
        row = next(line for line in manual if line.startswith(f"| `{name}`"))
        assert f"| {cells[2]} | {ratio}, pooled | {float(cells[4]):.0f} s of sharding |" in row


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A stored study that a test may change."""
    if not stored_studies():
        pytest.skip(f"no study is stored in {RESULTS}")
    folder = stored_studies()[0]
    return Path(shutil.copytree(folder, tmp_path / folder.name))


@pytest.mark.slow
def test_a_changed_ledger_is_found(copy: Path, tmp_path: Path) -> None:
    first, *rest = (copy / "ledger.jsonl").read_text().splitlines(keepends=True)
    record = json.loads(first)
    record["final_accuracy"] -= 0.01
    (copy / "ledger.jsonl").write_text("".join([json.dumps(record) + "\n", *rest]))
    with pytest.raises(DataError, match=r"out/[\w.]+ differs from the published file"):
        check(copy, tmp_path / "out")
    assert main([str(copy), "--output", str(tmp_path), "--accept"]) == 0
    assert main([str(copy), "--output", str(tmp_path)]) == 0


def test_a_folder_that_is_no_stored_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains no ledger"):
        recompute(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "ledger.jsonl").write_text("")
    with pytest.raises(UsageError, match="no plan is named mine"):
        recompute(tmp_path / "mine")


@pytest.mark.slow
def test_a_ledger_of_another_plan_or_of_mixed_data_is_no_stored_study(copy: Path) -> None:
    stored = json.loads((copy / "plan.json").read_bytes())
    epochs = stored["plan"]["training"]["epochs"]
    stored["plan"]["training"]["epochs"] = 1
    (copy / "plan.json").write_text(json.dumps(stored))
    with pytest.raises(UsageError, match=f"is the study of another plan: training.epochs was 1, now {epochs}"):
        check(copy, copy.parent / "out")
    stored["plan"]["training"]["epochs"] = epochs
    (copy / "plan.json").write_text(json.dumps(stored))
    first, *rest = (copy / "ledger.jsonl").read_text().splitlines(keepends=True)
    record = json.loads(first)
    record["data"]["train"] = "others"
    (copy / "ledger.jsonl").write_text("".join([json.dumps(record) + "\n", *rest]))
    with pytest.raises(DataError, match="has other training images than"):
        check(copy, copy.parent / "out")
