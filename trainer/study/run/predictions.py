"""The predictions of a run's final model on every evaluation image: packed for the ledger, and by neighbourhood.

Two runs of one data set can then be compared image by image, long after their models were deleted. Shapes: N evaluation
rows, by ascending id."""

from __future__ import annotations

import base64
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from pipeline.core.atomic import write_durably
from pipeline.core.errors import DataError

if TYPE_CHECKING:
    from trainer.data.rows import Rows
    from trainer.data.shards import Shards
    from trainer.runlog.result import Result

BATCH = 500  # images per forward pass, as many as in the evaluator's, whose rounding the predictions share
CLUSTERS_PER_CLASS = 2  # of neighbourhoods, as the presets of distribution_aware have
SIDE = 8  # pixels of the images of which neighbourhoods are found
ITERATIONS = 40
TOLERANCE = 0.002  # by which rounding may change an accuracy; in small sets, by the images below
CHANGED_IMAGES = 2
LARGEST = 1 << 24  # bytes of unpacked predictions, so that a damaged line cannot exhaust the memory


def pack(predictions: Ints) -> str:
    """Return predictions [N] as text: one or two bytes per row, compressed. 10,000 rows of 10 classes take about 5 kB."""
    width = np.uint8 if predictions.max(initial=0) < 1 << 8 else np.uint16
    data = bytes([np.dtype(width).itemsize]) + predictions.astype(np.dtype(width).newbyteorder("<")).tobytes()
    return base64.b85encode(zlib.compress(data, 9)).decode()


def unpack(text: str) -> Ints:
    """Return the predictions of a text. Raises ValueError for a text that ``pack`` did not return."""
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(base64.b85decode(text), LARGEST)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not decompressor.eof or data[:1] not in (b"\x01", b"\x02") or (len(data) - 1) % data[0]:
        raise ValueError("these are no packed predictions")
    return np.frombuffer(data, f"<u{data[0]}", offset=1).astype(np.int64)


def outcome_by_image(result: Result, shards: Shards, cache: Path, mode: str) -> dict[str, Any]:
    """Return the keys of the ledger about single images, classes and neighbourhoods; empty for real targets.

    Args:
        result: of the run, whose folder holds the final model.
        shards: the set on which it was trained.
        cache: folder in which the neighbourhoods of an evaluation set are kept for the study's other runs.
        mode: the run's --evaluation-mode. The predictions are of clean images with the model's stored statistics.

    Raises DataError if the evaluation images are not the images on which the run logged its accuracy.
    """
    from trainer.data.loading import load_eval

    rows = load_eval(shards)
    if rows is None or result.class_accuracy is None:
        return {}
    order = np.argsort(rows.ids, kind="stable")
    # Predicted in the order of the files, so that the batches are those of the evaluator.
    predictions = predict_rows(result, rows)[order]
    is_correct = predictions == rows.labels[order]
    if result.final_accuracy is not None and is_other_accuracy(is_correct, result.final_accuracy, mode):
        raise DataError(
            f"the model in {result.output} is correct on {is_correct.mean():.4f} of the evaluation rows, but the run logged"
            f" {result.final_accuracy:.4f}: the set was changed during the run"
        )
    outcome: dict[str, Any] = {"predictions": pack(predictions), "class_accuracy": result.class_accuracy}
    by_class = [value for value in result.class_accuracy if value is not None]
    outcome["worst_class_accuracy"] = min(by_class)
    groups = neighbourhoods_of(rows, shards, cache)
    if groups is not None:
        sizes = np.bincount(groups[order])
        accuracy = np.bincount(groups[order], is_correct) / np.maximum(sizes, 1)
        outcome["neighbourhoods"] = {"rows": sizes.tolist(), "accuracy": accuracy.tolist()}
        outcome["worst_neighbourhood_accuracy"] = worst_neighbourhood(sizes, accuracy)
    return outcome


def is_other_accuracy(is_correct: npt.NDArray[np.bool_], logged: float, mode: str) -> bool:
    """True if the accuracy of the predictions shows that the run logged the accuracy of other images.

    In the mode "clean" the evaluator has the same batches and model. In any other it changes images or statistics, so that
    its accuracy proves nothing."""
    differing = round(abs(int(is_correct.sum()) - logged * len(is_correct)))  # images
    return mode == "clean" and differing > max(TOLERANCE * len(is_correct), CHANGED_IMAGES)


def worst_neighbourhood(sizes: Ints, accuracy: npt.NDArray[np.float64]) -> float:
    """Return the lowest accuracy of a neighbourhood with at least half a percent of the rows, or half the mean size.

    The lower of the two limits counts: with hundreds of neighbourhoods, none may have half a percent. In a smaller
    one, an accuracy of 0 may be a few hard images."""
    is_large = sizes >= min(sizes.sum() / 200, sizes.mean() / 2)
    return float(accuracy[is_large & (sizes > 0)].min())


def predict_rows(result: Result, rows: Rows) -> Ints:
    """Return the classes that the final model of a run predicts: int64 [N], in the order of the rows."""
    import torch

    from trainer.inference.classifier import load

    classifier = load(str(result.output))
    parts = []
    with torch.no_grad():
        for start in range(0, len(rows), BATCH):
            outputs = classifier(torch.from_numpy(rows.images_NCHW[start : start + BATCH]))
            parts.append(classifier.task.predicted(outputs).numpy())
    return np.concatenate(parts)


def neighbourhoods_of(rows: Rows, shards: Shards, cache: Path) -> Ints | None:
    """Return the neighbourhood of each evaluation row: int64 [N]; None for real-valued features.

    They are clusters of the images themselves, so that all ways of sharding and all runs of a data set have the same ones:
    k-means with twice as many clusters as classes, in exact integers, on images that are averaged to about 8x8 pixels."""
    from pipeline.clustering.fit import fit_in_process
    from pipeline.clustering.lloyd import KMeansSettings, nearest
    from pipeline.datasets.derive import shrink_images

    if rows.images_NCHW.dtype != np.uint8:
        return None
    images = np.asarray(rows.images_NCHW, np.uint8)
    evaluation = shards.manifest.evaluation
    assert evaluation, "every set of a study has evaluation rows"
    path = cache / f"neighbourhoods,{evaluation.input.fingerprint}"
    if path.exists():
        groups = np.frombuffer(path.read_bytes(), "<i8")
        if len(groups) == len(rows):
            return groups[np.argsort(np.argsort(rows.ids, kind="stable"))]
    height, width = images.shape[2:]
    factors = [f for f in range(1, height // SIDE + 1) if height % f == width % f == 0]
    points = shrink_images(images.reshape(len(rows), -1), images.shape[1:], max(factors, default=1)).astype(np.int32)
    clusters = min(CLUSTERS_PER_CLASS * shards.num_classes, len(rows))
    fit = fit_in_process(rows.ids, points, KMeansSettings(clusters, ITERATIONS, 1e-4, 0))
    groups = nearest(points, fit.centres)[0]
    # Stored by ascending id, because the files of another set may have the rows in another order.
    content = groups[np.argsort(rows.ids, kind="stable")].astype("<i8").tobytes()
    # Another run that writes the same file at the same time takes this one's temporary file for a killed run's.
    with suppress(FileNotFoundError):
        write_durably(path, content)
    return groups
