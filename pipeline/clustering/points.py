"""Blocks of points on an integer grid, and their clustering in one task.

This module does not import spark.ml, which takes half a second."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.clustering import lloyd
from pipeline.clustering.fit import fit_in_process

ONE_TASK_BYTES = 256 << 20  # int32 points; above this, each iteration is a job over the cached partitions


@dataclass(frozen=True)
class Points:
    """A block of points. ids: int64 [rows]. points: int32 [rows, p] on the grid 2^-exponent of their projection."""

    ids: npt.NDArray[np.int64]
    points: npt.NDArray[np.int32]


def concatenate_points(parts: Iterable[Points]) -> Points:
    parts = list(parts)
    return Points(np.concatenate([p.ids for p in parts]), np.concatenate([p.points for p in parts]))


def fit_gathered(parts: Iterable[Points], settings: lloyd.KMeansSettings) -> lloyd.Fit:
    whole = concatenate_points(parts)
    return fit_in_process(whole.ids, whole.points, settings)
