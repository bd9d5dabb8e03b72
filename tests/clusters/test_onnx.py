"""``sharding export --as onnx`` in an environment with the packages of ONNX, beside ``trainer.load`` in ONNX Runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from tests.clusters import ROOT
from tests.clusters.environments import ONNX
from trainer import load
from trainer.models import model_from_json
from trainer.models.metadata import ModelMetadata

pytestmark = pytest.mark.full
# Reads the graph, the images and the expected outputs without any code of the project.
PROGRAM = """
import json, sys
import numpy, onnx, onnxruntime
graph = onnx.load(sys.argv[1])
onnx.checker.check_model(graph, full_check=True)
session = onnxruntime.InferenceSession(sys.argv[1])
[images], [outputs] = session.get_inputs(), session.get_outputs()
assert (images.name, outputs.name) == ("images", "outputs")
values = numpy.load(sys.argv[2])
parts = [session.run(None, {"images": part})[0] for part in (values[:1], values[1:4], values[4:])]
numpy.save(sys.argv[3], numpy.concatenate(parts))
print(json.dumps([images.type, images.shape[1:], {entry.key: entry.value for entry in graph.metadata_props}]))
"""


def write_model(path: Path, network: str, shape: tuple[int, int, int], dtype: str, mean: Any) -> ModelMetadata:
    """Write a model file of a network with random parameters, and return its metadata."""
    about = ModelMetadata({"name": network}, list(shape), 4, mean, dtype=dtype)
    torch.manual_seed(0)
    tensors = dict(model_from_json(about.network).make(shape, 4).state_dict())
    # BatchNorm's initial statistics would hide that a graph lacks them.
    tensors |= {name: value + torch.rand_like(value) for name, value in tensors.items() if "running" in name}
    path.write_bytes(save(tensors, metadata=about.to_header()))
    return about


@pytest.mark.parametrize(
    ("network", "shape", "dtype", "mean"),
    [
        ("resnet20", (3, 32, 32), "uint8", [120.0] * 3),
        ("cnn", (1, 8, 8), "uint8", np.arange(64.0).reshape(1, 8, 8).tolist()),
        ("logistic", (10, 1, 1), "float32", [120.0] * 10),
    ],
)
def test_onnx_runtime_gives_the_outputs_of_load(
    tmp_path: Path, network: str, shape: tuple[int, int, int], dtype: str, mean: Any
) -> None:
    ONNX.make()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ONNX.packages)])}
    model, graph = tmp_path / "model.safetensors", tmp_path / "model.onnx"
    about = write_model(model, network, shape, dtype, mean)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (9, *shape), np.uint8) if dtype == "uint8" else rng.random((9, *shape), np.float32)
    np.save(tmp_path / "images.npy", images)

    def run(*command: object) -> str:
        line = [sys.executable, *map(str, command)]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert not done.stderr
        return done.stdout

    said = run("-m", "pipeline.entry", "export", model, "--as", "onnx", "--to", graph)
    assert said == f"{graph}: written as onnx\n"
    kind, sides, texts = json.loads(run("-c", PROGRAM, graph, "images.npy", "outputs.npy"))
    assert (kind, sides) == ("tensor(uint8)" if dtype == "uint8" else "tensor(float)", list(shape))
    assert texts == about.to_header()
    with torch.no_grad():
        expected = load(model)(torch.from_numpy(images))
    assert expected.isfinite().all()
    np.testing.assert_allclose(np.load(tmp_path / "outputs.npy"), expected, rtol=1e-5, atol=1e-5)


def test_an_onnx_graph_that_differs_is_refused(tmp_path: Path) -> None:
    """A network that counts its calls gives other outputs than those that were recorded."""
    ONNX.make()
    (tmp_path / "counting_net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    calls = 0\n"
        "    def __init__(self, shape, classes):\n"
        "        super().__init__()\n"
        "        self.fc = nn.Linear(shape[0], classes)\n"
        "    def forward(self, images):\n"
        "        Net.calls += 1\n"
        "        return self.fc(images.flatten(1)) * Net.calls\n"
    )
    about = ModelMetadata({"name": "counting_net:Net"}, [10, 1, 1], 4, [0.0] * 10, dtype="float32")
    model, graph = tmp_path / "model.safetensors", tmp_path / "model.onnx"
    tensors = {"fc.weight": torch.ones(4, 10), "fc.bias": torch.ones(4)}
    model.write_bytes(save(tensors, metadata=about.to_header()))
    path = os.pathsep.join([str(ROOT), str(ONNX.packages), str(tmp_path)])
    line = [sys.executable, "-m", "pipeline.entry", "export", str(model), "--as", "onnx", "--to", str(graph)]
    done = subprocess.run(line, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "--as onnx cannot hold the network counting_net:Net: Tensor-likes are not close" in done.stderr
    assert not graph.exists()
