"""Learning rates against the table that the recipes print."""

from __future__ import annotations

import pytest

from trainer.coordination.schedules import AUTO, INVERSE_SQRT, drops, learning_rate

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
def test_auto_lets_the_rate_fall_after_three_quarters_and_nine_tenths_of_the_run(epochs: int) -> None:
    first, second = drops(AUTO, epochs)
    assert (first, second) == pytest.approx((epochs * 0.75, epochs * 0.9))
    at = [0, first - 0.01, first, second - 0.01, second, epochs - 0.01]
    assert [learning_rate(AUTO, 0.1, epoch, 0, epochs) for epoch in at] == [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]


@pytest.mark.parametrize(("before", "rate"), [(0, 1.0), (3, 0.5), (99, 0.1)])
def test_inverse_sqrt_divides_by_the_root_of_the_number_of_the_mini_batch(before: int, rate: float) -> None:
    assert learning_rate(INVERSE_SQRT, 1.0, 0.0, before, 1) == pytest.approx(rate, rel=1e-15)


def test_a_recipe_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(KeyError, match="ch5"):
        learning_rate("ch5", 0.1, 0, 0, 1)
