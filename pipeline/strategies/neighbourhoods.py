"""From images to integer points, shared by the strategies that look at neighbourhoods."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from pyspark import RDD, StorageLevel

from pipeline.clustering.kmeans import Points
from pipeline.clustering.lloyd import SAMPLE_ROWS
from pipeline.clustering.pca import BlockPCA, BlockPCAModel
from pipeline.clustering.projection import Projection
from pipeline.errors import UsageError
from pipeline.input.dataset import Block
from pipeline.strategies.base import Context


@dataclass(frozen=True)
class LabelledPoints:
    """labels int32 [rows] beside the points of the same rows."""

    labels: np.ndarray[Any, np.dtype[np.int32]]
    points: Points


def project(projection: Projection, blocks: Iterable[Block]) -> Iterator[LabelledPoints]:
    for block in blocks:
        yield LabelledPoints(block.labels, Points(block.ids, projection(block.images)))


def fit_pca(context: Context, *, components: float, whiten: bool) -> BlockPCAModel:
    with context.phase("pca"):
        pixels = context.images.dataset.record_bytes
        images = context.images.blocks().map(lambda block: block.images)
        model = BlockPCA(components=float(components), whiten=whiten).fit_blocks(images, pixels)
        found = len(model.spectrum.variances)
        share = model.explained_variance_ratio.sum()
        context.report(f"{found} components, {share:.1%} of the variance{', whitened' if whiten else ''}")
        return model


@contextmanager
def projected(context: Context, model: BlockPCAModel) -> Iterator[RDD[LabelledPoints]]:
    """The points of all rows, kept by the executors for as long as the block runs."""
    with context.phase("project"):
        points = context.images.blocks().mapPartitions(partial(project, model.projection))
        points.persist(StorageLevel.MEMORY_AND_DISK)
        rows = points.map(lambda part: len(part.labels)).sum()
        context.report(f"{rows:,} points of {model.projection.dimensions} integers")
    try:
        yield points
    finally:
        points.unpersist()


def check_fit(components: float, clusters: int | None, max_iter: int, tol: float) -> None:
    """Raise UsageError for what no fit can do, before anything is read."""
    if clusters is not None and not 1 <= clusters <= SAMPLE_ROWS:
        raise UsageError(f"--clusters must be at least 1 and at most {SAMPLE_ROWS}, got {clusters}")
    if max_iter < 1:
        raise UsageError(f"--max-iter must be at least 1, got {max_iter}")
    if not (math.isfinite(tol) and tol >= 0):
        raise UsageError(f"--tol must be a number of 0 or more, got {tol}")
    if not math.isfinite(components) or components <= 0 or (components > 1 and components != int(components)):
        raise UsageError(f"--components must be a whole number or a share of variance in (0, 1), got {components}")
