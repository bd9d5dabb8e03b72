"""Training rows that are held out: who trains on which rows, and the switch that their loss decides."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pipeline.core.errors import UsageError
from tests.support.configs import make_config
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from tests.support.virtual_runs import QUIET, RESUME, final
from trainer import Result
from trainer.config import Config
from trainer.coordination.switch_rule import switches_now
from trainer.data.batches import build_sampler
from trainer.data.deal import deal
from trainer.data.holdout import is_held_out, load_held_out, trained_fingerprint, trained_places
from trainer.data.mean_image import subtracted_mean
from trainer.data.opening import open_shards
from trainer.data.rows import join_rows
from trainer.data.shards import Shards
from trainer.evaluation.evaluator import NO_CHANGE, NO_HELD_OUT
from trainer.runlog.kinds.evaluation import EvaluationEvent, HoldoutEvent
from trainer.runlog.kinds.run import WarningEvent
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.compute import RealCompute
from trainer.simulation.replay import replay

SHARE = 0.2
A_SET = cast(Shards, SimpleNamespace(fingerprint=7))
EPOCHS, WINDOW, THRESHOLD = 6, 3, 3.0


def config_for(shards: Path | str = "s", output: Path | str = "o", **values: Any) -> Config:
    common: dict[str, Any] = {"model": "logistic", "batch_size": 10, "threads": 1, "epochs": EPOCHS}
    common |= {"switch_on": "holdout", "holdout_share": SHARE, "switch_window": WINDOW, "switch_threshold": THRESHOLD}
    return make_config(shards, output, exchange="strategy-switch", **common | values)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards, of which the second has copies of five rows of the first."""
    first = rows_of(60, 2)
    return write_shards(
        tmp_path_factory.mktemp("held"), [first, join_rows([rows_of(50, 3, 2000), first.select(np.arange(5))])], None
    )


def by_rule(shards: Path, output: Path, options: Any = QUIET, **values: Any) -> Result:
    return simulate(config_for(shards, output, **values), SimulationSettings(), options)


# The rows


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_row_is_trained_or_held_out(shards: Path, workers: int) -> None:
    """Whatever the number of workers is, and in whichever shards the copies of a row are."""
    config = config_for(shards)
    opened = open_shards(str(shards))
    held_out = set(load_held_out(opened, config).ids.tolist())
    trained: set[int] = set()
    dealt = deal(opened, workers)
    for worker, rows in enumerate(dealt):
        sampler = build_sampler(config, opened, rows, worker, workers)
        batch_size = config.worker_batches(workers)[worker]
        draws = [sampler.draw(clock) for clock in range(-(-len(rows) // batch_size))]
        trained |= {int(each) for draw in draws for each in draw.rows.ids[draw.places]}
        passes = sum(draw.passes or 0 for draw in draws)
        places = trained_places(rows.ids, config, worker)
        assert places is not None
        assert passes == len(draws) * batch_size // len(places)
    assert not trained & held_out
    assert trained | held_out == {int(each) for rows in dealt for each in rows.ids}
    assert 10 < len(held_out) < 35


def test_about_the_share_of_the_rows_is_held_out() -> None:
    ids = np.arange(50_000)
    masks = [is_held_out(ids, config_for(seed=seed, holdout_share=0.05)) for seed in (0, 1)]
    assert all(abs(int(mask.sum()) - 2_500) < 4 * (50_000 * 0.05 * 0.95) ** 0.5 for mask in masks)
    assert abs(int((masks[0] & masks[1]).sum()) - 125) < 60, "another seed holds out other rows"
    np.testing.assert_array_equal(is_held_out(ids[::-1], config_for(holdout_share=0.05)), masks[0][::-1])


def test_other_runs_hold_out_no_row() -> None:
    ids = np.arange(100)
    for config in (config_for(switch_on="evaluation"), make_config()):
        assert not is_held_out(ids, config).any()
        assert trained_places(ids, config, 0) is None
        assert trained_fingerprint(A_SET, config) == A_SET.fingerprint
    assert trained_fingerprint(A_SET, config_for()) is None, "the manifest has that of all rows"


def test_a_worker_without_a_row_to_train_on_is_refused() -> None:
    config = config_for(holdout_share=0.5)
    ids = np.flatnonzero(is_held_out(np.arange(20), config))
    with pytest.raises(UsageError, match=f"leaves worker 7 none of its {len(ids)} rows"):
        trained_places(ids, config, 7)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"alpha": 0.5}, "--switch-on holdout is read by --alpha auto only"),
        ({"follow": True}, "needs passes over fixed rows: leave out --follow"),
        ({"repartition": "random"}, "needs passes over fixed rows: leave out --repartition random"),
        ({"sampling": "bernoulli"}, "leave out --sampling bernoulli"),
        ({"holdout_share": 0.0}, "--holdout-share must be"),
    ],
)
def test_a_holdout_that_cannot_be_is_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        config_for(**values)


# The switch


def losses_of(done: Result) -> list[float]:
    return [event.loss or 0.0 for event in done.events() if isinstance(event, HoldoutEvent)]


@pytest.mark.slow
def test_the_rule_reads_the_losses_of_held_out_rows(shards: Path, tmp_path: Path) -> None:
    """The set has no evaluation rows. The first loss is computed from the model's matrix and the held-out images."""
    done = by_rule(shards, tmp_path / "run")
    losses = losses_of(done)
    epoch = next(k for k in range(1, EPOCHS) if switches_now(losses[:k], EPOCHS, WINDOW, THRESHOLD))
    assert [stage["first_epoch"] for stage in done.stages] == [0, epoch]
    assert "the loss on held-out rows changes by" in done.stages[1]["reason"]
    assert len(losses) == epoch, "it is not measured after the switch"
    assert not [event for event in done.events() if isinstance(event, EvaluationEvent)]
    again = by_rule(shards, tmp_path / "again")
    assert losses_of(again) == losses
    assert final(again).tobytes() == final(done).tobytes()
    assert replay(done.output).is_equal


def test_a_rule_without_losses_says_so_once(tmp_path: Path) -> None:
    """A share of so few rows is none, so that no epoch has a loss."""
    few = write_shards(tmp_path / "set", [rows_of(10, 2), rows_of(10, 3, 2000)], EVAL_ROWS)
    done = by_rule(few, tmp_path / "run", holdout_share=1e-6, epochs=2)
    assert [event.message for event in done.events() if isinstance(event, WarningEvent)] == [NO_HELD_OUT, NO_CHANGE]
    assert len(done.stages) == 1


def test_no_held_out_row_is_trained_in_a_run(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor after the run has switched, or has been resumed to be longer."""
    trained: set[int] = set()
    step = RealCompute.step

    def step_and_note(self: RealCompute, worker: int, clock: int, parameters: Any) -> Any:
        draw = self.batches[worker].sampler.draw(clock)
        trained.update(draw.rows.ids[draw.places].tolist())
        return step(self, worker, clock, parameters)

    monkeypatch.setattr(RealCompute, "step", step_and_note)
    done = by_rule(shards, tmp_path / "run")
    longer = by_rule(shards, tmp_path / "run", RESUME, epochs=EPOCHS + 2)
    assert longer.updates > done.updates
    held_out = set(load_held_out(open_shards(str(shards)), config_for(shards)).ids.tolist())
    assert trained
    assert not trained & held_out


def test_the_losses_are_those_of_the_model_without_l2(tmp_path: Path) -> None:
    """The oracle: softmax and cross-entropy of the final model, over the rows whose ids are held out."""
    sets = write_shards(tmp_path / "set", [rows_of(60, 2), rows_of(50, 3, 2000)], EVAL_ROWS)
    done = by_rule(sets, tmp_path / "run", weight_decay=0.1, switch_threshold=1e-9)
    assert len(done.stages) == 1
    rows = load_held_out(open_shards(str(sets)), config_for(sets))
    images = np.asarray(rows.images_NCHW, np.float64)
    mean = subtracted_mean(open_shards(str(sets)))
    inputs = ((images - mean[None, :, None, None]) / 255).reshape(len(rows), -1)
    weights = {array.ndim: array.astype(np.float64) for array in done.weights().values()}
    scores = inputs @ weights[2].T + weights.get(1, 0.0)
    logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    assert losses_of(done)[-1] == pytest.approx(-logs[np.arange(len(rows)), rows.labels].mean(), rel=1e-4)
