"""The parts of a manifest as dataclasses. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OPTIONAL = {"optional": True}  # metadata of fields that are written only if they have a value


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file of a set.

    Attributes:
        path: relative to OUTPUT.
        rows: includes copies.
        bytes: size of the file.
        sha256: digest of the file's bytes.
    """

    path: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Input:
    """The rows that a set was made of.

    Attributes:
        uri: folder, file or pattern.
        format: such as ``parquet``.
        files: number of files.
        bytes: total size of the files.
        rows: rows of all files.
        fingerprint: ``rows-hash`` of the content, independent of order and files; None if it was not computed.
        listing: digest of the names, sizes and times of the files.
        attributes: sum of the hashes of the kept columns, in hexadecimal; None without such columns.
        quarantined: broken records that were left out.
        id_column: column that gave the order of a table's rows; None if the rows are no table's, and in sets of older
            versions.
    """

    uri: str = ""
    format: str = ""
    files: int = 0
    bytes: int = 0
    rows: int = 0
    fingerprint: str | None = None
    listing: str = ""
    attributes: str | None = field(default=None, metadata=OPTIONAL)
    quarantined: int = field(default=0, metadata=OPTIONAL)
    id_column: str | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class Image:
    """The images of a set.

    Attributes:
        shape: channels, height, width.
        dtype: type of a value, ``uint8`` or ``float32``.
        layout: order of the axes.
        mean: mean of each channel over all rows.
    """

    shape: list[int]
    dtype: str
    layout: str
    mean: list[float]

    @property
    def chw(self) -> tuple[int, int, int]:
        """Channels, height and width. Raises ValueError for a shape of another number of sides."""
        channels, height, width = self.shape
        return channels, height, width


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labels of a set.

    Attributes:
        columns: the columns beside the image: ``label``, ``coarse_label``, ``target``.
        num_classes: number of classes of ``label``.
        class_names: name of each class, by its number; empty if they are unknown.
    """

    columns: list[str] = field(default_factory=lambda: ["label"])
    num_classes: int
    class_names: list[str] = field(default_factory=list, metadata=OPTIONAL)


@dataclass(frozen=True, kw_only=True)
class Worker:
    """The shard of a worker.

    Attributes:
        index: number of the worker.
        rows: rows of the shard, copies included.
        copies: copies among them.
        files: in the order of ids; empty in an assignment without shards.
        label_histogram: rows by class.
        neighbourhood_histogram: rows by neighbourhood; None if there are none or too many to list.
    """

    index: int = 0
    rows: int = 0
    copies: int = 0
    files: list[ShardFile]
    label_histogram: list[int] = field(default_factory=list)
    neighbourhood_histogram: list[int] | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """A group of similar rows. size: number of rows; sparse: whether its rows are copied to every worker."""

    size: int
    sparse: bool


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluation rows of a set: their number, files in the order of ids, rows by class, and origin."""

    rows: int = 0
    files: list[ShardFile]
    label_histogram: list[int] = field(default_factory=list)
    input: Input = field(default_factory=Input)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The table of the worker of every row: its number of rows, copies included, and its files in the order of ids."""

    rows: int = 0
    files: list[ShardFile]


@dataclass(frozen=True)
class Repeats:
    """Rows whose images equal the images of other rows, byte for byte.

    Attributes:
        rows: training rows with the image of an earlier training row.
        evaluation: evaluation rows with the image of a training row.
        examples: the first of these training rows, each as [id of the earlier row, its own id].
        evaluation_examples: the first of these evaluation rows, each as [id of the training row, its own id].
    """

    rows: int = 0
    evaluation: int = 0
    examples: list[list[int]] = field(default_factory=list)
    evaluation_examples: list[list[int]] = field(default_factory=list)

    def sentences(self) -> list[str]:
        """Return a clause about the training rows and one about the evaluation rows, without those that have none."""
        lines = []
        if self.rows:
            example = "".join(f", such as {other} (row {first})" for first, other in self.examples[:1])
            lines.append(f"rows with the image of an earlier row: {self.rows:,}{example}")
        if self.evaluation:
            example = "".join(f", such as {other} (row {first})" for first, other in self.evaluation_examples[:1])
            lines.append(f"evaluation rows with the image of a training row: {self.evaluation:,}{example}")
        return lines


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The state of the stream that makes a growing set.

    Attributes:
        state_bytes: size of the counters of its buckets.
        window_first: id of the first row of the open window.
        query: id that the checkpoint gave the stream.
        newest_ms: time of the newest record, in ms since 1970.
        settings: everything except the rows that decides the shards; empty in sets of older versions.
    """

    state_bytes: int = 0
    window_first: int = 0
    query: str = ""
    newest_ms: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A generation of a growing set.

    Attributes:
        rows: rows of this generation, without copies.
        copies: copies of this generation's rows.
        total: rows up to and including this generation.
        fingerprint: fingerprint of the ``total`` rows.
        mean: mean of each channel over the ``total`` rows.
        buckets: number of buckets up to and including this generation.
        closes: whether a window ends with this generation.
        batch: number of the batch in the source.
        source: digest of the batch's origin.
        quarantined: records that were put aside.
        seconds: from the start of the batch to its commit.
        version: version of the manifest that added it, 0 before its commit.
    """

    rows: int
    copies: int
    total: int
    fingerprint: str
    mean: list[float]
    buckets: int = 0
    closes: bool = False
    batch: int
    source: str
    quarantined: int = 0
    seconds: float = 0.0
    version: int
