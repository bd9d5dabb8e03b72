"""A trained network with the normalisation of its inputs, loaded from a run's folder or from a model file alone."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.versions import NAME as MANIFEST
from pipeline.core.storage.retries import unreadable_is_data_error
from trainer.checkpoints.slice_file import json_header
from trainer.home.place import Place, is_file, place_of
from trainer.models import ModelSpec, OwnModel, model_from_json
from trainer.models.devices import preserve_generator, usual_torch
from trainer.models.metadata import ModelMetadata, from_header
from trainer.models.own import describe_error
from trainer.models.tasks import Task
from trainer.run_files import BEST, MODEL

INTEGERS = (
    "the model was trained on uint8 images: give uint8 of 0..255, which it normalises itself, and not the images of"
    " ToTensor() or of another normalisation"
)
FEATURES = "the model was trained on float32 features: give them as the shard set has them, and not uint8 images"


class Classifier(nn.Module):
    """A trained network that takes raw images: ``outputs = classifier(images)``. In eval mode, on the CPU at first.

    Attributes:
        network: the network, which takes normalised images.
        metadata: shape of images, number of classes, and the flags of the network.
        task: meaning of the outputs, such as logits.
        digest: SHA-256 of the model file, in hexadecimal.
        is_binary: whether there are two classes, for which a network may have a single output.
        takes_integers: whether the network was trained on uint8 images rather than real-valued features.
        refusal: the error for images of the other type.
        mean: float32 [C] or [C, H, W], a buffer that is not saved with the network.
    """

    def __init__(self, network: nn.Module, metadata: ModelMetadata, task: Task, digest: str) -> None:
        super().__init__()
        self.network = network
        self.metadata = metadata
        self.task = task
        self.digest = digest
        # Attributes of their own, because TorchScript reads no metadata.
        self.is_binary = metadata.classes == 2
        self.takes_integers = metadata.training_dtype == "uint8"
        self.refusal = INTEGERS if self.takes_integers else FEATURES
        self.mean: Tensor  # TorchScript reads annotations of the class, and does not know this name
        self.register_buffer("mean", torch.tensor(metadata.mean, dtype=torch.float32), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the outputs [B, K] of the network, one per class: a single logit for two classes becomes two logits.

        images: uint8 [B, C, H, W], normalised here; real-valued features are used as they are, as in training. Raises
        ValueError for the type that the network was not trained on."""
        if (images.dtype == torch.uint8) != self.takes_integers:
            raise ValueError(self.refusal)
        if self.takes_integers:
            mean = self.mean if self.mean.dim() == 3 else self.mean[:, None, None]
            images = (images.float() - mean) * (1 / 255)
        outputs: Tensor = self.network(images)
        # With 0 for the first class, softmax and argmax give what the logit of the second class says.
        if self.is_binary and outputs.shape[1] == 1:
            outputs = torch.cat([torch.zeros_like(outputs), outputs], 1)
        return outputs


def load(run: str | Path, *, best: bool = False) -> Classifier:
    """Load the trained model of a run.

    Reads the model file, and its header once more. A model of ``--model module:function`` needs this module to be
    importable, as in training.

    Args:
        run: folder of a run, or its model file, local, on HDFS or in an object store.
        best: the model of the best evaluation, which exists during the run too, instead of the final one.
    Raises:
        DataError: there is no such model, or its file is damaged.
        UsageError: the network's function does not exist, or does not fit the file.
    """
    path = find_model(run, best=best)
    with unreadable_is_data_error(str(run)):
        data = path.read_bytes()
        metadata, spec = _read_metadata(path)
    try:
        tensors = load_tensors(data)
    except SafetensorError as error:
        raise DataError(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(spec, OwnModel):
        _check_shapes(path, metadata, spec, tensors)
    # The initial parameters are replaced: this block keeps them from changing the state of torch's generator.
    with preserve_generator():
        network = spec.make(metadata.chw, metadata.classes or 1)
    try:
        # BatchNorm's number of batches is an integer, which is not trained, and so is not in the file.
        missing, unexpected = network.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise DataError(f"{path} is of another network: {' '.join(str(error).split())[:200]}") from None
    absent = [name for name in missing if network.state_dict()[name].is_floating_point()]
    if absent or unexpected:
        raise DataError(f"{path} is of another network: {(absent + list(unexpected))[0]} has no counterpart")
    with usual_torch():
        return Classifier(network, metadata, spec.task(), sha256(data).hexdigest()).eval()


def find_model(run: str | Path, *, best: bool = False) -> Place:
    """Return the place of the model file that ``load`` reads. Raises DataError if it does not exist."""
    place = place_of(str(run))
    with unreadable_is_data_error(str(run)):
        path = place if is_file(place) else place / (BEST if best else MODEL)
        if not path.exists():
            advice = "give the folder of a run that has been evaluated" if best else _advice(place)
            raise DataError(f"{path} does not exist: {advice}")
    return path


def _advice(place: Place) -> str:
    """Return the next step for a run without a final model."""
    if (place / BEST).exists():
        return "the run has not ended; the best model so far can be loaded (best=True, --best)"
    if (place / MANIFEST).exists():
        return "it is a shard set, and holds no model; give the folder of a run"
    return "give the folder of a run that has ended"


def _check_shapes(path: Place, metadata: ModelMetadata, spec: ModelSpec, tensors: dict[str, Tensor]) -> None:
    """Raise DataError if a built-in network does not fit the tensors of a file.

    Allocates no memory for the network: metadata of a small file may describe one that is larger than the memory."""
    try:
        with torch.device("meta"):
            network = spec.make(metadata.chw, metadata.classes or 1)
    except Exception as error:  # such as a shape that the model does not support
        raise _broken(path, error) from None
    expected, shapes = (
        {name: value.shape for name, value in state.items() if value.is_floating_point()}
        for state in (network.state_dict(), tensors)
    )
    for name in expected | shapes:
        if expected.get(name) != shapes.get(name):
            raise DataError(f"{path} is of another network: {name} has no counterpart")


def _read_metadata(path: Place) -> tuple[ModelMetadata, ModelSpec]:
    """Return the metadata of a model file and its model. Raises DataError if it is damaged or of another program."""
    try:
        header, _ = json_header(path)
        metadata = from_header(header["__metadata__"])
        return metadata, model_from_json(metadata.network)
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise _broken(path, error) from None


def _broken(path: Place, error: Exception) -> DataError:
    """Return the error for a model file whose metadata make no network."""
    return DataError(f"{path} is not a model of a run, or damaged ({describe_error(error)}); train again to write it")
