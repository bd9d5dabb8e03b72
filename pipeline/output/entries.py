"""The manifest's entries, made from the results of the scan and of writing. Pure."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np

from pipeline.assignment.groups import GroupTable
from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError
from pipeline.core.shardset.parts import Assignment, Evaluation, Image, Input, Labels, Neighbourhood, ShardFile, Worker
from pipeline.output.assignment import AssignmentFile, WorkerTotals
from pipeline.output.writer import WrittenChunk, WrittenFile
from pipeline.spark.source import ScannedInput

LIBRARIES = ("pyspark", "numpy", "scipy", "pyarrow")


def describe_workers(
    chunks: list[WrittenChunk],
    num_workers: int,
    num_classes: int,
    allow_empty: bool,
    neighbourhoods: Ints | None = None,
) -> list[Worker]:
    """Return the entry of every worker.

    Args:
        chunks: the files.
        num_workers: n.
        num_classes: classes of the labels, which a worker without files has counts of too.
        allow_empty: accept workers without files.
        neighbourhoods: int64 [workers, neighbourhoods], rows per worker, if the manifest lists them.

    Raises:
        UsageError: a worker has no files, and allow_empty is False.
    """
    by_worker: list[list[WrittenFile]] = [[] for _ in range(num_workers)]
    # Chunks are in the order of ids, and so are the files of each worker in the manifest.
    for chunk in chunks:
        for file in chunk.files:
            by_worker[file.worker].append(file)
    check_empty([len(files) for files in by_worker], allow_empty)
    return [
        Worker(
            index=index,
            rows=sum(file.rows for file in files),
            copies=sum(file.copies for file in files),
            files=_files(files),
            label_histogram=_histogram(files, num_classes),
            neighbourhood_histogram=None if neighbourhoods is None else neighbourhoods[index].tolist(),
        )
        for index, files in enumerate(by_worker)
    ]


def check_empty(rows: Sequence[int], allowed: bool) -> None:
    """Raise UsageError if workers have no rows (or files) and that is not allowed."""
    empty = [index for index, count in enumerate(rows) if not count]
    if empty and not allowed:
        raise UsageError(
            f"{len(empty)} of {len(rows)} workers would get no rows (the first is {empty[0]});"
            f" use fewer workers, --start carry where the strategy has it, or --allow-empty"
        )


def describe_assigned_workers(
    tally: WorkerTotals, allow_empty: bool, neighbourhoods: Ints | None = None
) -> list[Worker]:
    """Return the entry of every worker of an assignment without shards.

    Args:
        tally: the totals of each worker.
        allow_empty: accept workers without rows.
        neighbourhoods: int64 [workers, neighbourhoods], rows per worker, if the manifest lists them.

    Raises:
        UsageError: a worker has no rows, and allow_empty is False.
    """
    check_empty(tally.rows.tolist(), allow_empty)
    return [
        Worker(
            index=index,
            rows=int(tally.rows[index]),
            copies=int(tally.copies[index]),
            files=[],
            label_histogram=tally.label_counts[index].tolist(),
            neighbourhood_histogram=None if neighbourhoods is None else neighbourhoods[index].tolist(),
        )
        for index in range(len(tally.rows))
    ]


def describe_assignment(files: list[AssignmentFile]) -> Assignment:
    return Assignment(rows=sum(file.rows for file in files), files=_files(files))


def _files(files: Sequence[WrittenFile | AssignmentFile]) -> list[ShardFile]:
    return [ShardFile(file.path, file.rows, file.bytes, file.sha256) for file in files]


def _histogram(files: list[WrittenFile], num_classes: int) -> list[int]:
    """Return the rows of some files by class, one number per class, also without files and for classes without rows."""
    counts = np.zeros(num_classes, np.int64)
    for file in files:
        counts[: len(file.label_counts)] += file.label_counts
    histogram: list[int] = counts.tolist()
    return histogram


def describe_neighbourhoods(table: GroupTable) -> list[Neighbourhood]:
    """Return the size of each neighbourhood and whether it is sparse, by its number."""
    pairs = zip(table.sizes, table.sparse, strict=True)
    return [Neighbourhood(int(size), bool(sparse)) for size, sparse in pairs]


def describe_image(source: ScannedInput) -> Image:
    """Return the shape, dtype and layout of images and the mean of each channel over all rows."""
    channels, height, width = source.dataset.layout.shape
    means = source.scan.channel_means(height * width)
    return Image([channels, height, width], source.dataset.layout.dtype, "CHW", means)


def describe_labels(source: ScannedInput) -> Labels:
    layout = source.dataset.layout
    columns = ["label"] * layout.labelled + ["coarse_label"] * bool(layout.coarse) + ["target"] * layout.targets
    return Labels(columns=columns, num_classes=source.scan.num_classes, class_names=list(layout.class_names))


def describe_eval(source: ScannedInput, chunks: list[WrittenChunk], origin: Input, num_classes: int) -> Evaluation:
    """Return the entry of the evaluation rows.

    Args:
        source: the scanned evaluation input.
        chunks: its files.
        origin: the entry of the input.
        num_classes: classes of the training rows, some of which the evaluation rows may lack.
    """
    files = [file for chunk in chunks for file in chunk.files]
    return Evaluation(
        rows=source.dataset.rows,
        files=_files(files),
        label_histogram=_histogram(files, num_classes),
        input=origin,
    )


def library_versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}
