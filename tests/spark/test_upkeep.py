"""The commands about a committed set: inspect, verify, clean; and that a job mends what they find."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import UsageError
from pipeline.input.read_options import ReadOptions
from pipeline.runs.request import Request
from pipeline.runs.shard import shard
from pipeline.spark.progress import PhaseLog
from pipeline.strategies.stratified import Stratified
from tests.conftest import make_rows, write_binary
from tests.support.exit_codes import ended
from tests.support.places import files_below
from tests.unit.test_upkeep import Capture


@pytest.fixture
def source(tmp_path: Path) -> Path:
    labels, images = make_rows(300, seed=1, pixels=192)
    return write_binary(tmp_path / "source", labels, images)


def sharded(spark: Any, source: Path, output: Path, *, workers: int = 3, overwrite: bool = False) -> bool:
    """Shard, and tell whether anything was committed."""
    request = Request(
        str(source), str(output), workers, overwrite=overwrite, read_options=ReadOptions("cifar10-binary", (3, 8, 8))
    )
    return shard(spark.sparkContext, request, Stratified(), PhaseLog(quiet=True)).fresh


def test_inspect_tells_a_set_on_one_screen(spark: Any, source: Path, tmp_path: Path, capsys: Capture) -> None:
    sharded(spark, source, tmp_path / "o")
    assert ended("inspect", tmp_path / "o") == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) < 40
    for expected in ("stratified, seed 0", "300 rows of", "workers      3, 96 to 10", 'start "zero"', "3x8x8 uint8"):
        assert expected in out
    shown = [line.split() for line in lines[-3:]]
    assert [cells[0] for cells in shown] == ["0", "1", "2"]
    assert sum(int(cells[1]) for cells in shown) == 300


def test_a_job_that_finds_its_set_deletes_leftovers(spark: Any, source: Path, tmp_path: Path) -> None:
    """A plain reader of worker=000 would have seen rows of both sets until another configuration was committed."""
    output = tmp_path / "o"
    assert sharded(spark, source, output)
    kept = files_below(output)
    (output / "worker=000" / "part-00000-0ldoldol.parquet").write_bytes(b"of the set before")
    (output / "_attempts" / "0123456789ab").mkdir(parents=True)
    beat = output / "_attempts" / "0123456789ab" / "beat"
    beat.write_text('{"host": "elsewhere", "pid": 1}')
    os.utime(beat, (1e9, 1e9))
    assert not sharded(spark, source, output)
    assert files_below(output) == kept


@pytest.mark.parametrize("kind", ["byte", "gone"])
def test_a_damaged_set_is_made_again_only_with_overwrite(kind: str, spark: Any, source: Path, tmp_path: Path) -> None:
    output = tmp_path / "o"
    assert sharded(spark, source, output)
    victim = next((output / "worker=001").iterdir())
    data = victim.read_bytes()
    if kind == "gone":
        victim.unlink()
        labels, images = make_rows(300, seed=2, pixels=192)
        other = write_binary(tmp_path / "other", labels, images)
        with pytest.raises(UsageError, match="of another configuration or input"):
            sharded(spark, other, output)  # a repair is not a reason to replace the rows
        assert sharded(spark, source, output)  # a missing file is noticed by every run
    else:
        victim.write_bytes(data[:100] + b"rotten" + data[106:])
        assert not sharded(spark, source, output)  # sizes alone are looked at
        assert sharded(spark, source, output, overwrite=True)
    assert ended("verify", output, "--deep") == 0
    assert not sharded(spark, source, output, overwrite=True)  # nothing is damaged now
