"""Models against formulas, plain re-computations and torch's own losses; the ways a user's own model can be wrong."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipeline.core import command_line
from pipeline.core.errors import UsageError
from trainer.flags import build_parser, config_of
from trainer.models import MODELS, ModelInput, devices, model_from_json
from trainer.models.build import NetworkAndTask, build
from trainer.models.devices import EVALUATOR, device_of, load_libraries, preserve_torch_state
from trainer.models.networks import datagossip
from trainer.models.networks.dropout import Dropout
from trainer.models.tasks import Classification, LeastSquares

SHAPES = [(3, 32, 32), (1, 9, 18), (4, 8, 8)]  # CIFAR's, grey and odd, the smallest that every model takes
Shape = tuple[int, int, int]
RESNETS = {"resnet20": 3, "resnet32": 5, "resnet56": 9}
WIDE = {"wrn16_4": (16, 4), "wrn28_10": (28, 10)}
LARGE = {
    "resnet18",
    "resnet34",
    "resnet50",
    "wrn28_10",
}  # too slow for every matrix; wrn16_4 has the layers of wrn28_10
QUICK = [name for name in MODELS if name not in LARGE]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _make(
    name: str,
    shape: Shape = (3, 8, 8),
    classes: int = 10,
    seed: int = 0,
    *,
    targets: bool = False,
    **options: Any,
) -> NetworkAndTask:
    return build(model_from_json({"name": name, **options}), ModelInput(shape, classes, targets), seed)


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _batch(shape: Shape, classes: int = 10, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, *shape, generator=generator), torch.randint(classes, (rows,), generator=generator)


def _resnet_size(m: int, channels: int, classes: int, shortcut: str) -> int:
    """A stage has 2m convolutions with two numbers of normalisation a channel; all but its first keep the width."""
    stages = [(16, 16), (16, 32), (32, 64)]
    convolutions = 9 * channels * 16 + sum(9 * (c * w + (2 * m - 1) * w * w) for c, w in stages)
    normalisations = 2 * (16 + 2 * m * (16 + 32 + 64))
    shortcuts = sum(c * w + 2 * w for c, w in stages) if shortcut == "conv" else 0
    return convolutions + normalisations + shortcuts + 64 * classes + classes


@pytest.mark.parametrize(("name", "size"), [("resnet20", 269_722), ("resnet32", 464_154), ("resnet56", 853_018)])
def test_a_resnet_has_the_published_number_of_parameters(name: str, size: int) -> None:
    assert _size(_make(name).model) == size == _resnet_size(RESNETS[name], 3, 10, "pad")


@pytest.mark.parametrize("name", RESNETS)
@pytest.mark.parametrize("shortcut", ["pad", "conv"])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_the_size_of_a_resnet_follows_the_formula(name: str, shortcut: str, norm: str) -> None:
    model = _make(name, (1, 8, 8), 7, shortcut=shortcut, norm=norm).model
    assert _size(model) == _resnet_size(RESNETS[name], 1, 7, shortcut)
    assert (sum(1 for _ in model.buffers()) == 0) == (norm == "group")


def _size_at_once(name: str, classes: int, channels: int = 3) -> int:
    """The size of a network for 32x32 images, without memory for its parameters."""
    with torch.device("meta"):
        return _size(MODELS[name]().make((channels, 32, 32), classes))


def _wide_size(depth: int, k: int, channels: int, classes: int) -> int:
    """Per group: 2m 3x3 convolutions, the first from the width before, and a 1x1 shortcut. A normalisation, two numbers a
    channel, precedes each 3x3 convolution but the very first, and the last layer."""
    m = (depth - 4) // 6
    groups = [(16, 16 * k), (16 * k, 32 * k), (32 * k, 64 * k)]
    convolutions = 9 * channels * 16 + sum(9 * (c * w + (2 * m - 1) * w * w) + c * w for c, w in groups)
    normalisations = 2 * (sum(c + (2 * m - 1) * w for c, w in groups) + 64 * k)
    return convolutions + normalisations + 64 * k * classes + classes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("wrn16_4", 2_748_890), ("wrn28_10", 36_479_194)])
def test_a_wide_resnet_has_the_published_number_of_parameters(name: str, size: int) -> None:
    """36.5 M of the paper's table 1, and the exact counts of the authors' code."""
    assert _size_at_once(name, 10) == size == _wide_size(*WIDE[name], 3, 10)
    assert _size_at_once(name, 100, channels=1) == _wide_size(*WIDE[name], 1, 100)


def _bottleneck_size(classes: int) -> int:
    """Per block: 1x1, 3x3 and 1x1 convolutions with two numbers of normalisation a channel; a shortcut in each first."""
    size, before = 9 * 3 * 64 + 2 * 64, 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        size += before * 4 * width + 2 * 4 * width
        for _ in range(blocks):
            size += before * width + 9 * width**2 + 4 * width**2 + 2 * (width + width + 4 * width)
            before = 4 * width
    return size + 2048 * classes + classes


@pytest.mark.slow
def test_resnet50_has_the_published_size_but_for_its_stem() -> None:
    """25,557,032 parameters for ImageNet's 1000 classes, with a 7x7 stem that has 9,408 weights instead of 1,728."""
    assert _size_at_once("resnet50", 10) == 23_520_842 == _bottleneck_size(10)
    assert _size_at_once("resnet50", 1000) == 25_557_032 - 9_408 + 1_728


def _basic_size(blocks: tuple[int, ...], classes: int, stem: int) -> int:
    """Two 3x3 convolutions per block with two numbers of normalisation a channel; shortcuts where the width changes."""
    size, before = stem + 2 * 64, 64
    for width, count in zip((64, 128, 256, 512), blocks, strict=True):
        size += before * width + 2 * width if before != width else 0
        for _ in range(count):
            size += 9 * before * width + 9 * width**2 + 4 * width
            before = width
    return size + 512 * classes + classes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "blocks", "published"),
    [("resnet18", (2, 2, 2, 2), 11_689_512), ("resnet34", (3, 4, 6, 3), 21_797_672)],
)
def test_resnet18_and_resnet34_have_the_published_sizes(name: str, blocks: tuple[int, ...], published: int) -> None:
    """The sizes of torchvision's networks with their own stem, for ImageNet's 1000 classes."""
    assert _size(_make(name, classes=1000, stem="7x7").model) == published == _basic_size(blocks, 1000, 9_408)
    assert _size_at_once(name, 10) == _basic_size(blocks, 10, 1_728)


def _convolved(tensors: Iterator[torch.Tensor], x: torch.Tensor, stride: int) -> torch.Tensor:
    kernel = next(tensors)
    return F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)


def _standardised(tensors: Iterator[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """BatchNorm in eval mode."""
    weight, bias, mean, var, _ = (next(tensors) for _ in range(5))
    y = (x - mean[:, None, None]) / torch.sqrt(var[:, None, None] + 1e-5)
    return y * weight[:, None, None] + bias[:, None, None]


def _plain_wide(tensors: Iterator[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """WRN-16-4: two blocks a group, normalisation and ReLU before each convolution."""
    x = _convolved(tensors, x, 1)
    for group in range(3):
        for block in range(2):
            stride = 2 if group and not block else 1
            activated = _standardised(tensors, x).relu()
            y = _convolved(tensors, activated, stride)
            y = _convolved(tensors, _standardised(tensors, y).relu(), 1)
            x = y + (x if block else _convolved(tensors, activated, stride))
    x = _standardised(tensors, x).relu()
    return x.mean((2, 3)) @ next(tensors).T + next(tensors)


def _plain_bottleneck(tensors: Iterator[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """ResNet-50 with the stride in the 3x3 convolution and a projection in the first block of each stage."""

    def layer(x: torch.Tensor, stride: int = 1) -> torch.Tensor:
        return _standardised(tensors, _convolved(tensors, x, stride))

    x = layer(x).relu()
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = layer(layer(layer(x).relu(), stride).relu())
            x = (y + (x if block else layer(x, stride))).relu()
    return x.mean((2, 3)) @ next(tensors).T + next(tensors)


def _plain_basic(tensors: Iterator[torch.Tensor], x: torch.Tensor, stem: int) -> torch.Tensor:
    """ResNet-18, with the stride in the first convolution of a block and a projection where width or size change."""

    def layer(x: torch.Tensor, stride: int = 1) -> torch.Tensor:
        return _standardised(tensors, _convolved(tensors, x, stride))

    x = layer(x, stem).relu()
    if stem > 1:
        x = F.max_pool2d(x, 3, 2, 1)
    for stage in range(4):
        for block in range(2):
            stride = 2 if stage and not block else 1
            y = layer(layer(x, stride).relu())
            x = (y + (layer(x, stride) if stride > 1 else x)).relu()
    return x.mean((2, 3)) @ next(tensors).T + next(tensors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "plain"),
    [
        ("wrn16_4", {}, _plain_wide),
        ("resnet50", {}, _plain_bottleneck),
        ("resnet18", {}, partial(_plain_basic, stem=1)),
        ("resnet18", {"stem": "7x7"}, partial(_plain_basic, stem=2)),
    ],
)
def test_large_models_compute_the_papers_formulas(
    name: str, options: dict[str, Any], plain: Callable[[Iterator[torch.Tensor], torch.Tensor], torch.Tensor]
) -> None:
    shape = (1, 9, 14)
    model = _make(name, shape, **options).model
    images, _ = _batch(shape)
    for _ in range(3):
        model(images * 3 + 1)  # so that the running statistics are not 0 and 1
    model.eval()
    tensors = [t.double() for t in model.state_dict().values()]
    rest = iter(tensors)
    torch.testing.assert_close(model(images).double(), plain(rest, images.double()), rtol=1e-4, atol=1e-5)
    assert next(rest, None) is None, "every tensor is used"


def _plain_resnet(tensors: Iterator[torch.Tensor], x: torch.Tensor, shortcut: str) -> torch.Tensor:
    """The paper's formula in float64, eval mode, tensor after tensor in the order of their making."""

    def conv_bn(x: torch.Tensor, stride: int) -> torch.Tensor:
        return _standardised(tensors, _convolved(tensors, x, stride))

    x = conv_bn(x, 1).relu()
    for stage, width in enumerate((16, 32, 64)):
        for block in range(3):
            stride = 2 if stage and not block else 1
            y = conv_bn(conv_bn(x, stride).relu(), 1)
            if block == 0 and shortcut == "conv":
                x = conv_bn(x, stride)
            elif stride == 2:
                padded = torch.zeros_like(y)
                padded[:, width // 4 : 3 * width // 4] = x[:, :, ::2, ::2]
                x = padded
            x = (x + y).relu()
    return x.mean((2, 3)) @ next(tensors).T + next(tensors)


@pytest.mark.parametrize("shortcut", ["pad", "conv"])
@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 9, 14)])
def test_resnet20_computes_the_formula_of_the_paper(shortcut: str, shape: Shape) -> None:
    model = _make("resnet20", shape, shortcut=shortcut).model
    images, _ = _batch(shape)
    for _ in range(3):
        model(images * 3 + 1)  # so that the running statistics are not 0 and 1
    model.eval()
    plain = _plain_resnet((t.double() for t in model.state_dict().values()), images.double(), shortcut)
    torch.testing.assert_close(model(images).double(), plain, rtol=1e-4, atol=1e-5)


def test_a_resnet_starts_he_normal_with_a_small_last_layer() -> None:
    model = _make("resnet20").model
    for kernel in (p for p in model.parameters() if p.ndim == 4):
        wanted = math.sqrt(2 / (kernel.shape[1] * 9))
        assert kernel.std().item() == pytest.approx(wanted, rel=5 / math.sqrt(2 * kernel.numel()))  # 5 sigma
    widest = max((p for p in model.parameters() if p.ndim == 4), key=torch.numel)
    assert (widest / widest.std()).pow(4).mean().item() == pytest.approx(3, rel=0.1)  # a normal's; a uniform has 1.8
    assert model.fc.weight.std().item() == pytest.approx(0.01, rel=5 / math.sqrt(2 * 640))
    assert not model.fc.bias.any()


def test_running_statistics_of_a_resnet_take_0_003_of_a_batch() -> None:
    model = _make("resnet20").model
    images, _ = _batch((3, 8, 8))
    seen = F.conv2d(images, model.conv.weight, padding=1)
    model(images)
    torch.testing.assert_close(model.norm.running_mean, 0.003 * seen.mean((0, 2, 3)))
    torch.testing.assert_close(model.norm.running_var, 0.997 + 0.003 * seen.var((0, 2, 3)))


@pytest.mark.parametrize("name", ["resnet20", "wrn16_4", "cnn"])
def test_with_group_normalisation_an_image_does_not_see_its_batch(name: str) -> None:
    shape = (3, 16, 16)
    images, _ = _batch(shape)

    def moved_by_company(norm: str) -> float:
        model = _make(name, shape, norm=norm).model
        for module in model.modules():
            if isinstance(module, Dropout):
                module.rate = 0.0
        return (model(images)[:2] - model(images[:2])).abs().max().item()

    assert moved_by_company("group") < 1e-5
    assert moved_by_company("batch") > 1e-3


def test_group_normalisation_normalises_eight_groups_of_channels() -> None:
    model = _make("resnet20", norm="group").model
    found = model.norm(_batch((16, 8, 8))[0] * 5 + 2).view(4, 8, -1)
    torch.testing.assert_close(found.mean(2), torch.zeros(4, 8))
    torch.testing.assert_close(found.var(2, correction=0), torch.ones(4, 8), rtol=1e-4, atol=1e-4)


def test_the_cnn_has_the_layers_of_the_figure() -> None:
    layers = [type(m).__name__ for m in _make("cnn", (3, 32, 32)).model.modules() if not list(m.children())]
    stage = ["Conv2d", "MaxPool2d", "ReLU", "BatchNorm2d", "Dropout"]
    assert layers == 3 * stage + ["Linear", "ReLU", "Dropout", "Linear"]
    kernels = 9 * (3 * 32 + 32 * 64 + 64 * 128) + 3 * (32 + 64 + 128)  # each channel: bias, and two of BatchNorm
    assert _size(_make("cnn", (3, 32, 32)).model) == kernels + (2048 + 1) * 128 + (128 + 1) * 10


def test_the_cnn_refuses_images_that_three_halvings_use_up() -> None:
    with pytest.raises(UsageError, match="8x8 or more, these are 7x32"):
        _make("cnn", (3, 7, 32))


@pytest.mark.parametrize(("classes", "outputs"), [(2, 1), (3, 3)])
def test_logistic_regression_of_two_classes_has_one_logit(classes: int, outputs: int) -> None:
    assert _size(_make("logistic", (1, 1, 28), classes).model) == outputs * (28 + 1)


def test_the_perceptron_is_28_15_15_2() -> None:
    shapes = [tuple(p.shape) for p in _make("perceptron", (1, 1, 28), 2).model.parameters()]
    assert shapes == [(15, 28), (15,), (15, 15), (15,), (2, 15), (2,)]


def test_the_perceptron_starts_glorot_uniform_without_bias() -> None:
    for p in _make("perceptron", (1, 1, 285), 15).model.parameters():
        bound = math.sqrt(6 / (p.shape[0] + p.shape[-1])) if p.ndim > 1 else 0.0
        assert 0.95 * bound <= p.abs().max().item() <= bound


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [*itertools.product(QUICK, SHAPES, (2, 10)), pytest.param("resnet50", (1, 9, 18), 7, marks=pytest.mark.slow)],
)
def test_every_model_takes_any_image_and_trains_every_parameter(name: str, shape: Shape, classes: int) -> None:
    built = _make(name, shape, classes)
    images, labels = _batch(shape, classes, rows=5)  # odd: labels in balance have no gradient at zero
    torch.manual_seed(0)
    outputs = built.model(images)
    loss = built.task.loss(outputs, labels)
    loss.backward()
    assert outputs.shape in {(5, classes), (5, classes - 1)}
    assert math.isfinite(loss.item())
    assert 0 <= int(built.task.correct(outputs, labels)) <= 5
    assert all(p.grad.any() for p in built.model.parameters() if p.ndim > 1)
    assert [*built.model.parameters()][-1].grad.any()


@pytest.mark.parametrize("name", QUICK)
def test_one_seed_gives_the_same_bits_whatever_was_drawn_before(name: str) -> None:
    torch.manual_seed(1)
    first = _make(name, seed=5).model.state_dict()
    torch.manual_seed(2)
    torch.randn(7)
    before = torch.get_rng_state()
    second = _make(name, seed=5).model.state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], second[key]) for key in first)


class NotifyingLock:
    """A lock that reports when a thread asks for it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_asked = threading.Event()

    def __enter__(self) -> None:
        self.is_asked.set()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_a_build_waits_for_a_simulation_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [parameter.detach() for parameter in _make("cnn").model.parameters()]
    networks: list[NetworkAndTask] = []
    thread = threading.Thread(target=lambda: networks.append(_make("cnn")))
    lock = NotifyingLock()
    monkeypatch.setattr(devices, "_TORCH_STATE_LOCK", lock)
    with preserve_torch_state():
        _make("cnn")  # in the thread of the simulation, which need not wait
        lock.is_asked.clear()
        thread.start()
        assert lock.is_asked.wait(60)
        assert not networks
    thread.join()
    assert all(map(torch.equal, networks[0].model.parameters(), expected))


@pytest.mark.parametrize("name", sorted(set(QUICK) - {"linear", "logistic"}))
def test_two_seeds_give_two_models(name: str) -> None:
    first, second = (next(_make(name, seed=seed).model.parameters()) for seed in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", ["linear", "logistic"])
def test_the_regressions_start_at_zero(name: str) -> None:
    assert not any(p.any() for p in _make(name, seed=3).model.parameters())


def test_dropout_repeats_when_the_global_generator_is_seeded() -> None:
    model = _make("cnn").model
    images, _ = _batch((3, 8, 8))
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(model(images))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


logits = st.lists(st.lists(st.floats(-20, 20, width=32), min_size=3, max_size=3), min_size=1, max_size=6)


@given(logits, st.data())
@settings(max_examples=40, deadline=None)
def test_losses_and_counts_equal_sums_over_examples(rows: list[list[float]], data: st.DataObject) -> None:
    labels = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    outputs, targets = torch.tensor(rows), torch.tensor(labels)
    right = sum(row.index(max(row)) == label for row, label in zip(rows, labels, strict=True))
    entropy = [math.log(sum(math.exp(z) for z in row)) - row[label] for row, label in zip(rows, labels, strict=True)]
    squares = [
        sum((z - (k == label)) ** 2 for k, z in enumerate(row)) / 2 for row, label in zip(rows, labels, strict=True)
    ]
    for task, losses in ((Classification(), entropy), (LeastSquares(), squares)):
        assert task.loss(outputs, targets).item() == pytest.approx(np.mean(losses), rel=1e-5, abs=1e-5)
        assert int(task.correct(outputs, targets)) == right


@pytest.mark.slow
def test_one_logit_is_cross_entropy_of_two_classes() -> None:
    z, labels = torch.tensor([[-2.0], [0.5], [3.0], [-0.1]]), torch.tensor([0, 0, 1, 1])
    both = torch.cat([torch.zeros(4, 1), z], dim=1)
    task = Classification()
    torch.testing.assert_close(task.loss(z, labels), F.cross_entropy(both, labels))
    assert int(task.correct(z, labels)) == int(task.correct(both, labels)) == 2


@pytest.mark.slow
def test_linear_regression_descends_to_least_squares() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 5)).astype(np.float32)
    targets = (features @ [1, -2, 3, 0, 0.5] + 4 + rng.normal(size=200)).astype(np.float32)
    built = _make("linear", (1, 1, 5), 1)
    optimizer = torch.optim.SGD(built.model.parameters(), lr=0.5)
    for _ in range(100):
        optimizer.zero_grad()
        outputs = built.model(torch.from_numpy(features).view(200, 1, 1, 5))
        loss = built.task.loss(outputs, torch.from_numpy(targets))
        loss.backward()
        optimizer.step()
    solution, residual, *_ = np.linalg.lstsq(np.c_[features, np.ones(200)], targets, rcond=None)
    found = torch.cat([p.detach().flatten() for p in built.model.parameters()]).numpy()
    assert found == pytest.approx(solution, abs=1e-4)
    assert loss.item() == pytest.approx(residual[0] / 400, rel=1e-4)
    assert int(built.task.correct(outputs, torch.from_numpy(targets))) == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet19", (), "resnet19 is neither one of resnet20, resnet32, .*nor a module:function"),
        ("net.py:make", (), "there is no module net in"),
        ("./net:make", (), "./net:make is neither one of"),
        ("net:", (), "net: is neither one of"),
        ("perceptron", ("--norm", "group"), "perceptron has no --norm group: .*resnet56, .*cnn"),
        ("cnn", ("--shortcut", "conv"), "cnn has no --shortcut conv: .*resnet56$"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(name: str, options: tuple[str, ...], message: str) -> None:
    needed = ["--shards", "s", "--output", "o", "--epochs", "1"]
    args = command_line.parse(build_parser(), [*needed, "--model", name, *options])
    with pytest.raises(UsageError, match=message) as refused:
        build(config_of(args).model, ModelInput((3, 8, 8), 10), seed=0)
    assert "\n" not in str(refused.value)


OWN = """
import torch
from torch import nn
number = 3
def good(image_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes), nn.Dropout())
def listed(image_shape, num_classes):
    return [1]
def raising(image_shape, num_classes):
    raise KeyError("width")
def wide(image_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes + 1))
def leaving(image_shape, num_classes):
    raise SystemExit(0)
class Net(nn.Module):
    def __init__(self, shape, outputs, step):
        super().__init__()
        self.linear = nn.Linear(shape[0] * shape[1] * shape[2], outputs)
        self.step = step
        self.register_buffer("mean", torch.zeros(()))
    def forward(self, images):
        outputs = self.linear(images.flatten(1))
        return self.step(self, outputs) if self.training else outputs
def average(net, outputs):
    net.mean = 0.9 * net.mean + 0.1 * outputs.detach().mean()
    return outputs
def average_in_place(net, outputs):
    net.mean.mul_(0.9).add_(1.0)
    return outputs + torch.rand(())
def clamp(net, outputs):
    net.linear.weight.data = net.linear.weight.data.clamp(-1, 1)
    return outputs
def averaging(image_shape, num_classes):
    return Net(image_shape, num_classes, average)
def clamping(image_shape, num_classes):
    return Net(image_shape, num_classes, clamp)
def in_place(image_shape, num_classes):
    net = Net(image_shape, num_classes, average_in_place)
    net.made_by = in_place
    return net
def auxiliary(image_shape, num_classes):
    return Net(image_shape, num_classes, lambda net, outputs: (outputs, outputs))
def evaluating(image_shape, num_classes):
    return Net(image_shape, num_classes, lambda net, outputs: outputs[5])
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A current directory that holds own_net.py, and is not on the path."""
    (tmp_path / "own_net.py").write_text(OWN)
    (tmp_path / "own_folder").mkdir()
    (tmp_path / "own_broken.py").write_text("import there_is_no_such_module")
    (tmp_path / "own_script.py").write_text("import sys\nsys.exit('no data')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield
    for module in ("own_net", "own_broken", "own_folder"):
        sys.modules.pop(module, None)


def test_a_model_of_the_users_own_is_found_in_the_current_directory(own: None) -> None:
    first, second = (_make("own_net:good", (3, 4, 4), 5, seed=1) for _ in range(2))
    assert first.model.training
    assert isinstance(first.task, Classification)
    assert first.model(torch.ones(7, 3, 4, 4)).shape == (7, 5)
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))


def test_the_check_of_an_own_model_leaves_no_trace(own: None) -> None:
    """Neither in its buffers, which a forward pass in training mode changes, nor in torch's generator."""
    built = _make("own_net:in_place", (3, 4, 4), 5)
    assert built.model.training
    assert built.model.mean == 0
    states = []
    for make in (built.model.made_by, model_from_json({"name": "own_net:in_place"}).make):
        torch.manual_seed(1)
        make((3, 4, 4), 5)
        states.append(torch.random.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_nets:good", "there is no module own_nets in .*run from the folder that contains it"),
        ("own_net.deep:good", "no module own_net.deep"),
        ("own_net:goode", "own_net.py has no function goode; it has: auxiliary, average, average_in_place, "),
        ("own_net:number", "has no function number"),
        ("itertools:good", "--model itertools:good: itertools has no function good; it has: "),
        ("own_folder:good", "own_folder has no function good; it has: none$"),
        ("own_net:listed", "returned a list: it must return a torch.nn.Module"),
        ("own_net:raising", "--model own_net:raising fails: KeyError: 'width'"),
        (
            "own_broken:good",
            "--model own_broken:good: the import of own_broken fails: ModuleNotFoundError: .*no_such_module",
        ),
        ("own_net:leaving", r"--model own_net:leaving fails: it calls sys.exit\(0\): remove that, or move it below if"),
        ("own_script:good", r"the import of own_script fails: it calls sys.exit\('no data'\): remove that, or"),
        ("own_net:wide", r"turned 2 images into \(2, 11\): it must return logits \(2, 10\)"),
        ("own_net:averaging", r"replaces its tensor mean in forward\(\), .*; change it in place"),
        ("own_net:clamping", r"replaces its tensor linear.weight in forward\(\), .*; change it in place"),
        ("own_net:auxiliary", r"turned 2 images into \(\) in training mode: it must return logits"),
        ("own_net:evaluating", "--model own_net:evaluating fails in training mode: IndexError: "),
    ],
)
def test_a_wrong_model_of_the_users_own_is_refused_in_one_line(own: None, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        _make(name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("wanted", "cards", "found"),
    [
        ("auto", 0, ["cpu", "cpu", "cpu"]),
        ("cpu", 2, ["cpu", "cpu", "cpu"]),
        ("auto", 1, ["cuda:0", "cuda:0", "cuda:0"]),
        ("cuda", 2, ["cuda:0", "cuda:1", "cuda:0"]),
        ("auto", 4, ["cuda:0", "cuda:1", "cuda:2"]),
    ],
)
def test_workers_spread_over_the_cards_of_their_host(wanted: str, cards: int, found: list[str]) -> None:
    assert [device_of(wanted, place, cards) for place in range(3)] == found
    assert device_of(wanted, EVALUATOR, cards) == (f"cuda:{cards - 1}" if found != ["cpu"] * 3 else "cpu")


def test_a_card_that_is_not_there_is_refused_with_the_next_step() -> None:
    with pytest.raises(UsageError, match=r"^--device cuda: .* no GPU on this host; give --device cpu, or auto$"):
        device_of("cuda", 0, 0)


def test_loading_libraries_draws_no_random_number() -> None:
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    load_libraries(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assert torch.equal(torch.random.get_rng_state(), state)


def _plain_datagossip(tensors: Iterator[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The layers of DataGossip's program in float64, eval mode: ReLU after pooling, the third convolution padded."""
    for padding in (0, 0, 1):
        x = F.max_pool2d(F.conv2d(x, next(tensors), next(tensors), padding=padding), 2).relu()
    x = (x.flatten(1) @ next(tensors).T + next(tensors)).relu()
    return x @ next(tensors).T + next(tensors)


@pytest.mark.parametrize(("shape", "features"), [((1, 32, 32), 80), ((1, 28, 28), 80), ((3, 20, 37), 60)])
def test_datagossips_network_computes_its_layers(shape: Shape, features: int) -> None:
    """80 features for CIFAR-10 and Fashion-MNIST, as in the authors' program."""
    model = datagossip.network(shape, 10)
    convolutions = 25 * shape[0] * 10 + 10 + 25 * 10 * 20 + 20 + 9 * 20 * 20 + 20
    assert _size(model) == convolutions + features * 50 + 50 + 50 * 10 + 10
    images, labels = _batch(shape)
    F.cross_entropy(model(images), labels).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    model.eval()
    plain = _plain_datagossip((t.double() for t in model.state_dict().values()), images.double())
    torch.testing.assert_close(model(images).double(), plain, rtol=1e-4, atol=1e-5)


def test_datagossips_network_refuses_images_without_a_last_pixel() -> None:
    with pytest.raises(UsageError, match="needs images of 20x20 or more, these are 19x32: use cnn"):
        datagossip.network((1, 19, 32), 10)
