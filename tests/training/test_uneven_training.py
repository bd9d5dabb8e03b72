"""Training on shards of unequal shares: uneven machines finish a step together, and every example counts the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import measured_ratios
from pipeline.core.errors import UsageError
from tests.support.configs import make_config
from tests.support.trainer_sets import make_sets
from trainer import Options, train
from trainer.checkpoints.read import newest, read_vector
from trainer.config import RunFacts
from trainer.coordination.weights import Weights
from trainer.plan import check_shares, describe, plan
from trainer.protocols.asp import ASP
from trainer.protocols.bsp import BSP
from trainer.rules import usual_batch
from trainer.run_files import CHECKPOINTS
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.profiles import parse_profile
from trainer.simulation.replay import replay

QUIET = Options(silent=True, report=False)
PLAIN: dict[str, Any] = {
    "model": "logistic", "learning_rate": 0.2, "momentum": 0.0, "weight_decay": 0.0, "augment": False, "threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def uneven(spark: Any, sets: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    """The session's sets, and those of the same images in ratios."""
    root = tmp_path_factory.mktemp("uneven")
    made: dict[Any, Path] = dict(sets)
    for ratios in ((1, 2, 3), (1, 4, 4, 4)):
        made[ratios] = make_sets(spark, root / "".join(map(str, ratios)), len(ratios), ratios=ratios)[len(ratios)]
    return made


def last_vector(run: Path) -> np.ndarray:
    version = newest(run / CHECKPOINTS)
    assert version is not None
    return read_vector(run / CHECKPOINTS, version)


@pytest.mark.parametrize(("protocol", "steps"), [("bsp", 5), ("asp", 1)])
def test_uneven_shards_take_the_step_of_one_process(
    uneven: dict[Any, Path], tmp_path: Path, protocol: str, steps: int
) -> None:
    """A mini-batch of all rows, of which each worker draws its whole shard. Of asp the first step of each worker starts at
    the same parameters."""
    ends = {}
    for name, shards in (("one", uneven[1]), ("three", uneven[1, 2, 3])):
        kind = protocol if name == "three" else "bsp"
        config = make_config(shards, tmp_path / name, protocol=kind, batch_size=720, steps=steps, stop="local", **PLAIN)
        simulate(config, SimulationSettings(), QUIET)
        ends[name] = last_vector(tmp_path / name)
    start = np.abs(ends["one"]).max()
    np.testing.assert_allclose(ends["three"], ends["one"], atol=1e-5 * start)


def test_a_slow_worker_with_its_share_holds_nobody_up(uneven: dict[Any, Path], tmp_path: Path) -> None:
    seconds = {}
    for name, shards in (("even", uneven[4]), ("uneven", uneven[1, 4, 4, 4])):
        config = make_config(shards, tmp_path / name, protocol="bsp", batch_size=104, steps=10, **PLAIN)
        machines = SimulationSettings(profile=parse_profile("one-slow:4"), step_ms=100.0)
        done = simulate(config, machines, QUIET)
        seconds[name] = float(done.pushes()["seconds"].max())
    assert seconds["even"] == pytest.approx(10 * 0.4)
    assert seconds["uneven"] == pytest.approx(10 * 0.1 * 32 / 26, rel=1e-3)


def test_real_workers_draw_in_the_ratios_of_the_set(uneven: dict[Any, Path], tmp_path: Path) -> None:
    config = make_config(
        uneven[1, 2, 3], tmp_path / "run", protocol="asp", batch_size=24, steps=30, stop="local", **PLAIN
    )
    done = train(config, QUIET)
    assert done is not None
    drawn = done.pushes().groupby("worker")["examples"]
    assert drawn.unique().map(list).to_dict() == {0: [4], 1: [8], 2: [12]}
    assert drawn.sum().tolist() == [120, 240, 360], "a pass over each shard"
    assert replay(done.output).is_equal
    speeds = measured_ratios(str(done.output))
    assert len(speeds) == 3
    assert max(speeds) == 100


def test_mini_batches_are_cut_in_the_ratios() -> None:
    facts = RunFacts(4, 1000, 10, 0, ratios=(4, 2, 1, 1))
    floor, exact = (
        plan(make_config(batch_size=61, worker_batch=kind, epochs=1), facts, cores=4) for kind in ("floor", "exact")
    )
    assert floor.worker_batches == (30, 15, 7, 7)
    assert exact.worker_batches == (30, 15, 8, 8)
    assert "59 over all 4 workers, 7 to 30 by the ratios of the shards" in describe(floor)
    assert RunFacts(4, 1000, 10, 0, ratios=[4, 2, 1, 1]) == facts, "as it comes out of JSON"  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"--batch-size 7 in the set's ratios 4:2:1:1 leaves .* use at least 8"):
        check_shares(make_config(batch_size=7), 4, (4, 2, 1, 1))
    check_shares(make_config(batch_size=8), 4, (4, 2, 1, 1))


def test_bernoulli_updates_are_means_over_the_expected_rows() -> None:
    facts = RunFacts(4, 1000, 10, 0, ratios=(4, 2, 1, 1))
    assert usual_batch(make_config(batch_size=61, epochs=1), facts) == 59 / 4
    assert usual_batch(make_config(batch_size=61, epochs=1, sampling="bernoulli"), facts) == 61 / 4
    equal = RunFacts(4, 1000, 10, 0)
    assert usual_batch(make_config(batch_size=61, epochs=1), equal) is None
    assert usual_batch(make_config(batch_size=61, epochs=1, worker_batch="exact"), equal) == 61 / 4
    assert usual_batch(make_config(batch_size=64, epochs=1, worker_batch="exact"), equal) is None
    several = Weights(BSP(), 4, by_examples=True, usual=61 / 4)
    assert several.factors([0] * 4, [30, 10, 10, 10]) == [2.0, 2 / 3, 2 / 3, 2 / 3], "the mean over all"
    assert Weights(ASP(), 4, by_examples=True, usual=10.0).factors([0], [25]) == [2.5]


@pytest.mark.parametrize("protocol", [ASP(), BSP()])
def test_every_gradient_counts_by_its_examples(protocol: Any) -> None:
    weights = Weights(protocol, 4, by_examples=False, usual=16.0)
    examples = [32, 16, 8, 8]
    assert weights.factors([0] * 4, examples) == [2.0, 1.0, 0.5, 0.5]
    assert (weights.correction(examples), weights.holds) == (1.0, False)
