"""Learning rates against the table that the recipes print, and lists of drops of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

from pipeline.core import command_line
from pipeline.core.errors import UsageError
from tests.support.configs import make_config
from trainer.config import Config, RunFacts
from trainer.coordination.schedules import (
    AUTO,
    COSINE,
    INVERSE_SQRT,
    are_drops,
    drops,
    learning_rate,
    parse_drops,
    warm_up,
)
from trainer.flags import build_parser, config_of
from trainer.plan import describe, plan
from trainer.rules import worker_rate

RATES = [  # epoch, ch6, ch4: base 0.1
    (0, 0.1, 0.1),
    (81.99, 0.1, 0.1),
    (82, 0.1, 0.01),  # a drop holds from its epoch on
    (90.99, 0.1, 0.01),
    (91, 0.01, 0.01),
    (132.99, 0.01, 0.01),
    (133, 0.01, 0.001),
    (135.99, 0.01, 0.001),
    (136, 0.001, 0.001),
    (181, 0.001, 0.001),  # of 182: no third drop
]


@pytest.mark.parametrize(("epoch", "ch6", "ch4"), RATES)
def test_the_rate_falls_to_a_tenth_at_the_epochs_of_the_recipe(epoch: float, ch6: float, ch4: float) -> None:
    found = {recipe: learning_rate(recipe, 0.1, epoch, 0, 182) for recipe in ("ch6", "ch4", "constant")}
    assert found == {"ch6": ch6, "ch4": ch4, "constant": 0.1}


@pytest.mark.parametrize("epochs", [3, 8, 182])
def test_auto_drops_the_rate_after_0_75_and_0_9_of_the_run(epochs: int) -> None:
    first, second = drops(AUTO, epochs)
    assert (first, second) == pytest.approx((epochs * 0.75, epochs * 0.9))
    at = [0, first - 0.01, first, second - 0.01, second, epochs - 0.01]
    assert [learning_rate(AUTO, 0.1, epoch, 0, epochs) for epoch in at] == [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]


@pytest.mark.parametrize(("before", "rate"), [(0, 1.0), (3, 0.5), (99, 0.1)])
def test_inverse_sqrt_divides_by_the_root_of_the_mini_batch(before: int, rate: float) -> None:
    assert learning_rate(INVERSE_SQRT, 1.0, 0.0, before, 1) == pytest.approx(rate, rel=1e-15)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 0.5, 0.99, 1.0])
def test_a_cosine_is_that_of_torch(share: float) -> None:
    """Also beyond the end, which workers with an end of their own may pass."""
    parameter = torch.zeros(1, requires_grad=True)
    scheduler = CosineAnnealingLR(SGD([parameter], lr=0.3), T_max=100)
    rates = [float(scheduler.get_last_lr()[0])]
    for _ in range(100):
        scheduler.optimizer.step()
        scheduler.step()
        rates.append(float(scheduler.get_last_lr()[0]))
    assert learning_rate(COSINE, 0.3, 8 * share, 0, 8) == pytest.approx(rates[round(100 * share)], abs=1e-12)
    assert learning_rate(COSINE, 0.3, 8.5, 0, 8) == pytest.approx(0, abs=1e-12)


def test_a_warm_up_rises_step_by_step_beside_the_schedule() -> None:
    """Two epochs of five steps, then the drop of --drops in epoch 3; the plan says it."""
    assert [warm_up(step / 5, 2, 5) for step in range(12)] == pytest.approx([*(n / 10 for n in range(1, 11)), 1, 1])
    assert warm_up(0, 0, 5) == 1
    config = make_config(
        epochs=4, batch_size=10, learning_rate=0.2, protocol="bsp", drops=(3.0,), rate_warmup=2.0, servers=1
    )
    facts = RunFacts(2, 50, 10, 0)
    found = [worker_rate(config, facts, step / 5) for step in range(20)]
    assert found == pytest.approx([*(0.01 * n for n in range(1, 11)), *[0.1] * 5, *[0.01] * 5])
    assert "rises to this rate until epoch 2 of the run; falls to a tenth at epoch 3\n" in describe(plan(config, facts))
    text = describe(plan(make_config(epochs=4, protocol="bsp", recipe="cosine"), facts))
    assert "pushes; falls to 0 along a cosine\n" in text


def test_a_warm_up_does_not_end_a_run_by_its_small_steps() -> None:
    with pytest.raises(UsageError, match=r"--rate-warmup 2 begins with steps .* --tolerance 0.1 could end"):
        make_config(steps=3, rate_warmup=2.0, tolerance=0.1, servers=1)


def test_a_recipe_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(KeyError, match="ch5"):
        learning_rate("ch5", 0.1, 0, 0, 1)


@pytest.mark.parametrize(
    ("epoch", "rate"), [(0, 0.1), (99.99, 0.1), (100, 0.01), (149.9, 0.01), (150, 0.001), (199, 0.001)]
)
def test_the_rate_drops_at_the_listed_epochs(epoch: float, rate: float) -> None:
    """RC's 100 and 150, with a third drop after the end of the run."""
    assert drops(AUTO, 200, (100, 150, 200)) == (100, 150)
    assert learning_rate(AUTO, 0.1, epoch, 0, 200, (100, 150, 200)) == rate


def test_listed_drops_before_the_end_replace_those_of_the_recipe() -> None:
    """A list without an effect in this run still replaces them: its epochs do not move with the length of the run."""
    assert drops(AUTO, 10, (100, 150)) == ()
    assert learning_rate(AUTO, 0.1, 9.99, 0, 10, (100, 150)) == 0.1


@pytest.mark.parametrize(
    ("epochs", "valid"),
    [
        ((), True),
        ((0.5, 1, 2.25), True),
        ((0, 1), False),
        ((-1,), False),
        ((2, 2), False),
        ((150, 100), False),
        ((float("nan"),), False),
        ((float("inf"),), False),
    ],
)
def test_drops_are_positive_and_in_increasing_order(epochs: tuple[float, ...], valid: bool) -> None:
    assert are_drops(epochs) == valid


def test_a_list_of_drops_is_parsed() -> None:
    assert parse_drops("90, 135.5") == (90, 135.5)
    for text in ("", "90;135", "90,", "ch6"):
        with pytest.raises(UsageError, match="is not a list of epochs, such as 100,150"):
            parse_drops(text)


def config_from(*words: str) -> Config:
    common = ["--shards", "s", "--output", "o", "--epochs", "200"]
    return config_of(command_line.parse(build_parser(), [*common, *words]))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--drops", "150,100"],
            "--drops must be positive epochs in increasing order, such as 100,150, got (150.0, 100.0)",
        ),
        (
            ["--drops", "0,100"],
            "--drops must be positive epochs in increasing order, such as 100,150, got (0.0, 100.0)",
        ),
        (["--drops", "early"], "--drops 'early' is not a list of epochs, such as 100,150"),
        *(
            (
                ["--recipe", recipe, "--drops", "100"],
                f"--drops and --recipe {recipe} both set the schedule of the learning rate: leave out one of them",
            )
            for recipe in ("ch6", "constant", "cosine", "inverse-sqrt")
        ),
    ],
)
def test_wrong_drops_are_refused_in_one_line(words: list[str], line: str) -> None:
    with pytest.raises(UsageError) as refused:
        config_from(*words)
    assert str(refused.value) == line


def test_drops_come_from_flags_files_and_saved_configurations(tmp_path: Path) -> None:
    """A whole number in a file is a list of one."""
    config = config_from("--drops", "100,150")
    assert config.optimiser.drops == (100, 150)
    assert Config.from_json(json.loads(json.dumps(config.to_json()))) == config == Config.from_json(config.to_json())
    assert config.identity() != config_from().identity()
    for value, found in (('"100,150"', (100, 150)), ("7", (7,))):
        (tmp_path / "c.toml").write_text(f"drops = {value}\n")
        assert config_from("--config", str(tmp_path / "c.toml")).optimiser.drops == found
    assert config_from("--config", str(tmp_path / "c.toml"), "--drops", "9").optimiser.drops == (9,)


def test_a_configuration_saved_before_there_were_drops_is_read() -> None:
    values = json.loads(json.dumps(make_config(steps=3).to_json()))
    assert values["optimiser"].pop("drops") == []
    assert Config.from_json(values) == make_config(steps=3)


@pytest.mark.parametrize("drops", [3, "100,150", [150, 100], ["100"], [None], [True]])
def test_a_saved_configuration_with_damaged_drops_is_an_error(drops: object) -> None:
    values = make_config(steps=3).to_json()
    values["optimiser"]["drops"] = drops
    with pytest.raises((ValueError, UsageError), match="drops"):
        Config.from_json(values)


def test_a_run_and_its_plan_follow_the_listed_drops() -> None:
    config = make_config(epochs=200, batch_size=10, learning_rate=0.1, protocol="bsp", drops=(100.0, 150.5))
    facts = RunFacts(2, 100, 10, 0)
    found = [worker_rate(config, facts, epoch) for epoch in (99.9, 100, 150.4, 150.5)]
    assert found == pytest.approx([0.05, 0.005, 0.005, 0.0005])
    assert plan(config, facts).drops == (100, 150.5)
    assert "falls to a tenth at epoch 100 and 150.5\n" in describe(plan(config, facts))
