"""A trained model as one file that contains its graph: TorchScript and ONNX, by torch's own exporters.

Each graph contains the normalisation of images, and the metadata of the model file as the text ``model``."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pipeline.core.errors import UsageError
from trainer.export.formats import ONNX, TORCHSCRIPT
from trainer.inference.classifier import Classifier
from trainer.models.metadata import ModelMetadata

TRACED_IMAGES = 2  # another number than 1, which exporters may treat as a constant
PROBES = (1, 3, 8)  # numbers of images with which a graph is compared with its network


def make_torchscript(classifier: Classifier) -> bytes:
    """Return the file for torch.jit.load. Takes images of the type of the training images, in any number.

    Raises UsageError if the recorded graph does not compute what the network does."""
    metadata = classifier.metadata
    images = torch.rand(TRACED_IMAGES, *metadata.chw)
    buffer = io.BytesIO()
    with _failure_in_one_line(TORCHSCRIPT, metadata), torch.no_grad():
        # Tracing supports any network, but would fix the type of images: the branch on it is compiled instead.
        network = torch.jit.trace(classifier.network, images, check_trace=False)  # type: ignore[no-untyped-call]
        whole = Classifier(network, metadata, classifier.task, classifier.digest).eval()
        torch.jit.save(torch.jit.script(whole), buffer, _extra_files=metadata.to_header())
        buffer.seek(0)
        graph = torch.jit.load(buffer)  # type: ignore[no-untyped-call]
        _compare(graph, classifier)
    return buffer.getvalue()


def make_onnx(classifier: Classifier) -> bytes:
    """Return the ONNX file: ``images`` in any number, of the type of the training images, to ``outputs``.

    Needs the packages onnx and onnxscript. Raises UsageError if torch cannot export the network, or if the graph does not
    compute what the network does."""
    from onnx.reference import ReferenceEvaluator

    metadata = classifier.metadata
    dtype = torch.uint8 if classifier.takes_integers else torch.float32
    images = torch.zeros(TRACED_IMAGES, *metadata.chw, dtype=dtype)
    with _failure_in_one_line(ONNX, metadata), torch.no_grad():
        # By torch.export, which refuses a network whose path depends on values.
        program = torch.onnx.export(
            classifier,
            (images,),
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=["outputs"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )
        assert program is not None
        model = program.model_proto
        for key, value in metadata.to_header().items():
            model.metadata_props.add(key=key, value=value)
        evaluator = ReferenceEvaluator(model)  # of the package onnx, so that no runtime must be installed
        _compare(lambda probe: torch.from_numpy(evaluator.run(None, {"images": probe.numpy()})[0]), classifier)
        return bytes(model.SerializeToString())


def _compare(graph: Callable[[Tensor], Tensor], classifier: Classifier) -> None:
    """Raise AssertionError if a graph does not compute what the network does, for images of the type of its training."""
    generator = torch.Generator().manual_seed(0)
    for number in PROBES:
        shape = (number, *classifier.metadata.chw)
        probe = torch.randn(shape, generator=generator)
        if classifier.takes_integers:
            probe = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        torch.testing.assert_close(graph(probe), classifier(probe), rtol=1e-4, atol=1e-5)


@contextmanager
def _failure_in_one_line(kind: str, metadata: ModelMetadata) -> Iterator[None]:
    """Raise UsageError for any error of an exporter, and hide its warnings. kind: the format."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns about packages that the network does not use
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated; a graph that differs is refused
            yield
    except Exception as error:  # exporters raise errors of many types, some over hundreds of lines
        reason = " ".join(str(error).split())[:200]
        name = metadata.network["name"]
        raise UsageError(f"--as {kind} cannot hold the network {name}: {reason}") from error
    finally:
        logger.setLevel(level)
