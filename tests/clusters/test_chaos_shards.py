"""A short campaign of ``make chaos-shards``, and that its checks can fail."""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path

import pytest

from pipeline.core.shardset.manifest import open_committed
from tests.campaigns import shards as chaos_shards
from tests.campaigns.plans import ACTS, plans
from tests.campaigns.readers import Failed, Reader, check_plain
from tests.campaigns.shards import Site
from tests.clusters import S3, Hdfs, Standalone
from tests.clusters.cluster_runs import STORE, digests
from tests.support.commits import commit


def test_the_same_seed_draws_the_same_runs_and_acts() -> None:
    assert list(islice(plans(7), 50)) == list(islice(plans(7), 50))
    assert list(islice(plans(7), 50)) != list(islice(plans(8), 50))
    kinds = {act.kind for plan in islice(plans(7), 100) for act in plan.acts}
    assert kinds == set(ACTS)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_five_kills_leave_whole_sets_and_nothing_else(
    hdfs: Hdfs, standalone: Standalone, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed draws acts of five kinds, on S3 and on HDFS, on both Sparks."""
    for name, value in chaos_shards.STALL.items():
        monkeypatch.setenv(name, value)
    tally = chaos_shards.campaign(Site(tmp_path, hdfs, standalone, s3), kills=5, seed=2903)
    assert tally["kill driver"] >= 1
    assert tally["reads"] >= tally["runs"]


@pytest.mark.parametrize("damage", ["byte", "gone", "another set", "none"])
def test_a_reader_reports_a_damaged_or_a_wrong_set(damage: str, tmp_path: Path) -> None:
    commit(STORE, tmp_path, "right", 2)
    expected = {2: digests(str(tmp_path))}
    victim = tmp_path / open_committed(STORE, str(tmp_path)).files()[0].path
    if damage == "byte":
        victim.write_bytes(b"?" + victim.read_bytes()[1:])
    elif damage == "gone":
        victim.unlink()
    elif damage == "another set":
        commit(STORE, tmp_path, "wrong", 2)
    reader = Reader(str(tmp_path), expected)
    if damage == "none":
        reader.look()
        assert reader.seen == 1
        return
    with pytest.raises(Failed, match="no set that was asked for" if damage == "another set" else "is not whole"):
        reader.look()


@pytest.mark.parametrize("left", ["worker=000/part-00009-v1-0123abcd.parquet", "_attempts/0123/beat"])
def test_what_is_left_over_is_told(left: str, tmp_path: Path) -> None:
    commit(STORE, tmp_path, "right", 2)
    check_plain(str(tmp_path))
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(tmp_path / "manifest.json", tmp_path / left)
    with pytest.raises(Failed, match=r"left over|no manifest lists"):
        check_plain(str(tmp_path))
