"""Update rules with a state: held against torch.optim in one process, cut into ranges, resumed, and refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.core.errors import DataError, UsageError
from tests.support import optimisers
from tests.support.configs import make_config
from tests.support.virtual_runs import RESUME, final, virtual
from trainer.checkpoints.read import read_slice_range
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import write_slice, write_state
from trainer.config import Config
from trainer.context import RunContext
from trainer.coordination.adam import AdamSlice
from trainer.coordination.budget import Budget
from trainer.coordination.coordinator import Coordinator
from trainer.coordination.orders import StepMeasurements
from trainer.models.own_optimiser import probe
from trainer.protocols.k_bsp import KBSP
from trainer.rules import build_slice, slots_of
from trainer.simulation.compute import Quadratic
from trainer.simulation.replay import replay

OWN = "tests.support.optimisers:"
RATE = 0.01
GRADIENTS = np.random.default_rng(0).normal(size=(40, 3, 10)).astype(np.float32)  # updates, workers, parameters
START = np.linspace(-1, 1, 10, dtype=np.float32)


def config_for(optimiser: str, **values: Any) -> Config:
    return make_config(optimiser=optimiser, protocol="bsp", **values)


def by_slices(optimiser: str, bounds: tuple[int, ...]) -> np.ndarray:
    """Return the parameters after all updates, of servers that hold ranges of them."""
    config = config_for(optimiser)
    parts = []
    for begin, end in pairwise(bounds):
        state = np.zeros(slots_of(config) * (end - begin), np.float32)
        part = build_slice(config, 3, START[begin:end].copy(), state)
        for update, gradients in enumerate(GRADIENTS):
            # Either all at once, or as they arrive.
            if update % 2:
                part.accumulate([gradients[0][begin:end]], [1.0])
            part.apply([each[begin:end] for each in gradients[update % 2 :]], RATE / 3, [1.0] * (3 - update % 2))
        parts.append(part.values)
    return np.concatenate(parts)


def in_one_process(make: Any) -> np.ndarray:
    """Return the parameters after the steps of a torch optimiser by the mean gradients."""
    parameter = torch.nn.Parameter(torch.from_numpy(START.copy()))
    optimiser = make([parameter])
    optimiser.param_groups[0]["lr"] = RATE
    for gradients in GRADIENTS:
        parameter.grad = torch.from_numpy(gradients.mean(0))
        optimiser.step()
    return parameter.detach().numpy()


@pytest.mark.parametrize(
    ("optimiser", "make"),
    [("adam", optimisers.adam)]
    + [(f"{OWN}{name}", getattr(optimisers, name)) for name in ("adam", "adamw", "nesterov", "rmsprop", "plain")],
)
def test_servers_update_like_torch_in_one_process(optimiser: str, make: Any) -> None:
    whole = by_slices(optimiser, (0, 10))
    np.testing.assert_allclose(whole, in_one_process(make), rtol=0, atol=1e-6)
    assert by_slices(optimiser, (0, 3, 4, 10)).tobytes() == whole.tobytes()


@pytest.mark.parametrize("optimiser", ["sgd", "adam", f"{OWN}rmsprop"])
def test_weights_by_examples_do_not_scale_the_rate(optimiser: str) -> None:
    """Mini-batches of Bernoulli sampling that are equal by chance have the update of mini-batches of a fixed size."""
    config = config_for(optimiser)
    values = []
    for by_examples in (False, True):
        coordinator = Coordinator(KBSP(2), Budget(2, 4, 4), rate=lambda epoch: RATE / 2, by_examples=by_examples)
        for worker in range(2):
            coordinator.join(0, worker, 1, 0.0)
        list(coordinator.advance(0.0))
        for worker in range(2):
            coordinator.push(0, worker, 1, 0, 1.0, StepMeasurements(20, 0.5, 1, 1.0))
        [(order, _)] = coordinator.advance(1.0)
        assert order.learning_rate
        part = build_slice(config, 2, START.copy(), np.zeros(slots_of(config) * 10, np.float32))
        part.apply(list(GRADIENTS[0][:2]), order.learning_rate, [share.weight for share in order.shares], order.scale)
        values.append(part.values)
    np.testing.assert_allclose(values[1], values[0], rtol=0, atol=1e-6)


def test_statistics_are_merged_as_with_sgd() -> None:
    values = np.concatenate([START, np.ones(2, np.float32)])
    part = AdamSlice(values, np.zeros(20, np.float32), config_for("adam").momentum_of(2), 2, "changes")
    gradient = np.concatenate([GRADIENTS[0][0], np.full(2, 0.5, np.float32)])
    part.apply([gradient, gradient], RATE, [1.0, 1.0])
    assert part.values[10:].tolist() == [1.5, 1.5]


def checkpoint(root: Path, bounds: tuple[int, ...], momentum: np.ndarray, slots: int) -> None:
    """A checkpoint of several servers, of ten parameters and two statistics."""
    total = 12
    for index, (begin, end) in enumerate(pairwise(bounds)):
        part = momentum[slots * min(begin, 10) : slots * min(end, 10)]
        values = np.arange(begin, end, dtype=np.float32)
        write_slice(folder_of(root, 1), index, len(bounds) - 1, 1, begin, end, total, values, part, 1, slots)
    about: dict[str, Any] = {"num_servers": len(bounds) - 1, "num_parameters": 10, "num_buffers": 2, "identity": ""}
    write_state(folder_of(root, 1), RunState(1, 1, 0, 1, 0.0, None, False, {0: 1}, 0.0, **about))


def test_any_servers_read_the_state_of_others(tmp_path: Path) -> None:
    momentum = np.arange(20, dtype=np.float32)
    checkpoint(tmp_path, (0, 5, 11, 12), momentum, 2)
    for begin, end in ((0, 12), (3, 7), (9, 12), (10, 12)):
        values, state = read_slice_range(tmp_path, 1, begin, end)
        assert values.tolist() == list(range(begin, end))
        assert state.tolist() == momentum[2 * begin : 2 * min(end, 10)].tolist()


def test_a_state_of_another_size_is_damage(tmp_path: Path) -> None:
    checkpoint(tmp_path, (0, 12), np.arange(10, dtype=np.float32), 2)
    with pytest.raises(DataError):
        read_slice_range(tmp_path, 1, 0, 12)


@pytest.mark.parametrize("optimiser", ["adam", f"{OWN}adamw"])
def test_a_run_of_bsp_equals_a_loop_of_torch(tmp_path: Path, optimiser: str) -> None:
    values: dict[str, Any] = {"optimiser": optimiser, "learning_rate": RATE, "recipe": "constant", "weight_decay": 0.0}
    done = virtual(tmp_path / "run", "bsp", servers=2, **values)
    config = make_config("", tmp_path / "run", batch_size=40)
    compute = Quadratic(RunContext.from_config(config, tmp_path / "run"), 4)
    parameter = torch.nn.Parameter(torch.from_numpy(compute.start()))
    make = optimisers.adam if optimiser == "adam" else optimisers.adamw
    stepper = make([parameter])
    stepper.param_groups[0]["lr"] = RATE
    for clock in range(30):
        now = parameter.detach().numpy().copy()
        vectors = [compute.step(worker, clock, [now]).vector for worker in range(4)]
        parameter.grad = torch.from_numpy(np.mean(vectors, axis=0))
        stepper.step()
    np.testing.assert_allclose(final(done), parameter.detach().numpy(), rtol=0, atol=1e-6)
    reduced = virtual(tmp_path / "reduced", exchange="all-reduce", **values)
    assert final(reduced).tobytes() == final(done).tobytes()


@pytest.mark.parametrize("protocol", ["bsp", "asp", "k-batch-asp"])
@pytest.mark.parametrize("optimiser", ["adam", f"{OWN}rmsprop"])
def test_a_resumed_run_has_the_bits_of_one_start(tmp_path: Path, protocol: str, optimiser: str) -> None:
    values: dict[str, Any] = {"optimiser": optimiser, "recipe": "constant", "servers": 2}
    values |= {"k": 2} if protocol == "k-batch-asp" else {}
    whole = virtual(tmp_path / "whole", protocol, **values)
    virtual(tmp_path / "run", protocol, steps=12, **values)
    resumed = virtual(tmp_path / "run", protocol, RESUME, **values)
    if protocol == "bsp":
        assert final(resumed).tobytes() == final(whole).tobytes()
    assert replay(resumed.output).is_equal
    with pytest.raises(UsageError, match="--optimiser"):
        virtual(tmp_path / "run", protocol, RESUME, **values | {"optimiser": "sgd", "steps": 40})


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("clipping", "does not treat every parameter alone"),
        ("secretive", "steps otherwise after its state was restored"),
        ("lbfgs", "fails in its step"),
        ("scheduled", "fails after its state was restored: TypeError: .*; a restored counter is a float32 tensor"),
        ("careless", "fails in its step: KeyError: 'warmup'"),
        ("impatient", "fails: KeyError: 'betas'"),
        ("leaving", r"fails: it calls sys.exit\(0\)"),
        ("replacing", "replaces the parameter's tensor, so that no step would reach the model; change it in place"),
        ("nothing", "returned a NoneType: it must return a torch.optim.Optimizer with one group"),
        ("absent", "has no function absent"),
    ],
)
def test_an_optimiser_that_servers_cannot_hold_is_refused(tmp_path: Path, name: str, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        virtual(tmp_path / "run", "bsp", optimiser=f"{OWN}{name}")
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_default_type_of_the_caller_changes_no_state() -> None:
    probe.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        assert probe(f"{OWN}adam").arrays == ("exp_avg", "exp_avg_sq")
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_state_of_torchs_optimisers_is_known() -> None:
    arrays = {name: probe(f"{OWN}{name}").arrays for name in ("adam", "adamw", "nesterov", "rmsprop", "plain")}
    assert arrays == {
        "adam": ("exp_avg", "exp_avg_sq"),
        "adamw": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
        "nesterov": ("momentum_buffer",),
        "rmsprop": ("square_avg", "momentum_buffer", "grad_avg"),
        "plain": (),
    }


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"exchange": "d-psgd"}, "which --exchange d-psgd lacks: leave out one of them"),
        ({"exchange": "sync-switch"}, "which --exchange sync-switch lacks"),
        ({"protocol": "downpour", "push_every": 1}, "--protocol downpour pushes the steps of sgd"),
        ({"momentum_rule": "nesterov"}, "--momentum-rule nesterov is a rule of sgd, not of --optimiser adam"),
        ({"optimiser": "adagrad"}, "--optimiser must be sgd, adam or module:function, got 'adagrad'"),
    ],
)
def test_what_cannot_hold_a_state_is_refused(values: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        make_config(**{"optimiser": "adam"} | values)


def test_the_defaults_are_those_of_torch() -> None:
    config = config_for("adam")
    assert (config.learning_rate, config.coefficient) == (1e-3, 0.9)
    assert Config.from_json(config.to_json()) == config
