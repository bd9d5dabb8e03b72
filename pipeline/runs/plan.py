"""The cost of a sharding run by phase: tasks, files, bytes sent to the driver, memory per task, arithmetic. Pure.

The formulas follow the code: the split of rows (assignment/chunks.py), the data that tasks send to the driver (scan,
gram, lloyd, chunk counts, written files) and the data that they hold. tests/spark/test_plan.py compares them with the
bytes of real runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.assignment.blocks import PART_ROWS, block_bytes
from pipeline.assignment.chunks import (
    BUFFER_BYTES,
    chunk_bounds,
    pass_pieces,
    piece_bounds,
    point_pieces,
    workers_per_task,
)
from pipeline.assignment.groups import MOST_COUNTS
from pipeline.clustering.far import FAR_ROWS, SHARE
from pipeline.clustering.fit import MANY_ROWS, ONE_TASK_PRODUCTS, REFINEMENT_ROWS
from pipeline.clustering.gram import rows_are_fewer, rows_to_fit
from pipeline.clustering.lloyd import BLOCK_ROWS, MOST_CLUSTERS, MOST_COMPARED, sample_rows
from pipeline.clustering.points import ONE_TASK_BYTES
from pipeline.clustering.reduction import arrivals
from pipeline.clustering.similarity import similarity_bytes
from pipeline.core.errors import UsageError
from pipeline.core.sizes import bytes_in_words
from pipeline.input.dataset import NEAR_BYTES
from pipeline.strategies.hash import MOST_BUCKETS, rows_to_sample

RESULT = 560  # bytes of a small result object on its way to the driver
FILE = 430  # bytes of a written file's entry, without its label counts
# bytes per entry of the manifest
MANIFEST_FILE = 200
MANIFEST_WORKER = 260
MANIFEST_GROUP = 45
ITERATIONS = 50  # estimated iterations of k-means; --max-iter is the limit
RESULT_LIMIT = 1 << 30  # Spark's default for all results of a stage together
MANY_FILES = 1_000_000
PYTHON_TASK = 120 << 20  # bytes of a Python worker with its libraries
PAIR_FLOP = 600  # operations that take as long as the table look-up and the use of one similarity


@dataclass(frozen=True)
class Shape:
    """The size of the input and the configuration.

    Attributes:
        rows: rows to shard.
        workers: number of shards.
        record_bytes: bytes of an image, as pixels.
        classes: number of classes.
        clusters: number of neighbourhoods; 0 for a strategy without them.
        components: components of the PCA.
        cores: cores of all executors.
        fit_rows: rows to which the PCA or the hash functions are fitted; see ``gram.rows_to_fit``.
        blocks: blocks per class of a submodular strategy, or 0.
        functions: hash functions that define the neighbourhoods, or 0.
    """

    rows: int
    workers: int
    record_bytes: int
    classes: int = 10
    clusters: int = 0
    components: int = 50
    cores: int = 2
    fit_rows: int | str = "auto"
    blocks: int = 0
    functions: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in ("clusters", "blocks", "functions") else 1
            if name != "fit_rows" and value < least:
                raise UsageError(f"{name.replace('_', ' ')} must be at least {least}, got {value}")
        if self.workers > self.rows:
            raise UsageError(f"{self.workers:,} workers are more than {self.rows:,} rows")


@dataclass(frozen=True)
class PhaseCost:
    """The cost of a phase.

    Attributes:
        name: name of the phase.
        tasks: number of tasks.
        driver_bytes: upper bound of the data that one stage sends to the driver.
        task_bytes: memory of a task.
        read_bytes: bytes read by all tasks.
        write_bytes: bytes written by all tasks.
        flop: operations of all tasks.
        stages: number of times that the tasks run.
    """

    name: str
    tasks: int
    driver_bytes: int
    task_bytes: int
    read_bytes: int = 0
    write_bytes: int = 0
    flop: float = 0.0
    stages: int = 1


@dataclass(frozen=True)
class CostEstimate:
    """The cost of a run.

    Attributes:
        shape: its input.
        phases: in order.
        files: number of shard files.
        manifest_bytes: size of the manifest.
        spills: True if rows pass through files by ranges of workers.
    """

    shape: Shape
    phases: tuple[PhaseCost, ...]
    files: int
    manifest_bytes: int
    spills: bool

    @property
    def driver_bytes(self) -> int:
        """Upper bound of the driver's Python memory beside its libraries: one stage's results, or the manifest during
        its write."""
        return max(2 * max(phase.driver_bytes for phase in self.phases), 6 * self.manifest_bytes)


def plan(shape: Shape) -> CostEstimate:
    """Return the plan for a shape. O(chunks)."""
    n = shape.rows
    size = shape.record_bytes
    parts = chunk_bounds(n, shape.workers, size)
    at_once = workers_per_task(shape.workers, size)
    spills = shape.workers > at_once
    bounds = piece_bounds(parts, size) if spills else parts
    pieces = pass_pieces(n, size, shape.cores)
    counts_sent = len(bounds) + pieces - 1  # a chunk that two pieces share is counted in both
    scan = PhaseCost(
        "scan", pieces, 8 * counts_sent * shape.classes + RESULT * pieces, PYTHON_TASK, read_bytes=n * size
    )
    phases = [scan]
    if shape.functions:
        phases += _hashing(shape, pieces, counts_sent)
    elif shape.clusters:
        phases += _clustering(shape, pieces, counts_sent)
    elif shape.blocks:
        phases += [*_embedding(shape, pieces), _blocks(shape)]
    files = sum(min(shape.workers, high - low) for low, high in parts)
    file_entries = files * (FILE + 8 * shape.classes)
    task_bytes = PYTHON_TASK + min(BUFFER_BYTES, 2 * 1000 * size * at_once)
    if spills:
        ranges = -(-shape.workers // at_once)
        phases.append(PhaseCost("spill", len(bounds), 120 * len(bounds), task_bytes, n * size, n * size))
        phases.append(PhaseCost("gather", ranges * len(parts), file_entries, task_bytes, n * size, n * size))
    else:
        phases.append(PhaseCost("write", len(bounds), file_entries, task_bytes, n * size, n * size))
    manifest = files * MANIFEST_FILE + shape.workers * (MANIFEST_WORKER + 6 * shape.classes) + 40 * len(parts)
    manifest += MANIFEST_GROUP * shape.clusters
    if shape.workers * shape.clusters <= MOST_COUNTS:
        manifest += 9 * shape.workers * shape.clusters
    return CostEstimate(shape, tuple(phases), files, manifest, spills)


def _embedding(shape: Shape, pieces: int) -> Iterator[PhaseCost]:
    """Yield the phases of fitting a PCA and of projecting all rows.

    pieces: number of tasks of a pass over the images."""
    n = shape.rows
    d = shape.record_bytes
    p = shape.components
    fit_rows = rows_to_fit(shape.fit_rows, n, d)
    # A task also reads the gap before each row of the sample, up to NEAR_BYTES.
    read = min(n * d, fit_rows * (d + NEAR_BYTES))
    if rows_are_fewer(fit_rows, d):
        task_bytes = 4 * fit_rows * d + 20 * fit_rows**2 + 16 * d * p
        yield PhaseCost("draw", pieces, RESULT, PYTHON_TASK, read)
        yield PhaseCost("pca", 1, 8 * d * (p + 1), task_bytes + PYTHON_TASK, fit_rows * d, 0, float(fit_rows) ** 2 * d)
    else:
        # A task sends int64 if a sum of squares exceeds int32; a pixel minus 128 has a mean square of about 2^12.
        sum_bytes = 8 if fit_rows / pieces * 2**12 >= 2**31 else 4
        driver_bytes = arrivals(pieces) * (d * (d + 1) // 2 * sum_bytes + 8 * d)
        yield PhaseCost("pca", pieces, driver_bytes, 12 * d * d + PYTHON_TASK, read, 0, float(fit_rows) * d * d)
    points = 4 * n * p
    pieces = point_pieces(pieces, points)
    yield PhaseCost("project", pieces, RESULT, PYTHON_TASK + points // pieces, n * d, 0, 2.0 * n * d * p)


def _blocks(shape: Shape) -> PhaseCost:
    """Return the phase of a submodular strategy.

    It assumes classes of equal size, split into parts if they are large, and the set function whose blocks take more
    memory."""
    of_class = -(-shape.rows // shape.classes)
    parts = -(-of_class // PART_ROWS)
    rows = -(-of_class // parts)
    groups = shape.classes * parts
    task_bytes = similarity_bytes(rows, shape.components) + block_bytes(rows, shape.blocks, "facility-location")
    flop = groups * float(rows) ** 2 * (2 * shape.components + PAIR_FLOP)
    return PhaseCost("blocks", groups, RESULT * groups, PYTHON_TASK + task_bytes, 0, 0, flop)


def _clustering(shape: Shape, pieces: int, counts_sent: int) -> Iterator[PhaseCost]:
    """Yield the phases of strategies that use neighbourhoods: PCA, projection, k-means and assignment.

    Args:
        shape: the input.
        pieces: number of tasks of a pass over the images.
        counts_sent: number of chunks for which the tasks of such a pass send counts; a chunk counts once per task that has
            rows of it.
    """
    n = shape.rows
    p = shape.components
    k = shape.clusters
    yield from _embedding(shape, pieces)
    points = 4 * n * p
    counts_sent += point_pieces(pieces, points) - pieces
    pieces = point_pieces(pieces, points)
    received = arrivals(pieces)
    far = min(FAR_ROWS, n // SHARE) * (4 * p + 16)
    sample = min(n, sample_rows(k)) * (4 * p + 8)
    passes = ITERATIONS + 2
    task_bytes = PYTHON_TASK + 24 * min(BLOCK_ROWS * k, MOST_COMPARED)
    # Small inputs are clustered by one task, within the limits of pipeline/clustering.
    if points <= ONE_TASK_BYTES and n * p * k <= ONE_TASK_PRODUCTS:
        yield PhaseCost(
            "kmeans", 1, 8 * k * (p + 1) + RESULT, task_bytes + 3 * points + 40 * n, 0, 0, passes * 2.0 * n * p * k
        )
    else:
        # With many rows, the centres first settle on a subset of about REFINEMENT_ROWS rows.
        if n > MANY_ROWS and REFINEMENT_ROWS * p * k <= ONE_TASK_PRODUCTS:
            work = passes * 2.0 * REFINEMENT_ROWS * p * k
            yield PhaseCost("settle", 1, 8 * k * (p + 1), task_bytes + REFINEMENT_ROWS * (8 * p + 40), flop=work)
        driver_bytes = received * max(far, sample, 8 * k * (p + 1))
        yield PhaseCost(
            "kmeans", pieces, driver_bytes, task_bytes + 2 * points // pieces, 0, 0, passes * 2.0 * n * p * k, passes
        )
    yield PhaseCost("assign", pieces, 8 * counts_sent * k + RESULT * pieces, task_bytes, 0, 0, 2.0 * n * p * k)


def _hashing(shape: Shape, pieces: int, counts_sent: int) -> Iterator[PhaseCost]:
    """Yield the phases of the strategy hash with ``dsh``, the hash family with the most expensive fit.

    See ``_clustering`` for the arguments."""
    n = shape.rows
    d = shape.record_bytes
    m = shape.functions
    k = shape.clusters
    fit_rows = rows_to_sample(shape.fit_rows, n, d)
    # The fit uses the smaller product matrix, of the rows or of the values per image.
    small = rows_are_fewer(fit_rows, d)
    task_bytes = 3 * fit_rows * d + (20 * fit_rows**2 if small else 12 * d * d)
    flop = float(fit_rows) * d * (fit_rows if small else d)
    yield PhaseCost(
        "functions", 1, 8 * d * m, PYTHON_TASK + task_bytes, min(n * d, fit_rows * (d + NEAR_BYTES)), 0, flop
    )
    keys = 16 * n
    # Keys stay cached until rows are assigned, so their size can demand more tasks.
    counts_sent += point_pieces(pieces, keys) - pieces
    pieces = point_pieces(pieces, keys)
    task_bytes = PYTHON_TASK + 8 * BLOCK_ROWS * (d + m)
    yield PhaseCost("hash", pieces, RESULT * pieces, task_bytes, n * d, 0, 2.0 * n * d * m)
    yield PhaseCost("buckets", pieces, 16 * k * arrivals(pieces), PYTHON_TASK + 3 * keys // pieces)
    yield PhaseCost("assign", pieces, 8 * counts_sent * k + RESULT * pieces, PYTHON_TASK + 4 * keys // pieces)


def warnings(estimate: CostEstimate, memory_a_task: int) -> list[str]:
    """Return one line per problem that the run would have.

    memory_a_task: bytes that an executor has for each task."""
    shape = estimate.shape
    lines = []
    # The number of buckets is only known after all rows are hashed, so the run itself would fail late.
    if shape.functions and shape.clusters > MOST_BUCKETS:
        lines.append(f"{shape.clusters:,} buckets exceed the limit of {MOST_BUCKETS:,}")
    if not shape.functions and shape.clusters > MOST_CLUSTERS:
        lines.append(f"{shape.clusters:,} clusters exceed the limit of k-means, {MOST_CLUSTERS:,}")
    for phase in estimate.phases:
        if phase.driver_bytes > RESULT_LIMIT:
            sent_gb = phase.driver_bytes / 1e9
            lines.append(f"{phase.name} sends the driver {sent_gb:.1f} GB: set spark.driver.maxResultSize above it")
        if phase.task_bytes > memory_a_task:
            lines.append(
                f"a task of {phase.name} needs {phase.task_bytes / 1e9:.1f} GB, but has {memory_a_task / 1e9:.1f}:"
                " give executors more memory, or fewer cores each"
            )
    if shape.clusters and shape.rows <= shape.clusters * shape.workers:
        lines.append(
            f"{shape.clusters:,} neighbourhoods have {shape.rows // shape.clusters:,} rows on average: any of at most"
            f" {shape.workers:,} rows go to every worker, which is not counted above; use fewer clusters"
        )
    if shape.components > shape.record_bytes and shape.clusters and not shape.functions:
        lines.append(f"{shape.components:,} components exceed the number of values per image")
    if estimate.files > MANY_FILES:
        lines.append(
            f"{estimate.files:,} files: a NameNode needs about 150 bytes of memory per file,"
            " and the manifest lists all files"
        )
    if estimate.manifest_bytes > 100 << 20:
        size = bytes_in_words(estimate.manifest_bytes)
        lines.append(f"the manifest has {size}, which every reader reads completely")
    if shape.rows // shape.workers < 100:
        lines.append(f"about {shape.rows // shape.workers} rows per worker, so each file consists mostly of its footer")
    return lines
