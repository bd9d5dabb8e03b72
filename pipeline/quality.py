"""How far each shard is from the whole set, measured on the committed files alone.

Every figure is taken over the owner rows (copy == 0), so that broadcast duplicates, which are meant to be
everywhere, do not blur it; only the shard sizes count what a worker really reads, copies included.

Every distributed figure is split in three, none of which knows Spark: a local function of one shard file,
`merge` of two results, `finish` on the driver. `run(fn, items)` carries the local functions out: `in_process`
here, or in a job

    lambda fn, items: sc.parallelize(items, min(len(items), sc.defaultParallelism)).map(fn).collect()

(a task for every file would cost more in starting tasks than in reading).

Legend: N examples, W workers, L classes, K neighbourhoods, F features of an image, R random frequencies.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.spatial.distance import pdist
from scipy.stats import chi2_contingency

from pipeline.errors import DataError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating[Any]]
Item = TypeVar("Item")
Result = TypeVar("Result")
OpenFile = Callable[[str], IO[bytes]]

CELLS = 4  # a thumbnail has at most 4 x 4 cells a channel: 48 numbers for an RGB image of any size
FREQUENCIES = 512
SAMPLE_ROWS = 3000
BANDWIDTH_ROWS = 1000  # 499,500 pairs: the mean distance is then known to about 1 %
NO_VARIANCE = 1e-6  # what float32 rounding leaves of the variance of equal images, with room to spare
BATCH_ROWS = 2048  # 6 MB of 32 x 32 RGB images in memory at a time


class Run(Protocol):
    """Apply a picklable function to every item and return the results in order (`in_process`, or a Spark
    job)."""

    def __call__(self, fn: Callable[[Item], Result], items: Sequence[Item], /) -> list[Result]: ...


def in_process(fn: Callable[[Item], Result], items: Sequence[Item], /) -> list[Result]:
    """Apply fn to the items one after another in this process."""
    return [fn(item) for item in items]


def open_under(folder: str, path: str) -> IO[bytes]:
    """Open `path` of the shard set in a local folder; `partial(open_under, folder)` is an `OpenFile`."""
    return (Path(folder) / path).open("rb")


# --------------------------------------------------------------------------------------- reading a shard file


@dataclass(frozen=True)
class ShardFile:
    """One file of the manifest: whose it is, its path below the set's root, its rows."""

    worker: int
    path: str
    rows: int


@dataclass(frozen=True)
class SetSpec:
    """What a task must know of the shard set; small and picklable if `open_file` is."""

    open_file: OpenFile
    image_shape: tuple[int, int, int]  # channels, height, width
    label_column: str
    num_classes: int
    num_neighbourhoods: int  # 0: the set has no neighbourhood column

    @property
    def group_columns(self) -> list[str]:
        return [self.label_column, *(["neighbourhood"] if self.num_neighbourhoods else [])]


def set_spec(manifest: Mapping[str, Any], open_file: OpenFile) -> SetSpec:
    """Read from the manifest what the tasks need. Raises DataError for images other than planar uint8."""
    image = manifest["image"]
    shape = tuple(int(side) for side in image["shape"])
    if image["dtype"] != "uint8" or image["layout"] != "CHW" or len(shape) != 3:
        raise DataError(
            f"manifest.json describes images as {image['dtype']} {image['layout']} {list(shape)}; "
            "shard quality reads uint8 CHW: write the set with jobs/ of this version"
        )
    return SetSpec(
        open_file,
        (shape[0], shape[1], shape[2]),
        manifest["labels"]["columns"][0],
        int(manifest["labels"]["num_classes"]),
        len(manifest.get("neighbourhoods") or []),
    )


def shard_files(manifest: Mapping[str, Any]) -> list[ShardFile]:
    """List the files of the set, worker by worker."""
    return [
        ShardFile(int(worker["index"]), file["path"], int(file["rows"]))
        for worker in manifest["workers"]
        for file in worker["files"]
    ]


def open_parquet(file: ShardFile, handle: IO[bytes], columns: Iterable[str]) -> pq.ParquetFile:
    """Open one shard file and check it against the manifest.

    Raises DataError if it is no Parquet file, lacks one of `columns` or holds another number of rows."""
    try:
        parquet = pq.ParquetFile(handle)
    except pa.ArrowInvalid as error:
        raise DataError(f"{file.path} is not a readable Parquet file ({error}); rerun the job that wrote it") from error
    missing = sorted(set(columns) - set(parquet.schema_arrow.names))
    if missing:
        raise DataError(f"{file.path} lacks the column(s) {', '.join(missing)} the manifest announces; rerun the job")
    if parquet.metadata.num_rows != file.rows:
        raise DataError(
            f"{file.path} has {parquet.metadata.num_rows} rows, the manifest says {file.rows}; rerun the job"
        )
    return parquet


def read_batches(spec: SetSpec, file: ShardFile, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield one shard file's columns, row group by row group, at most BATCH_ROWS rows at a time."""
    with spec.open_file(file.path) as handle:
        parquet = open_parquet(file, handle, columns)
        for group in range(parquet.num_row_groups):
            yield from parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=list(columns))


def integers(batch: pa.RecordBatch, column: str, file: ShardFile, below: int | None = None) -> Ints:
    """One column as int64 [rows]. Raises DataError for nulls and, where `below` is given, values outside [0,
    below)."""
    array = batch.column(column)
    if array.null_count:
        raise DataError(f"{file.path} has {array.null_count} null(s) in {column}; rerun the job that wrote it")
    values: Ints = array.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    if below is not None and len(values) and (values.min() < 0 or values.max() >= below):
        raise DataError(
            f"{file.path} has {column} values from {values.min()} to {values.max()}, "
            f"the manifest allows 0 to {below - 1}; rerun the job that wrote it"
        )
    return values


def images(column: pa.Array, shape: tuple[int, int, int], file: ShardFile) -> npt.NDArray[np.uint8]:
    """A binary column as uint8 [rows, C, H, W] without a copy. Raises DataError if an image has another
    size."""
    size = math.prod(shape)
    if column.null_count or any(
        pa.compute.min_max(pa.compute.binary_length(column))[end].as_py() not in (size, None) for end in ("min", "max")
    ):
        raise DataError(
            f"{file.path} has images that are not {'x'.join(map(str, shape))} = {size} bytes; rerun the job"
        )
    wide = column.cast(pa.large_binary())
    _, offsets, data = wide.buffers()
    start = int(np.frombuffer(offsets, np.int64)[wide.offset]) if len(wide) else 0
    flat = np.frombuffer(data, np.uint8, len(wide) * size, start) if len(wide) else np.empty(0, np.uint8)
    return flat.reshape(len(wide), *shape)


# --------------------------------------------------------------------------------------- features of an image


def pooling_matrix(size: int, cells: int) -> npt.NDArray[np.float32]:
    """[size, cells] weights that average `size` pixels into equal cells; a pixel on a border is shared by
    area."""
    edges = np.linspace(0, size, cells + 1)
    pixels = np.arange(size)[:, None]
    overlap = np.minimum(edges[1:], pixels + 1) - np.maximum(edges[:-1], pixels)
    weights: npt.NDArray[np.float32] = (np.clip(overlap, 0, 1) * cells / size).astype(np.float32)
    return weights


def thumbnails(images_NCHW: npt.NDArray[np.uint8], cells: int = CELLS) -> npt.NDArray[np.float32]:
    """Average-pool images to at most cells x cells a channel: float32 [rows, F] in [0, 1]. O(pixels)."""
    rows, channels, height, width = images_NCHW.shape
    across = pooling_matrix(width, min(cells, width)) / np.float32(255)
    down = pooling_matrix(height, min(cells, height))
    columns_NCHw = images_NCHW.astype(np.float32) @ across
    pooled: npt.NDArray[np.float32] = np.matmul(down.T, columns_NCHw)
    flat: npt.NDArray[np.float32] = pooled.reshape(rows, channels * down.shape[1] * across.shape[1])
    return flat


def mean_distance(features: Floats) -> float:
    """Mean Euclidean distance over all pairs of at most BANDWIDTH_ROWS evenly chosen rows; 1.0 if all are
    equal."""
    chosen = features[sample_ids(len(features), BANDWIDTH_ROWS)]
    distance = float(pdist(chosen).mean()) if len(chosen) > 1 else 0.0
    return distance or 1.0


@dataclass(frozen=True)
class Embedding:
    """Random Fourier features of a Gaussian kernel exp(-|x - y|^2 / (2 bandwidth^2)) (Rahimi and Recht 2007).

    The dot product of two embedded rows estimates their kernel with an error of order 1/sqrt(frequencies);
    every embedded row has length 1."""

    num_features: int
    bandwidth: float
    frequencies: int = FREQUENCIES
    seed: int = 0

    def directions(self) -> npt.NDArray[np.float32]:
        """[F, R], drawn from the seed wherever it is needed rather than sent along with every task."""
        normal = np.random.default_rng(self.seed).standard_normal((self.num_features, self.frequencies))
        return (normal / self.bandwidth).astype(np.float32)

    def __call__(self, features: Floats) -> npt.NDArray[np.float32]:
        """float [rows, F] to float32 [rows, 2R]."""
        phase = features.astype(np.float32) @ self.directions()
        waves: npt.NDArray[np.float32] = np.concatenate([np.cos(phase), np.sin(phase)], axis=1)
        waves *= np.float32(1 / math.sqrt(self.frequencies))
        return waves


# --------------------------------------------------------------------------------------------- a fixed sample


@dataclass(frozen=True)
class Sample:
    """Rows spread evenly over the ids, in id order, each from its owner: int64 [rows] and float32 [rows,
    F]."""

    ids: Ints
    labels: Ints
    workers: Ints
    neighbourhoods: Ints | None
    features: npt.NDArray[np.float32]


def sample_ids(rows: int, limit: int = SAMPLE_ROWS) -> Ints:
    """At most `limit` ids spread evenly over [0, rows), ascending: the same for every sharding of one
    input."""
    count = min(limit, rows)
    return np.arange(count, dtype=np.int64) * rows // max(count, 1)


def sample_file(spec: SetSpec, ids: Ints, file: ShardFile) -> Sample:
    """Local step: those of `ids` that this file owns. One pass, one batch in memory."""
    parts = []
    for batch in read_batches(spec, file, ["id", "copy", "image", *spec.group_columns]):
        chosen = np.isin(integers(batch, "id", file), ids) & (integers(batch, "copy", file) == 0)
        kept = batch.filter(pa.array(chosen))
        parts.append(
            Sample(
                integers(kept, "id", file),
                integers(kept, spec.label_column, file, spec.num_classes),
                np.full(len(kept), file.worker, np.int64),
                integers(kept, "neighbourhood", file, spec.num_neighbourhoods) if spec.num_neighbourhoods else None,
                thumbnails(images(kept.column("image"), spec.image_shape, file)),
            )
        )
    return merge_samples(spec, parts)


def merge_samples(spec: SetSpec, parts: Sequence[Sample]) -> Sample:
    """Join samples and order them by id, so that the order of the files does not matter."""
    channels, height, width = spec.image_shape
    none = np.empty(0, np.int64)
    features = np.empty((0, channels * min(CELLS, height) * min(CELLS, width)), np.float32)
    ids = np.concatenate([none, *(part.ids for part in parts)])
    order = np.argsort(ids, kind="stable")
    groups = [part.neighbourhoods for part in parts if part.neighbourhoods is not None]
    return Sample(
        ids[order],
        np.concatenate([none, *(part.labels for part in parts)])[order],
        np.concatenate([none, *(part.workers for part in parts)])[order],
        np.concatenate([none, *groups])[order] if spec.num_neighbourhoods else None,
        np.concatenate([features, *(part.features for part in parts)])[order],
    )


def draw_sample(
    manifest: Mapping[str, Any], open_file: OpenFile, run: Run = in_process, limit: int = SAMPLE_ROWS
) -> Sample:
    """The owners of at most `limit` evenly spread ids; one pass over the images."""
    spec = set_spec(manifest, open_file)
    local = partial(sample_file, spec, sample_ids(int(manifest["rows"]), limit))
    return merge_samples(spec, run(local, shard_files(manifest)))


# ----------------------------------------------------------------------------------------- sums over all rows


@dataclass(frozen=True)
class Moments:
    """Sums over the rows of one worker; those of two disjoint parts add up to those of both."""

    worker: int
    rows: int  # copies included
    owners: int
    classes: Ints  # [L] owners of each class
    neighbourhoods: Ints  # [K] owners in each neighbourhood
    embedded_sum: npt.NDArray[np.float64]  # [2R]
    feature_sum: npt.NDArray[np.float64]  # [F]
    feature_square_sum: float


def merge(left: Moments, right: Moments) -> Moments:
    """The sums of two disjoint parts of one worker's rows."""
    if left.worker != right.worker:
        raise ValueError(f"moments of workers {left.worker} and {right.worker} cannot be merged")
    return Moments(
        left.worker,
        left.rows + right.rows,
        left.owners + right.owners,
        left.classes + right.classes,
        left.neighbourhoods + right.neighbourhoods,
        left.embedded_sum + right.embedded_sum,
        left.feature_sum + right.feature_sum,
        left.feature_square_sum + right.feature_square_sum,
    )


def no_moments(spec: SetSpec, embedding: Embedding, worker: int) -> Moments:
    """The sums over no row: the start of every merge, and all there is of an empty shard."""
    return Moments(
        worker,
        0,
        0,
        np.zeros(spec.num_classes, np.int64),
        np.zeros(spec.num_neighbourhoods, np.int64),
        np.zeros(2 * embedding.frequencies),
        np.zeros(embedding.num_features),
        0.0,
    )


def file_moments(spec: SetSpec, embedding: Embedding, file: ShardFile) -> Moments:
    """Local step: the sums over one file. One pass, one batch in memory; about 2 F R flops a row."""
    total = no_moments(spec, embedding, file.worker)
    for batch in read_batches(spec, file, ["copy", "image", *spec.group_columns]):
        owned = batch.filter(pa.array(integers(batch, "copy", file) == 0))
        features = thumbnails(images(owned.column("image"), spec.image_shape, file))
        labels = integers(owned, spec.label_column, file, spec.num_classes)
        groups = np.zeros(0, np.int64)
        if spec.num_neighbourhoods:
            groups = integers(owned, "neighbourhood", file, spec.num_neighbourhoods)
        part = Moments(
            file.worker,
            len(batch),
            len(owned),
            np.bincount(labels, minlength=spec.num_classes),
            np.bincount(groups, minlength=spec.num_neighbourhoods),
            embedding(features).sum(axis=0, dtype=np.float64),
            features.sum(axis=0, dtype=np.float64),
            float(np.square(features, dtype=np.float64).sum()),
        )
        total = merge(total, part)
    return total


# ---------------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class ChiSquare:
    """Pearson's test that the rows of a table were split over its columns by chance alone.

    statistic / dof is near 1 for a random split, below for a more even one. cramers_v is 0 to 1, whatever the
    size."""

    statistic: float
    dof: int
    p_value: float
    cramers_v: float


def chi_square(table: Ints) -> ChiSquare | None:
    """Test an exact table [workers, groups]; empty rows and columns do not count. None if fewer than 2 x 2
    are left."""
    table = table[table.sum(axis=1) > 0][:, table.sum(axis=0) > 0]
    if min(table.shape) < 2:
        return None
    test = chi2_contingency(table, correction=False)
    return ChiSquare(
        float(test.statistic),
        int(test.dof),
        float(test.pvalue),
        math.sqrt(float(test.statistic) / (float(table.sum()) * (min(table.shape) - 1))),
    )


def expected_shift(shard_rows: int, rows: int, variance: float) -> float:
    """E |mean of a shard - mean of the whole|^2 for `shard_rows` drawn without replacement: exact, not
    asymptotic.

    variance: mean squared distance of the rows to their mean."""
    if rows < 2 or shard_rows < 1:
        return 0.0
    return variance / shard_rows * (rows - shard_rows) / (rows - 1)


def shift_ratio(shift: float, shard_rows: int, rows: int, variance: float) -> float | None:
    """shift / its expectation under a random split; None where that cannot shift the mean either.

    That is so for one worker and for equal images, up to the rounding of float32."""
    expected = expected_shift(shard_rows, rows, variance)
    return shift / expected if expected and variance > NO_VARIANCE else None


def random_spread(vectors: Floats) -> float | None:
    """Standard deviation of one shard's shift ratio under a random split: sqrt(2 tr C^2) / tr C, C estimated
    here.

    The shift is a sum of chi-squares weighted by the eigenvalues of the covariance C. The mean ratio over n
    equal shards spreads by a factor sqrt(n - 1) less."""
    if len(vectors) < 3:
        return None
    centred = vectors - vectors.mean(axis=0)
    covariance = (centred.T @ centred) / len(vectors)
    trace = float(np.trace(covariance))
    return math.sqrt(2 * float(np.square(covariance).sum())) / trace if trace > NO_VARIANCE else None


@dataclass(frozen=True)
class ShardQuality:
    """One worker's figures. mmd2: squared maximum mean discrepancy between its owners and the whole set."""

    worker: int
    rows: int
    owners: int
    mmd2: float | None
    mmd_ratio: float | None  # mmd2 / its expectation under a random split of the same sizes
    mean_shift: float | None  # RMS difference of the mean thumbnail from the whole set's, in grey levels of 0..255
    mean_ratio: float | None  # the squared shift / its expectation under a random split


@dataclass(frozen=True)
class Quality:
    """All figures of a set. A ratio of 1 is what a random split gives on average; less is better."""

    rows: int  # distinct examples
    copies: int
    duplicate_share: float  # copies / rows
    max_rows: int  # of a shard, copies included
    min_rows: int
    size_ratio: float | None  # max / min; None if a shard is empty
    classes: ChiSquare | None
    neighbourhoods: ChiSquare | None  # over the dense ones: the sparse are broadcast, not split
    bandwidth: float
    mmd_ratio: float | None  # mean over the workers
    mmd_ratio_sd: float | None  # its standard deviation under random splits
    shard_mmd_ratio_sd: float | None  # that of one shard's ratio
    mean_ratio: float | None
    mean_ratio_sd: float | None
    shards: tuple[ShardQuality, ...]
    class_table: Ints  # [W, L] owners
    neighbourhood_table: Ints | None  # [W, K] owners
    feature_means: npt.NDArray[np.float64]  # [W, F] mean thumbnails; nan for an empty shard

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values; mean thumbnails are left out."""
        plain = asdict(self)
        del plain["feature_means"]
        plain["shards"] = list(plain["shards"])
        for name in ("class_table", "neighbourhood_table"):
            plain[name] = None if plain[name] is None else plain[name].tolist()
        return plain


def mean_of(values: Iterable[float | None]) -> float | None:
    """Mean of those that are known, or None."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def shard_quality(part: Moments, whole: Moments) -> ShardQuality:
    """Compare one worker's sums with the whole set's."""
    if not part.owners:
        return ShardQuality(part.worker, part.rows, 0, None, None, None, None)
    embedded_mean = whole.embedded_sum / whole.owners
    feature_mean = whole.feature_sum / whole.owners
    mmd2 = float(np.square(part.embedded_sum / part.owners - embedded_mean).sum())
    shift = float(np.square(part.feature_sum / part.owners - feature_mean).sum())
    # Every embedded row has length 1, so the mean square is 1.
    embedded_variance = 1 - float(embedded_mean @ embedded_mean)
    feature_variance = whole.feature_square_sum / whole.owners - float(feature_mean @ feature_mean)
    return ShardQuality(
        part.worker,
        part.rows,
        part.owners,
        mmd2,
        shift_ratio(mmd2, part.owners, whole.owners, embedded_variance),
        255 * math.sqrt(shift / len(feature_mean)),
        shift_ratio(shift, part.owners, whole.owners, feature_variance),
    )


def finish(manifest: Mapping[str, Any], parts: Sequence[Moments], sample: Sample, embedding: Embedding) -> Quality:
    """Turn the sums, one entry a worker in the order of their indices, into the figures. O(W (L + K + R)).

    Raises DataError if the owners are not exactly the manifest's distinct examples."""
    whole = reduce(merge, [Moments(**{**vars(part), "worker": -1}) for part in parts])
    if whole.owners != int(manifest["rows"]):
        raise DataError(f"the shards own {whole.owners} examples, manifest.json says {manifest['rows']}; rerun the job")
    sizes = [part.rows for part in parts]
    class_table = np.stack([part.classes for part in parts])
    neighbourhoods = manifest.get("neighbourhoods")
    neighbourhood_table = np.stack([part.neighbourhoods for part in parts]) if neighbourhoods else None
    dense = np.array([not group["sparse"] for group in neighbourhoods or []], bool)
    shards = tuple(shard_quality(part, whole) for part in parts)
    mmd_sd, mean_sd = random_spread(embedding(sample.features)), random_spread(sample.features)
    narrower = math.sqrt(len(parts) - 1)
    return Quality(
        whole.owners,
        whole.rows - whole.owners,
        (whole.rows - whole.owners) / max(whole.owners, 1),
        max(sizes),
        min(sizes),
        max(sizes) / min(sizes) if min(sizes) else None,
        chi_square(class_table),
        None if neighbourhood_table is None else chi_square(neighbourhood_table[:, dense]),
        embedding.bandwidth,
        mean_of(shard.mmd_ratio for shard in shards),
        mmd_sd / narrower if mmd_sd is not None and narrower else None,
        mmd_sd if narrower else None,
        mean_of(shard.mean_ratio for shard in shards),
        mean_sd / narrower if mean_sd is not None and narrower else None,
        shards,
        class_table,
        neighbourhood_table,
        np.stack(
            [
                part.feature_sum / part.owners if part.owners else np.full_like(part.feature_sum, np.nan)
                for part in parts
            ]
        ),
    )


def measure(
    manifest: Mapping[str, Any],
    open_file: OpenFile,
    run: Run = in_process,
    *,
    sample: Sample | None = None,
    seed: int = 0,
) -> Quality:
    """Measure a committed set: one pass for the sample (unless given), one for the sums; the driver holds one
    small record a file. The seed fixes the random frequencies, so two sets measured alike can be compared.

    Raises DataError if a file disagrees with the manifest."""
    spec = set_spec(manifest, open_file)
    sample = draw_sample(manifest, open_file, run) if sample is None else sample
    embedding = Embedding(sample.features.shape[1], mean_distance(sample.features), seed=seed)
    files = shard_files(manifest)
    workers = {index: no_moments(spec, embedding, index) for index in range(int(manifest["num_workers"]))}
    for part in run(partial(file_moments, spec, embedding), files):
        workers[part.worker] = merge(workers[part.worker], part)
    return finish(manifest, list(workers.values()), sample, embedding)
