"""Files of one sample after the other, each with an image and a label: what tar and TFRecord share.

A survey reads a file once from its start. It marks where rows begin, so that tasks can start in the middle of a file."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import ClassVar, NamedTuple

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import CIFAR_SHAPE, MAX_CLASSES, Layout
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.formats.base import (
    DECODED_BYTES,
    MOST_LABEL,
    Columns,
    DataFile,
    Format,
    block_rows,
    check_label_range,
)
from pipeline.input.image_files import LOOKED_AT, ImageShape, decode_image, shape_of_image
from pipeline.input.read_options import ReadOptions

MOST_MARKS = 4096  # marks per file: every task gets the marks of all files


class Sample(NamedTuple):
    """A sample of a file.

    Attributes:
        offset: the byte at which reading can start with this sample.
        image: the image file or the raw pixels.
        label: a number or the name of a class; None without one.
        place: the file and the sample, for error lines.
        problem: why the sample cannot be read, although the next ones can; None if it can.
    """

    offset: int
    image: bytes
    label: int | str | None
    place: str
    problem: DataError | None = None


class SampleScan(NamedTuple):
    """The result of a pass over the samples of a file.

    offsets: the byte at which each sample begins. shape, is_encoded: of the first valid image, see ``shape_of_image``.
    label_type: the most frequent type of a label: int, str or NoneType. names: the classes that labels name."""

    offsets: list[int]
    shape: tuple[int, int, int]
    is_encoded: bool
    label_type: type
    names: set[str]


class SampleFormat(Format):
    """A format whose files are read sample by sample."""

    opens: ClassVar[bool] = True
    names_columns: ClassVar[bool] = True

    @abstractmethod
    def samples(
        self, store: Store, path: str, offset: int, image_name: str, label_name: str | None
    ) -> Iterator[Sample]:
        """Yield the samples of a file from a marked offset on. Raises DataError if the next sample cannot be found.

        Args:
            store: the file system.
            path: the file.
            offset: 0, or the offset of a sample.
            image_name: the value of --image-column, or "".
            label_name: the value of --label-column, or ""; None: labels are not looked at.
        """

    def can_seek(self, head: bytes) -> bool:
        """True if samples can be read from their offset on. head: the first bytes of the file."""
        return True

    def survey(self, store: Store, file: FileInfo, options: ReadOptions) -> tuple[DataFile, Layout]:
        """Return the rows and layout of one file, which is read whole. Raises DataError.

        With ``options.counts_broken`` broken samples are rows, which ``read`` refuses; labels of the less frequent kind
        (number, name or none) are broken, too."""
        image_name = options.image_column or ""
        label_name = options.label_column or ""
        raw = Layout(options.shape or CIFAR_SHAPE)
        samples = self.samples(store, file.path, 0, image_name, None if options.unlabelled else label_name)
        scan = _scan(samples, raw, options.counts_broken, options.expected_shape)
        if scan is None:
            return DataFile(file.path, file.bytes, file.modified_ms, 0, change=file.change), raw
        named = scan.label_type is str
        layout = Layout(
            scan.shape,
            labelled=scan.label_type is not type(None),
            class_names=tuple(sorted(scan.names)) if named else (),
            named_labels=named,
        )
        # Tasks start reading at a mark; a compressed file has none, and is decoded whole.
        rows = len(scan.offsets)
        step = max(1, DECODED_BYTES // layout.record_bytes)
        mark_rows = max(step, -(-rows // MOST_MARKS))
        can_seek = self.can_seek(store.read_range(file.path, 0, 512))
        return DataFile(
            file.path,
            file.bytes,
            file.modified_ms,
            rows,
            decode_rows=step if can_seek else rows,
            change=file.change,
            encoded=scan.is_encoded,
            image_column=image_name,
            label_column=label_name,
            marks=tuple(scan.offsets[::mark_rows]) if can_seek else (),
            mark_rows=mark_rows,
        ), layout

    def read(
        self, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
    ) -> Iterator[Columns]:
        """Yield samples start <= r < stop of a file, from the last mark before them. Raises DataError."""
        if store.info(file.path).bytes != file.bytes:
            raise DataError(f"{file.path} has another size than at its survey: it changed while it was read")
        # Rows between the mark and the first one are read and left out.
        number = start // file.mark_rows if file.marks else 0
        offset = file.marks[number] if number < len(file.marks) else 0
        first = number * file.mark_rows if file.marks else 0
        label_name = file.label_column if layout.labelled else None
        samples = self.samples(store, file.path, offset, file.image_column, label_name)
        wanted_rows = islice(samples, start - first, stop - first)
        step = block_rows(layout.record_bytes)
        numbers = {name: at for at, name in enumerate(layout.class_names)}
        while block := list(islice(wanted_rows, step)):
            if problem := next((sample.problem for sample in block if sample.problem), None):
                raise problem
            labels = [_number(sample, layout, numbers) for sample in block]
            pixels = None
            if images:
                pixels = np.empty((len(block), layout.record_bytes), np.uint8)
                for at, sample in enumerate(block):
                    pixels[at] = decode_image(sample.image, layout, sample.place, file.channels, file.size)
            yield Columns(np.array(labels, np.int32), pixels)


def _scan(
    samples: Iterable[Sample], raw: Layout, counts_broken: bool, expected: tuple[int, int, int] | None
) -> SampleScan | None:
    """Return the offsets, labels and image shape of the samples of a file, or None if it has none.

    Raises DataError for labels of several kinds, for a broken sample, and if none of the first images is valid.

    Args:
        samples: the samples.
        raw: the layout of raw images.
        counts_broken: accept broken samples and labels of several kinds.
        expected: see ``first_shape``.
    """
    offsets: list[int] = []
    names: set[str] = set()
    types: Counter[type] = Counter()
    shape: ImageShape | None = None
    problem: DataError | None = None
    for number, sample in enumerate(samples):
        offsets.append(sample.offset)
        if sample.problem and not counts_broken:
            raise sample.problem
        if sample.problem:
            problem = problem or sample.problem
            continue
        types[type(sample.label)] += 1
        if isinstance(sample.label, str):
            names.add(sample.label)
        if (len(types) > 1 and not counts_broken) or len(names) > MAX_CLASSES:
            raise DataError(
                f"{sample.place}: labels are all whole numbers, or all the names of at most {MAX_CLASSES:,} classes"
            )
        # A broken image does not condemn its file, unless none of the first ones is valid.
        if shape is None and number < LOOKED_AT:
            try:
                shape = shape_of_image(sample.image, raw, sample.place)
            except DataError as error:
                problem = problem or error
    if shape is None and expected and types:
        shape = (expected, True)
    if shape:
        return SampleScan(offsets, *shape, types.most_common(1)[0][0], names)
    if problem:
        raise problem
    return None


def _number(sample: Sample, layout: Layout, numbers: dict[str, int]) -> int:
    """Return the label of a sample as the number of its class. Raises DataError if there is none.

    numbers: the number of each class of the layout, by its name."""
    if not layout.labelled:
        return 0
    label = sample.label
    if layout.named_labels:
        is_name = isinstance(label, str) and (bool(numbers) or label.isdecimal())
        label = (numbers.get(str(label)) if numbers else int(str(label))) if is_name else None
    if not isinstance(label, int):
        raise DataError(f"{sample.place}: the label {sample.label!r} is no known class")
    if abs(label) > MOST_LABEL:
        check_label_range(np.array([label]), sample.place)
    return label
