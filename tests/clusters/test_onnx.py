"""``sharding export --as onnx`` in an environment with the packages of ONNX, beside ``trainer.load`` in ONNX Runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from tests.clusters import ROOT
from tests.clusters.environments import ONNX
from tests.support.application import Ended
from tests.support.commands import BATCH, plan_batch, read_batch
from trainer import load
from trainer.models import model_from_json
from trainer.models.metadata import ModelMetadata

pytestmark = pytest.mark.full
# Image shape, type of the pixels and mean that training subtracts, of each network.
NETWORKS: dict[str, tuple[tuple[int, int, int], str, Any]] = {
    "resnet20": ((3, 32, 32), "uint8", [120.0] * 3),
    "cnn": ((1, 8, 8), "uint8", np.arange(64.0).reshape(1, 8, 8).tolist()),
    "logistic": ((10, 1, 1), "float32", [120.0] * 10),
}
# Reads graphs, images and expected outputs without any code of the project.
PROGRAM = """
import json, sys
import numpy, onnx, onnxruntime
for folder in sys.argv[1:]:
    graph = onnx.load(f"{folder}/model.onnx")
    onnx.checker.check_model(graph, full_check=True)
    session = onnxruntime.InferenceSession(f"{folder}/model.onnx")
    [images], [outputs] = session.get_inputs(), session.get_outputs()
    assert (images.name, outputs.name) == ("images", "outputs")
    values = numpy.load(f"{folder}/images.npy")
    parts = [session.run(None, {"images": part})[0] for part in (values[:1], values[1:4], values[4:])]
    numpy.save(f"{folder}/outputs.npy", numpy.concatenate(parts))
    print(json.dumps([images.type, images.shape[1:], {entry.key: entry.value for entry in graph.metadata_props}]))
"""
# A network that counts its calls: it gives other outputs than those that were recorded.
COUNTING_NET = """
from torch import nn
class Net(nn.Module):
    calls = 0
    def __init__(self, shape, classes):
        super().__init__()
        self.fc = nn.Linear(shape[0], classes)
    def forward(self, images):
        Net.calls += 1
        return self.fc(images.flatten(1)) * Net.calls
"""


def write_model(folder: Path, network: str) -> ModelMetadata:
    """Write a model file of a network with random parameters, and images beside it. Returns the model's metadata."""
    shape, dtype, mean = NETWORKS[network]
    about = ModelMetadata({"name": network}, list(shape), 4, mean, dtype=dtype)
    torch.manual_seed(0)
    tensors = dict(model_from_json(about.network).make(shape, 4).state_dict())
    # BatchNorm's initial statistics would hide that a graph lacks them.
    tensors |= {name: value + torch.rand_like(value) for name, value in tensors.items() if "running" in name}
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (9, *shape), np.uint8) if dtype == "uint8" else rng.random((9, *shape), np.float32)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(save(tensors, metadata=about.to_header()))
    np.save(folder / "images.npy", images)
    return about


@dataclass(frozen=True)
class Exports:
    """The folders and metadata of models, how the export of each ended, and what a reader of the graphs printed.

    The last export is of COUNTING_NET, whose graph is not read."""

    folders: dict[str, Path]
    metadata: dict[str, ModelMetadata]
    ended: dict[str, Ended]
    lines: dict[str, list[Any]]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Export every network in one process, because the exporter takes long to import, and read the graphs in another."""
    ONNX.make()
    root = tmp_path_factory.mktemp("onnx")
    folders = {network: root / network for network in (*NETWORKS, "counting_net")}
    metadata = {network: write_model(folders[network], network) for network in NETWORKS}
    (root / "counting_net.py").write_text(COUNTING_NET)
    about = ModelMetadata({"name": "counting_net:Net"}, [10, 1, 1], 4, [0.0] * 10, dtype="float32")
    tensors = {"fc.weight": torch.ones(4, 10), "fc.bias": torch.ones(4)}
    folders["counting_net"].mkdir()
    (folders["counting_net"] / "model.safetensors").write_bytes(save(tensors, metadata=about.to_header()))

    path = os.pathsep.join([str(ROOT), str(ONNX.packages), str(root)])

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        line, environment = [sys.executable, *map(str, arguments)], {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(line, cwd=root, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done

    commands = [
        ("sharding", "export", folder / "model.safetensors", "--as", "onnx", "--to", folder / "model.onnx")
        for folder in folders.values()
    ]
    ended = dict(zip(folders, read_batch(run(BATCH, plan_batch(commands))), strict=True))
    lines = run("-c", PROGRAM, *(folders[network] for network in NETWORKS)).stdout.splitlines()
    return Exports(folders, metadata, ended, dict(zip(NETWORKS, map(json.loads, lines), strict=True)))


@pytest.mark.parametrize("network", NETWORKS)
def test_onnx_runtime_gives_the_outputs_of_load(network: str, exports: Exports) -> None:
    shape, dtype, _ = NETWORKS[network]
    folder, ended = exports.folders[network], exports.ended[network]
    assert (ended.code, ended.out, ended.err) == (0, f"{folder / 'model.onnx'}: written as onnx\n", "")
    kind, sides, texts = exports.lines[network]
    assert (kind, sides) == ("tensor(uint8)" if dtype == "uint8" else "tensor(float)", list(shape))
    assert texts == exports.metadata[network].to_header()
    with torch.no_grad():
        expected = load(folder / "model.safetensors")(torch.from_numpy(np.load(folder / "images.npy")))
    assert expected.isfinite().all()
    np.testing.assert_allclose(np.load(folder / "outputs.npy"), expected, rtol=1e-5, atol=1e-5)


def test_an_onnx_graph_that_differs_is_refused(exports: Exports) -> None:
    ended = exports.ended["counting_net"]
    assert ended.code == 2, ended.err
    assert "--as onnx cannot hold the network counting_net:Net: Tensor-likes are not close" in ended.err
    assert not (exports.folders["counting_net"] / "model.onnx").exists()
