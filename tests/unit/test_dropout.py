"""Dropout from random bytes: torch's law, torch's scale, torch's seeds."""

from __future__ import annotations

import pytest
import torch

from trainer.models.networks.dropout import Dropout


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.25, 0.5, 1 / 256])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_elements_are_dropped_with_the_rate_and_the_rest_is_scaled_up(rate: float, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    x = torch.ones(64, 32, 11, 11).contiguous(memory_format=layout).requires_grad_()
    y = Dropout(rate)(x)
    assert sorted(y.unique().tolist()) == pytest.approx([0.0, 1 / (1 - rate)])
    dropped = (y == 0).double()
    spread = (rate * (1 - rate) / x.numel()) ** 0.5
    assert abs(dropped.mean().item() - rate) < 5 * spread
    # The bytes of one drawn word are independent, the highest too: neighbours are dropped together as often as chance says.
    flat = dropped.permute(0, 2, 3, 1).reshape(-1) if layout is torch.channels_last else dropped.reshape(-1)
    for place in range(8):
        share = flat[place::8].mean().item()
        assert abs(share - rate) < 5 * spread * 8**0.5
    together = (flat[1:] * flat[:-1]).mean().item()
    assert abs(together - rate * rate) < 5 * rate / x.numel() ** 0.5
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, y.detach())


def test_the_seed_decides_and_evaluation_drops_nothing() -> None:
    layer, x = Dropout(0.5), torch.ones(1000)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(layer(x))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert layer.eval()(x) is x


@pytest.mark.parametrize("rate", [0.1, 1.0, -0.25, 1 / 512])
def test_a_rate_that_bytes_cannot_give_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="256ths"):
        Dropout(rate)
