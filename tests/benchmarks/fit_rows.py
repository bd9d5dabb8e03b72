"""What fitting the PCA to fewer rows costs in quality.

    python -m tests.benchmarks.fit_rows --data FOLDER [--rows 5e3,1e4,2e4]

FOLDER is CIFAR-10 or CIFAR-100 in any layout (or CIFAR10_DIR). One process, the functions that tasks run, five draws each.
For each preset of distribution_aware: the share of the variance of all rows that the components hold; how well the
neighbourhoods agree with those of an exact fit (adjusted Rand index: 1 the same, 0 chance); how many neighbourhoods are
sparse for 12 workers, and rows in them. The line of all rows has five other starts of k-means."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.metrics import adjusted_rand_score

from pipeline.clustering import gram, lloyd
from pipeline.clustering.fit import fit_in_process
from pipeline.clustering.projection import quantise
from pipeline.core.arrays import Ints
from pipeline.core.hashing import is_drawn
from pipeline.core.reporting.tables import table
from pipeline.core.seeds import Purpose, word
from tests.benchmarks.sklearn_sharding import read

PRESETS: dict[str, dict[str, Any]] = {
    "plain, 50 components": {"components": 50.0, "whiten": False},
    "paper-like, 160 whitened": {"components": 160.0, "whiten": True},
}
CLUSTERS, WORKERS, DRAWS = 20, 12, 5
Images = npt.NDArray[np.uint8]


def spectrum_of(images: Images, components: float) -> gram.Spectrum:
    return gram.top_components(gram.covariance(gram.gram_of_blocks([images], images.shape[1])), components)


def held(images: Images, spectrum: gram.Spectrum) -> float:
    """The share of the variance of all rows in the span of the components."""
    values = images.astype(np.float32)
    values -= values.mean(axis=0)
    inside = values @ spectrum.components.T.astype(np.float32)
    return float(np.square(inside, dtype=np.float64).sum() / np.square(values, dtype=np.float64).sum())


def neighbourhoods(images: Images, spectrum: gram.Spectrum, whiten: bool, seed: int) -> tuple[Ints, Ints]:
    """Of each row, and the sizes."""
    points = quantise(spectrum, whiten=whiten)(images)
    fit = fit_in_process(np.arange(len(images)), points, lloyd.KMeansSettings(CLUSTERS, 150, 1e-4, seed))
    return lloyd.nearest(points, fit.centres)[0], fit.sizes


def spread(values: list[float], digits: int) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("CIFAR10_DIR"), required="CIFAR10_DIR" not in os.environ
    )
    parser.add_argument("--rows", default="5e3,1e4,2e4")
    args = parser.parse_args()
    images = np.ascontiguousarray(read(args.data)[1])
    for name, preset in PRESETS.items():
        cells = []
        began = time.perf_counter()
        exact = spectrum_of(images, preset["components"])
        seconds = time.perf_counter() - began
        groups = neighbourhoods(images, exact, preset["whiten"], 0)[0]
        again = [neighbourhoods(images, exact, preset["whiten"], seed) for seed in range(1, 1 + DRAWS)]
        agree = [float(adjusted_rand_score(groups, other)) for other, _ in again]
        found = [sizes for _, sizes in again]
        cells.append(row(f"all {len(images):,}", [held(images, exact)], agree, found, seconds))
        for wanted in (int(float(text)) for text in args.rows.split(",")):
            shares, agree, found, seconds = [], [], [], 0.0
            for seed in range(1, 1 + DRAWS):
                began = time.perf_counter()
                chosen = is_drawn(np.arange(len(images)), len(images), wanted, word(seed, Purpose.FIT_ROWS))
                spectrum = spectrum_of(images[chosen], preset["components"])
                seconds += (time.perf_counter() - began) / DRAWS
                shares.append(held(images, spectrum))
                other, sizes = neighbourhoods(images, spectrum, preset["whiten"], seed)
                agree.append(float(adjusted_rand_score(groups, other)))
                found.append(sizes)
            cells.append(row(f"{wanted:,}", shares, agree, found, seconds))
        print(f"\n{name}, {CLUSTERS} clusters, {WORKERS} workers")
        heads = ("rows fitted", "variance of all rows", "agreement", "sparse groups", "rows in them", "PCA s")
        print(table(cells, heads, right=(5,), indent="  "))


def row(name: str, shares: list[float], agree: list[float], found: list[Ints], seconds: float) -> tuple[str, ...]:
    sparse = [sizes[sizes <= WORKERS] for sizes in found]
    groups, rows = [float(len(few)) for few in sparse], [float(few.sum()) for few in sparse]
    return name, spread(shares, 4), spread(agree, 2), spread(groups, 0), spread(rows, 0), f"{seconds:.1f}"


if __name__ == "__main__":
    main()
