"""``sharding export``: each format, loaded without the exporter's code, beside ``trainer.load``."""

from __future__ import annotations

import errno
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from pipeline.core.errors import DataError, JobError, UsageError
from tests.support.configs import make_config
from tests.support.trainer_sets import EVAL_ROWS, SHAPE, rows_of, write_shards
from trainer import Options, load
from trainer.export import target as target_module
from trainer.export import write
from trainer.export.__main__ import main
from trainer.export.graphs import make_torchscript
from trainer.export.hub import make_hub_files
from trainer.export.write import export
from trainer.models.linear import Logistic
from trainer.models.metadata import ModelMetadata
from trainer.runlog.result import Result
from trainer.simulate import SimulationSettings, simulate

IMAGES = torch.from_numpy(EVAL_ROWS.images_NCHW)
OWN = """
import math

from torch import nn

class Net(nn.Module):
    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.fc = nn.Linear(math.prod(image_shape), num_classes)

    def forward(self, images):
        outputs = self.fc(images.flatten(1))
        return outputs if {condition} else -outputs
"""


def train(root: Path, model: str = "cnn") -> Result:
    """Return a short run in virtual time on sets of 80 training and 60 evaluation images."""
    shards = write_shards(root / "shards", [rows_of(30, 2), rows_of(50, 3, 100)], EVAL_ROWS)
    config = make_config(shards, root / "run", model=model, batch_size=10, steps=4)
    result = simulate(config, SimulationSettings(), Options(silent=True, report=False))
    assert isinstance(result, Result)
    return result


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(tmp_path_factory.mktemp("export"))


@torch.no_grad()
def outputs_of(run: Result, images: Tensor = IMAGES) -> Tensor:
    """Return the outputs of ``trainer.load``."""
    outputs: Tensor = load(str(run.output))(images)
    return outputs


def load_torchscript(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return the graph of a TorchScript file and its metadata."""
    texts = {"model": ""}
    graph = torch.jit.load(path, _extra_files=texts)
    return graph, json.loads(texts["model"])


@pytest.mark.slow
def test_torchscript_takes_raw_images(run: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "model.pt"
    assert main([str(run.output), "--as", "torchscript", "--to", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}: written as torchscript\n"
    graph, about = load_torchscript(target)
    assert (about["shape"], about["classes"], about["dtype"]) == (list(SHAPE), 4, "uint8")
    assert not graph.training
    for images in (IMAGES, IMAGES[:1]):
        torch.testing.assert_close(graph(images), outputs_of(run, images), rtol=0, atol=1e-5)
    with pytest.raises(torch.jit.Error, match="the model was trained on uint8 images"):
        graph(torch.randn(7, *SHAPE))


def programs_of(card: str) -> list[str]:
    """Return the programs of a model card: with ``load``, and without."""
    programs = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(programs) == 2
    return programs


def run_program(program: str, images: Tensor) -> Any:
    """Return the outputs that the program of a card computes in the current folder."""
    names: dict[str, Any] = {"images": images}
    exec(program, names)
    return names["outputs"]


def test_a_hub_folder_loads_as_its_card_says(run: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "hub"
    export(str(run.output), str(folder), "safetensors")
    assert (folder / "model.safetensors").read_bytes() == (Path(str(run.output)) / "model.safetensors").read_bytes()
    card = (folder / "README.md").read_text()
    assert f"| accuracy on evaluation rows | {100 * (run.final_accuracy or 0):.2f} % |" in card
    assert "| run | " in card
    front = card.split("---\n")[1].splitlines()
    values = {key: json.loads(value) for key, _, value in (line.partition(": ") for line in front)}
    assert values["pipeline_tag"] == "image-classification"
    assert values["model-index"][0]["results"][0]["metrics"][0]["value"] == run.final_accuracy
    monkeypatch.chdir(folder)
    for program in programs_of(card):
        torch.testing.assert_close(run_program(program, IMAGES), outputs_of(run), rtol=0, atol=1e-5)


def test_a_card_has_the_settings_of_the_last_start(run: Result, tmp_path: Path) -> None:
    """Log a second start with other workers, as a resumed run does."""
    folder = tmp_path / "run"
    shutil.copytree(str(run.output), folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    start = next(json.loads(line) for line in lines if json.loads(line)["event"] == "start")
    start["plan"] |= {"num_workers": 47}
    (folder / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(start | {"resumed_from": 1}), ""]))
    export(str(folder), str(tmp_path / "hub"), "safetensors")
    assert "47 workers" in (tmp_path / "hub" / "README.md").read_text()


def test_a_model_file_alone_has_a_card_without_a_run(run: Result, tmp_path: Path) -> None:
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes((Path(str(run.output)) / "best.safetensors").read_bytes())
    export(str(alone), str(tmp_path / "hub"), "safetensors")
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "accuracy" not in card
    assert "## Training" not in card
    export(str(run.output), str(tmp_path / "best"), "safetensors", best=True)
    assert f"{100 * (run.best_accuracy or 0):.2f} %" in (tmp_path / "best" / "README.md").read_text()


def test_a_model_of_features_takes_real_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = ModelMetadata({"name": "logistic"}, [5, 1, 1], 3, [9.0] * 5, ["a", "b|c", "d"], "float32")
    network = Logistic().make(about.chw, 3)
    (tmp_path / "alone").write_bytes(save(network.state_dict(), metadata=about.to_header()))
    features = torch.randn(20, 5, 1, 1)
    expected = network(features)
    export(str(tmp_path / "alone"), str(tmp_path / "m.pt"), "torchscript")
    torch.testing.assert_close(load_torchscript(tmp_path / "m.pt")[0](features), expected, rtol=0, atol=1e-5)
    export(str(tmp_path / "alone"), str(tmp_path / "hub"), "safetensors")
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "| classes | 3: a, b\\|c, d |" in card
    assert 'pipeline_tag: "tabular-classification"' in card
    monkeypatch.chdir(tmp_path / "hub")
    for program in programs_of(card):
        torch.testing.assert_close(run_program(program, features), expected, rtol=0, atol=1e-5)


def test_two_classes_of_one_logit_are_two_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Binary logistic regression has the single logit of the second class; its users expect a column per class."""
    about = ModelMetadata({"name": "logistic"}, [5, 1, 1], 2, [0.0] * 5, [], "float32")
    network = Logistic().make(about.chw, 2)
    torch.nn.init.normal_(network[1].weight, generator=torch.Generator().manual_seed(0))  # type: ignore[index]
    (tmp_path / "alone").write_bytes(save(network.state_dict(), metadata=about.to_header()))
    features = torch.randn(20, 5, 1, 1, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        second = network(features)[:, 0].sigmoid()
        outputs = load(tmp_path / "alone")(features)
    assert outputs.argmax(1).tolist() == (second > 0.5).long().tolist()
    assert set(outputs.argmax(1).tolist()) == {0, 1}
    torch.testing.assert_close(outputs.softmax(1), torch.stack([1 - second, second], 1))
    export(str(tmp_path / "alone"), str(tmp_path / "m.pt"), "torchscript")
    torch.testing.assert_close(load_torchscript(tmp_path / "m.pt")[0](features), outputs, rtol=0, atol=1e-5)
    export(str(tmp_path / "alone"), str(tmp_path / "hub"), "safetensors")
    monkeypatch.chdir(tmp_path / "hub")
    for program in programs_of((tmp_path / "hub" / "README.md").read_text()):
        torch.testing.assert_close(run_program(program, features), outputs, rtol=0, atol=1e-5)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a user's module ``exported_net``."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "exported_net.py"
    sys.modules.pop("exported_net", None)


def test_a_network_of_the_users_own_is_exported(own_module: Path, tmp_path: Path) -> None:
    own_module.write_text(OWN.format(condition="images.shape[0] > 0"))
    run = train(tmp_path, model="exported_net:Net")
    graph, _ = load_torchscript(Path(str(export(str(run.output), str(tmp_path / "m.pt"), "torchscript"))))
    torch.testing.assert_close(graph(IMAGES), outputs_of(run), rtol=0, atol=1e-5)
    export(str(run.output), str(tmp_path / "hub"), "safetensors")
    assert "from exported_net import Net" in (tmp_path / "hub" / "README.md").read_text()


def test_a_graph_that_differs_is_refused(own_module: Path, tmp_path: Path) -> None:
    """Tracing records one branch of a condition on values."""
    own_module.write_text(OWN.format(condition="images.mean() > 0.25"))
    run = train(tmp_path, model="exported_net:Net")
    with pytest.raises(UsageError, match="--as torchscript cannot hold the network exported_net:Net: ") as caught:
        export(str(run.output), str(tmp_path / "m.pt"), "torchscript")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "m.pt").exists()


def test_an_export_that_was_killed_is_written_again(
    run: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = export(str(run.output), str(tmp_path / "whole"), "safetensors")

    def until_the_card(place: Path, data: bytes) -> None:
        if place.name == "README.md":
            raise KeyboardInterrupt
        place.write_bytes(data)

    killed = tmp_path / "killed"
    for overwrite in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(write, "write_whole", until_the_card)
            with pytest.raises(KeyboardInterrupt):
                export(str(run.output), str(killed), "safetensors", overwrite=overwrite)
        assert not (killed / "README.md").exists()
        export(str(run.output), str(killed), "safetensors")
        assert (killed / "README.md").read_bytes() == (whole / "README.md").read_bytes()


def test_only_an_export_of_a_model_is_replaced(run: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the files in a folder do not tell who wrote them."""
    for number, names in enumerate((["config.json", "model.safetensors"], ["README.md"], ["export.json"], ["notes"])):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in names:
            (folder / name).write_text('{"mine": true}')
        for overwrite in (False, True):
            with pytest.raises(UsageError, match=f"{number} exists, and is no export as safetensors: delete it"):
                export(str(run.output), str(folder), "safetensors", overwrite=overwrite)
        assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(names, '{"mine": true}')
    (tmp_path / "clone" / ".git").mkdir(parents=True)  # of an empty repository
    export(str(run.output), str(tmp_path / "clone"), "safetensors")
    monkeypatch.setattr(write, "find_spec", lambda name: name)  # as if the packages of ONNX were installed
    for kind in ("torchscript", "onnx"):
        for content in (b"", b"mine", Path(str(run.output) + "/model.safetensors").read_bytes()):
            (tmp_path / "file").write_bytes(content)
            for overwrite in (False, True):
                with pytest.raises(UsageError, match=f"file exists, and is no export as {kind}: delete it"):
                    export(str(run.output), str(tmp_path / "file"), kind, overwrite=overwrite)
            assert (tmp_path / "file").read_bytes() == content


def test_a_file_that_appears_meanwhile_is_not_replaced(
    run: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet_another(*arguments: Any) -> bytes:
        (tmp_path / "m.pt").write_bytes(data := make_torchscript(*arguments))
        return data + b"other"

    monkeypatch.setattr(write, "make_torchscript", meet_another)
    with pytest.raises(UsageError, match=r"m\.pt exists: give --overwrite, or choose another"):
        export(str(run.output), str(tmp_path / "m.pt"), "torchscript")
    assert not (tmp_path / "m.pt").read_bytes().endswith(b"other")


def test_a_folder_never_replaces_the_model_it_is_made_of(run: Result, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    export(str(run.output), str(hub), "safetensors")
    card = (hub / "README.md").read_bytes()
    with pytest.raises(UsageError, match="hub holds the model itself; choose another"):
        export(str(hub), str(hub), "safetensors", overwrite=True)
    assert (hub / "README.md").read_bytes() == card
    export(str(run.output), str(hub), "safetensors", best=True, overwrite=True)
    assert (hub / "README.md").read_bytes() != card


def test_a_second_export_into_a_folder_in_use_is_refused(
    run: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet_another(*arguments: Any) -> dict[str, bytes]:
        with pytest.raises(UsageError, match="is in use by an export that has not ended"):
            export(str(run.output), str(tmp_path / "hub"), "safetensors", best=True, overwrite=True)
        return make_hub_files(*arguments)

    monkeypatch.setattr(write, "make_hub_files", meet_another)
    export(str(run.output), str(tmp_path / "hub"), "safetensors")
    assert sorted(path.name for path in (tmp_path / "hub").iterdir()) == [
        "README.md",
        "config.json",
        "export.json",
        "model.safetensors",
    ]


def test_a_folder_that_cannot_be_locked_cannot_be_written(
    run: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(place: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(target_module, "locked", refuse)
    with pytest.raises(UsageError, match=r"hub cannot be written: Permission denied; choose another$"):
        export(str(run.output), str(tmp_path / "hub"), "safetensors")


def test_a_model_that_changes_meanwhile_is_an_error(run: Result) -> None:
    classifier = load(str(run.output))
    classifier.digest = "0" * 64
    with pytest.raises(JobError, match="changed while it was exported; run the same command again"):
        make_hub_files(classifier, Path(str(run.output)) / "model.safetensors")


def test_a_wrong_target_is_one_line(run: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path(str(run.output))
    before = {path.name: path.read_bytes() for path in home.iterdir() if path.is_file()}
    earlier = tmp_path / "earlier"
    export(str(home), str(earlier), "torchscript")
    for target, kind, overwrite, message in (
        (earlier, "torchscript", False, "earlier exists: give --overwrite"),
        (earlier, "safetensors", True, "earlier is a file; name a folder"),
        (tmp_path, "torchscript", True, "is a folder; name a file"),
        (earlier / "m.pt", "torchscript", False, "m.pt cannot be written: File exists; choose another"),
        (tmp_path, "safetensors", False, "exists, and is no export as safetensors: delete it, or choose another"),
        (home, "safetensors", True, "exists, and is no export as safetensors: delete it, or choose another"),
        (home / "model.safetensors", "torchscript", True, f"lies in the run {home}; choose another"),
        (home / "new" / "hub", "safetensors", False, f"lies in the run {home}; choose another"),
        (home.parent / "shards" / "model.pt", "torchscript", True, "lies in the shard set .*; choose another"),
    ):
        with pytest.raises(UsageError, match=message):
            export(str(home), str(target), kind, overwrite=overwrite)
    with pytest.raises(DataError, match="does not exist: give the folder of a run that has ended"):
        export(str(tmp_path / "none"), str(tmp_path / "m.pt"), "torchscript")
    monkeypatch.setattr(write, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--as onnx needs onnx and onnxscript: run pip install onnx onnxscript"):
        export(str(home), str(tmp_path / "m.onnx"), "onnx")
    assert {path.name: path.read_bytes() for path in home.iterdir() if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["earlier"]
    export(str(home), str(earlier), "torchscript", overwrite=True)
    np.testing.assert_allclose(load_torchscript(earlier)[0](IMAGES).detach(), outputs_of(run), atol=1e-5)
