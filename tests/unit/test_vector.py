"""A model as views of a flat vector against an untouched copy trained by torch.optim, and through real memory maps."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import nn

from pipeline.core.errors import UsageError
from tests.support.configs import make_config
from trainer.data.batches import Batch
from trainer.models import ModelInput, model_from_json
from trainer.models.build import NetworkAndTask, build
from trainer.models.flat_vector import ALIGNMENT, FlatModel
from trainer.models.tasks import Task
from trainer.worker.step import DeviceCopies, Step

SHAPE = (3, 8, 8)
KINDS = [("resnet20", {}), ("resnet20", {"shortcut": "conv", "norm": "group"}), ("cnn", {}), ("perceptron", {})]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _make(name: str = "cnn", **options: Any) -> NetworkAndTask:
    return build(model_from_json({"name": name, **options}), ModelInput(SHAPE, 4), seed=1)


def _attached(model: nn.Module, device: str = "cpu") -> FlatModel:
    flat = FlatModel(model)
    values = torch.from_numpy(flat.read()).to(device)
    flat.attach(values, torch.zeros(flat.num_parameters, device=device))
    return flat


def _batch(step: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    images, labels = torch.randn(6, *SHAPE, generator=generator), torch.randint(4, (6,), generator=generator)
    return images.to(device), labels.to(device)


def _same(flat: FlatModel, model: nn.Module) -> bool:
    ours = [*flat.model.parameters(), *flat.model.buffers()]
    return all(torch.equal(a, b) for a, b in zip(ours, [*model.parameters(), *model.buffers()], strict=True))


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_momentum_sgd_on_the_vector_equals_torch_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    built = _make(name, **options)
    plain = deepcopy(built.model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    flat = _attached(built.model)
    momentum = torch.zeros(flat.num_parameters)
    for step in range(3):
        images, labels = _batch(step)
        for model in (plain, flat.model):
            torch.manual_seed(step)  # dropout
            built.task.loss(model(images), labels).backward()
        assert torch.equal(flat.gradients, torch.cat([p.grad.flatten() for p in plain.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
        momentum.mul_(0.9).add_(flat.gradients)
        flat.values[: flat.num_parameters].sub_(momentum, alpha=0.1)
        flat.gradients.zero_()
        assert _same(flat, plain)


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_weight_decay_equals_an_l2_term_inside_the_loss(name: str, options: dict[str, Any]) -> None:
    built = _make(name, **options)
    plain = deepcopy(built.model)
    flat = _attached(built.model)
    images, labels = _batch(0)
    torch.manual_seed(0)
    term = 0.01 / 2 * sum((p**2).sum() for p in plain.parameters() if p.ndim > 1)
    (built.task.loss(plain(images), labels) + term).backward()
    torch.manual_seed(0)
    built.task.loss(flat.model(images), labels).backward()
    found = flat.weight_decay_(0.01)
    torch.testing.assert_close(found, term.detach())
    torch.testing.assert_close(flat.gradients, torch.cat([p.grad.flatten() for p in plain.parameters()]))


def test_backward_adds_to_the_gradients_that_are_there() -> None:
    built = _make("perceptron")
    flat = _attached(built.model)
    images, labels = _batch(0)
    built.task.loss(flat.model(images), labels).backward()
    once = flat.gradients.clone()
    built.task.loss(flat.model(images), labels).backward()
    assert once.any()
    torch.testing.assert_close(flat.gradients, 2 * once)


def test_the_vector_holds_parameters_then_running_statistics() -> None:
    built = _make("cnn")
    flat, model = FlatModel(built.model), built.model
    parameters = [p.detach().flatten() for p in model.parameters()]
    buffers = [b for name, b in model.named_buffers() if "num_batches" not in name]
    assert np.array_equal(flat.read(), torch.cat(parameters + buffers).numpy())
    assert flat.num_parameters == sum(len(p) for p in parameters)
    assert flat.num_buffers == 2 * (32 + 64 + 128)


@given(st.lists(st.sampled_from(["linear", "norm", "frozen", "conv"]), max_size=6), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_slots_tile_the_vector_and_read_back(kinds: Any, width: int) -> None:
    layers = {
        "linear": lambda: nn.Linear(width, width),
        "norm": lambda: nn.BatchNorm1d(width),
        "frozen": lambda: nn.Linear(width, width).requires_grad_(False),
        "conv": lambda: nn.Conv2d(width, 2, 3, bias=False),
    }
    flat = FlatModel(nn.Sequential(nn.Linear(2, 1), *(layers[kind]() for kind in kinds)))
    ends = [0, *(slot.end for slot in flat.slots)]
    assert [slot.begin for slot in flat.slots] == ends[:-1]
    assert ends[-1] == flat.num_parameters + flat.num_buffers
    numbers = np.arange(ends[-1], dtype=np.float32)
    flat.attach(torch.from_numpy(numbers.copy()), torch.zeros(flat.num_parameters))
    assert np.array_equal(flat.read(), numbers)
    saved = {k: v for k, v in flat.model.state_dict().items() if v.is_floating_point()}
    named = flat.named(numbers)
    assert named.keys() == saved.keys()
    assert all(np.array_equal(named[name], tensor) for name, tensor in saved.items())


def test_a_memory_map_holds_parameters_and_statistics(tmp_path: Path) -> None:
    built = _make("cnn")
    flat = FlatModel(built.model)
    start = flat.read()
    start.tofile(tmp_path / "values")
    ours = np.memmap(tmp_path / "values", np.float32, mode="r+")
    flat.attach(torch.from_numpy(ours), torch.zeros(flat.num_parameters))
    theirs = np.memmap(tmp_path / "values", np.float32, mode="r+")  # another mapping, as another process has
    theirs[: flat.num_parameters] = 0.25
    assert all((p == 0.25).all() for p in built.model.parameters())
    built.model(_batch(0)[0])
    assert np.array_equal(theirs, flat.read())
    assert not np.array_equal(theirs[flat.num_parameters :], start[flat.num_parameters :])


def test_a_saved_file_loads_into_a_plain_model_with_the_same_outputs(tmp_path: Path) -> None:
    built, plain = _make("resnet20"), _make("resnet20").model
    flat = _attached(built.model)
    flat.values.mul_(1.5)
    save_file(flat.named(flat.read()), tmp_path / "model.safetensors")
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))  # strict: every name is there, and no other
    images, _ = _batch(0)
    assert torch.equal(plain.eval()(images), built.model.eval()(images))


def test_a_model_can_be_attached_without_gradients_for_evaluation() -> None:
    built = _make("cnn")
    flat = FlatModel(built.model)
    flat.attach(torch.zeros(flat.num_parameters + flat.num_buffers))
    assert not built.model.eval()(_batch(0)[0]).any()
    assert all(p.grad is None for p in built.model.parameters())


def test_frozen_parameters_travel_with_the_buffers_unchanged() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5).requires_grad_(False), nn.Linear(5, 4))
    before = model[1].weight.clone()
    flat = _attached(model)
    assert (flat.num_parameters, flat.num_buffers) == (24, 965)
    assert [slot.name for slot in flat.slots] == ["2.weight", "2.bias", "1.weight", "1.bias"]
    model(_batch(0)[0]).sum().backward()
    assert flat.gradients.all()
    assert torch.equal(model[1].weight, before)


def test_a_buffer_that_state_dict_leaves_out_is_left_out() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("scratch", torch.ones(3), persistent=False)
    assert [slot.name for slot in FlatModel(model).slots] == ["weight", "bias"]


def test_weights_in_channels_last_order_are_laid_out_by_rows() -> None:
    model = nn.Conv2d(3, 4, 3)
    flat, turned = FlatModel(model), FlatModel(deepcopy(model).to(memory_format=torch.channels_last))
    assert np.array_equal(flat.read(), turned.read())
    _attached(turned.model)
    images = _batch(0)[0]
    torch.testing.assert_close(turned.model(images), model(images))


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def _mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).half())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2).double(), "weight of Linear is torch.float64: only float32"),
        (_mixed(), "1.weight of Sequential is torch.float16"),
        (_tied(), "0.weight and 1.weight of Sequential share memory"),
        (nn.Flatten(), "Flatten has no trainable parameters"),
        (nn.Linear(2, 2).requires_grad_(False), "Linear has no trainable parameters"),
    ],
)
def test_a_model_that_the_vector_cannot_hold_is_refused_in_one_line(model: nn.Module, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        FlatModel(model)
    assert "\n" not in str(refused.value)


def test_vectors_of_the_wrong_length_or_type_are_refused() -> None:
    flat = FlatModel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="values must be 6 float32 elements, got"):
        flat.attach(torch.zeros(7))
    with pytest.raises(ValueError, match="gradients must be 6 float32 elements, got"):
        flat.attach(torch.zeros(6), torch.zeros(6, dtype=torch.float64))


def test_the_whole_model_follows_the_vector_to_its_device() -> None:
    flat = _attached(_make("cnn").model, "meta")  # a device without numbers, which every machine has
    tensors = [*flat.model.parameters(), *(p.grad for p in flat.model.parameters()), *flat.model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_an_aligned_vector_trains_as_one_without_gaps(name: str, options: dict[str, Any]) -> None:
    plain = _attached(_make(name, **options).model)
    flat = FlatModel(_make(name, **options).model, alignment=ALIGNMENT)
    copies = DeviceCopies(flat, torch.device("cpu"))
    flat.attach(copies.values, copies.gradients[: flat.buffers_begin])
    assert all(slot.begin % ALIGNMENT == 0 for slot in flat.slots)
    copies.load(plain.values)
    assert _same(flat, plain.model)
    task = _make(name, **options).task
    decay = [_gradient(each, task) for each in (plain, flat)]
    pushed = torch.zeros(len(plain.values))
    copies.store(pushed)
    assert torch.equal(pushed[: plain.num_parameters], plain.gradients)
    assert decay[0] == pytest.approx(decay[1], rel=1e-5)
    assert np.array_equal(flat.read(), plain.read())  # BatchNorm's statistics, too


def _gradient(flat: FlatModel, task: Task) -> float:
    """Compute the gradient of a mini-batch with weight decay; return the L2 term."""
    images, labels = _batch(0)
    torch.manual_seed(0)  # dropout
    task.loss(flat.model(images), labels).backward()
    return float(flat.weight_decay_(1e-3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["cnn", "resnet20"])
def test_a_step_on_a_gpu_is_that_of_the_cpu_and_repeatable(name: str, precision: str) -> None:
    rng = np.random.default_rng(0)
    batch = Batch(torch.from_numpy(rng.random((128, *SHAPE), np.float32)), torch.from_numpy(rng.integers(0, 4, 128)))
    start = FlatModel(_make(name).model).read()
    config, pushed = make_config(steps=1, precision=precision), []
    for device in ("cpu", "cuda", "cuda"):
        pushed.append(np.zeros_like(start))
        step = Step(config, _make(name), start.copy(), pushed[-1], torch.device(device), 2)
        assert step(batch, 0)
    np.testing.assert_array_equal(pushed[2], pushed[1])
    if name == "resnet20":  # dropout of the cnn has other random numbers on a GPU
        share = {"fp32": 0.02, "bf16": 0.1}[precision]
        assert np.linalg.norm(pushed[1] - pushed[0]) < share * np.linalg.norm(pushed[0])


@pytest.mark.parametrize("name", ["cnn", "resnet20"])
def test_a_step_in_bfloat16_is_torchs_and_repeats_its_bits(name: str) -> None:
    """The oracle computes the same mini-batch by torch.autocast alone, without the step."""
    images, labels = _batch(0)
    start = FlatModel(_make(name).model).read()
    pushed, losses = {}, {}
    for run, precision in (("fp32", "fp32"), ("bf16", "bf16"), ("again", "bf16")):
        config = make_config(steps=1, precision=precision, weight_decay=0.0)
        pushed[run] = np.zeros_like(start)
        outcome = Step(config, _make(name), start.copy(), pushed[run], torch.device("cpu"), 2)(Batch(images, labels), 0)
        assert outcome
        losses[run] = outcome[0]
    plain = _make(name)
    torch.manual_seed(0)  # dropout
    with torch.autocast("cpu", torch.bfloat16):
        outputs = plain.model(images)
    loss = plain.task.loss(outputs.float(), labels)
    loss.backward()
    expected = np.concatenate([parameter.grad.numpy().ravel() for parameter in plain.model.parameters()])
    gradients = {run: vector[: len(expected)] for run, vector in pushed.items()}
    np.testing.assert_array_equal(gradients["bf16"], gradients["again"])
    np.testing.assert_allclose(gradients["bf16"], expected, rtol=1e-5, atol=1e-7)
    assert losses["bf16"] == pytest.approx(loss.item(), rel=1e-6)
    distance = np.linalg.norm(gradients["bf16"] - gradients["fp32"]) / np.linalg.norm(gradients["fp32"])
    assert 1e-4 < distance < 0.3, "bfloat16 has eight significant bits"


def test_a_step_of_no_examples_pushes_unchanged_statistics() -> None:
    built = _make("resnet20")
    flat = FlatModel(built.model)
    pulled = np.random.default_rng(1).random(flat.num_parameters + flat.num_buffers).astype(np.float32)
    pushed = np.full_like(pulled, 7)
    step = Step(make_config(steps=1), built, pulled, pushed, torch.device("cpu"), 1)
    assert flat.num_buffers > 0
    assert step(Batch(torch.zeros(0, 3, 8, 8), torch.zeros(0, dtype=torch.int64)), 0) == (0.0, 0)
    assert not pushed[: flat.num_parameters].any()
    np.testing.assert_array_equal(pushed[flat.num_parameters :], pulled[flat.num_parameters :])


def test_a_step_seeds_no_device_that_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed seeds all of them, which takes longer than the rest of a small step."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    built = _make("cnn")
    pulled = FlatModel(built.model).read()
    step = Step(make_config(steps=1), built, pulled, np.zeros_like(pulled), torch.device("cpu"), 1)
    images, labels = _batch(0)
    assert step(Batch(images, labels), 5)
    assert not seeded
