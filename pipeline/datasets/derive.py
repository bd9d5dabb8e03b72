"""A data set derived from another: fewer rows, uneven classes, smaller images, or an order that round robin deals badly.

Studies use it as a cheap version of a data set, and as a control. The copy is Parquet: ``train.parquet`` and, if the
input has evaluation rows, ``test.parquet``. It needs no Spark, and holds the whole copy in memory to sort it."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core import command_line
from pipeline.core.arrays import Ints
from pipeline.core.command_line import Parser
from pipeline.core.errors import DataError, UsageError
from pipeline.core.json_values import parse_object
from pipeline.core.program import execute
from pipeline.core.seeds import Purpose, generator
from pipeline.core.shardset.layout import Layout
from pipeline.core.shardset.schema import record_schema
from pipeline.core.specs import Spec, add_flags, from_flags, option
from pipeline.core.storage.store import configured_store
from pipeline.core.storage.uri import local_folder
from pipeline.datasets.local_target import LocalTarget
from pipeline.input.dataset import Block, Dataset, discover, serial
from pipeline.input.evaluation import check_evaluation
from pipeline.input.formats.base import Columns, block_rows
from pipeline.input.records import record_batch
from pipeline.input.scan import WORD, fingerprint

RECORD = "_derived.json"  # the sources of the folder, so that a rerun can skip finished work
TRAIN = "train.parquet"
TEST = "test.parquet"

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Derivation(Spec):
    """The changes to a data set. order applies to training rows only."""

    shrink: int = option(1, "side of the squares of pixels that are averaged into a pixel", least=1)
    rows: int | None = option(None, "number of training rows to keep, from the first", least=1, shown="all")
    labels: Literal["given", "coarse"] = option(
        "given", "labels of the copy: those of the input, or the twenty coarse classes of CIFAR-100"
    )
    long_tail: float | None = option(
        None,
        "make training classes uneven: ratio of the rows of the first class to the rows of the last, between which the"
        " numbers of rows fall exponentially; each class keeps its first rows",
        metavar="RATIO",
        least=1,
        shown="as in the input",
    )
    order: Literal["given", "class-blocks"] = option(
        "given",
        "order of training rows; class-blocks sorts and interleaves them so that round robin over --workers gives every"
        " worker a block of classes",
    )
    dirichlet: float | None = option(
        None,
        "order training rows so that round robin over --workers gives every worker equally many rows, of classes in"
        " shares from a Dirichlet distribution with this concentration per class: 0.1 is very uneven, 100 almost even",
        metavar="ALPHA",
        above=0,
        most=1e6,
        shown="the order of --order",
    )
    seed: int = option(0, "seed of --dirichlet", least=0)
    workers: int | None = option(None, "number of workers for --order class-blocks or --dirichlet", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order == "class-blocks" and self.dirichlet is not None:
            raise UsageError(
                f"--order class-blocks and --dirichlet {self.dirichlet:g} are two orders: give one of them"
            )
        is_ordered = self.order == "class-blocks" or self.dirichlet is not None
        if is_ordered != (self.workers is not None):
            raise UsageError(
                "--workers N and --order class-blocks or --dirichlet ALPHA need each other: give both or neither"
            )


def shrink_images(images: Pixels, shape: tuple[int, int, int], factor: int) -> Pixels:
    """Return uint8 [rows, C*H*W] as [rows, C*(H/F)*(W/F)]: means of squares, rounded half up. Raises UsageError.

    Args:
        images: uint8 [rows, C*H*W].
        shape: (C, H, W).
        factor: F, the side of a square.
    """
    _check_squares(shape, factor)
    channels, height, width = shape
    squares = images.reshape(len(images), channels, height // factor, factor, width // factor, factor)
    sums = squares.sum(axis=(3, 5), dtype=np.int64)
    means: Pixels = ((2 * sums + factor**2) // (2 * factor**2)).astype(np.uint8)
    return means.reshape(len(images), -1)


def class_blocks(labels: npt.NDArray[np.int32], num_workers: int) -> Ints:
    """Return an order of the rows that gives round robin one block of classes per worker.

    Rows w, w + num_workers, w + 2 num_workers, ... of the order are block w of the rows sorted by class."""
    return _interleave(np.argsort(labels, kind="stable"), num_workers)


def dirichlet_blocks(labels: npt.NDArray[np.int32], num_workers: int, alpha: float, seed: int) -> Ints:
    """Return an order of the rows with which round robin gives workers equally many rows of uneven classes.

    As Hsu et al. (2019): each worker draws the shares of its classes from a Dirichlet distribution about the shares of the
    data set, and then takes rows without replacement. When a class has no rows left, its share goes to the other classes
    of the worker. Unlike the strategy ``dirichlet``, shards have equal sizes.

    Args:
        labels: class of each row.
        num_workers: number of workers.
        alpha: concentration, times the number of classes.
        seed: of the draws.
    """
    rng = generator(seed, Purpose.SKEW)
    classes, numbers, remaining = np.unique(labels, return_inverse=True, return_counts=True)
    sizes = [len(range(worker, len(labels), num_workers)) for worker in range(num_workers)]
    concentration = alpha * len(classes) * remaining / len(labels)
    rows_by_class = [np.flatnonzero(numbers == number) for number in range(len(classes))]
    blocks = []
    for size in sizes:
        shares = rng.dirichlet(concentration)
        taken_rows = np.zeros(len(classes), np.int64)
        while (missing := size - taken_rows.sum()) > 0:
            weights = np.where(remaining > taken_rows, shares, 0)
            # Tiny shares can be rounded to 0: then the rows that are left decide.
            if not weights.sum() > 0:
                weights = (remaining - taken_rows).astype(np.float64)
            draw = rng.multinomial(missing, weights / weights.sum())
            taken_rows = np.minimum(taken_rows + draw, remaining)
        blocks += [rows[:count] for rows, count in zip(rows_by_class, taken_rows, strict=True)]
        rows_by_class = [rows[count:] for rows, count in zip(rows_by_class, taken_rows, strict=True)]
        remaining = remaining - taken_rows
    return _interleave(np.concatenate(blocks), num_workers)


def _interleave(blocks: Ints, num_workers: int) -> Ints:
    """Return the order in which round robin over the workers gives each its consecutive part of ``blocks``."""
    places = np.concatenate([np.arange(worker, len(blocks), num_workers) for worker in range(num_workers)])
    order = np.empty(len(blocks), np.int64)
    order[places] = blocks
    return order


def long_tail_rows(labels: npt.NDArray[np.int32], ratio: float) -> Ints:
    """Return the rows of a long-tailed subset (Cao et al. 2019), ascending.

    Of K classes, class k keeps its first n ratio^(-k / (K - 1)) rows, rounded down but at least one, if the largest
    class has n rows."""
    classes, numbers, counts = np.unique(labels, return_inverse=True, return_counts=True)
    exponents = np.arange(len(classes)) / max(1, len(classes) - 1)
    # The small addition keeps a row that a rounded power would lose: 8 / 8^(1 / 3) rows are 4.
    targets = np.maximum(np.floor(counts.max(initial=0) / ratio**exponents + 1e-9), 1)
    chosen_rows = [np.flatnonzero(numbers == number)[: int(target)] for number, target in enumerate(targets)]
    return np.sort(np.concatenate(chosen_rows)) if chosen_rows else np.zeros(0, np.int64)


def order_of_rows(labels: npt.NDArray[np.int32], derivation: Derivation) -> Ints:
    """Return the rows of the copy, as positions in the input, in their order."""
    every = np.arange(len(labels))
    rows = every if derivation.long_tail is None else long_tail_rows(labels, derivation.long_tail)
    if derivation.workers is None:
        return rows
    if derivation.dirichlet is None:
        return rows[class_blocks(labels[rows], derivation.workers)]
    return rows[dirichlet_blocks(labels[rows], derivation.workers, derivation.dirichlet, derivation.seed)]


def train_and_test(source: str, evaluation: str | None = None) -> tuple[Dataset, Dataset | None]:
    """Return the training rows of an input, and its evaluation rows or None, with the numbers of their classes.

    Raises DataError, and UsageError if both are the same files.

    evaluation: the place of the evaluation rows; default: the same folder, if it has both."""
    store = configured_store()
    folder = store.resolve(source)
    train = discover(store, folder, run=serial)
    place = folder if evaluation is None else store.resolve(evaluation)
    test = discover(store, place, run=serial, evaluation=True, class_names=train.layout.class_names)
    # A folder without evaluation files has its training files for both.
    if evaluation is None and test.files == train.files:
        return train, None
    check_evaluation(train, test)
    return train, test


def derive(source: str, target: Path, derivation: Derivation, evaluation: str | None = None) -> bool:
    """Write the derived data set into the folder ``target``, completely or not at all.

    Return False if it exists already. Raises UsageError (a folder with other contents, images that cannot be shrunk)
    and DataError (broken input).

    Args:
        source: the input.
        target: the folder to make.
        derivation: the changes.
        evaluation: the place of evaluation rows, see ``train_and_test``.
    """
    train, test = train_and_test(source, evaluation)
    check_derivation(derivation, train)
    record = asdict(derivation) | {"train": content_digest(train), "eval": content_digest(test) if test else None}
    if target.is_dir() and any(target.iterdir()):
        return _refuse_other(target, record)

    def fill(folder: Path) -> None:
        """Write the files of the copy and the record of the derivation into an empty folder."""
        # Only training rows are dropped or reordered, so that evaluation results stay comparable.
        layout, rows = _read(train, min(derivation.rows or train.rows, train.rows), derivation)
        _write(folder / TRAIN, layout, rows, order_of_rows(rows.labels, derivation))
        if test:
            _write(folder / TEST, *_read(test, test.rows, derivation))
        (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")

    try:
        LocalTarget(target).publish(fill)
    except OSError:
        if target.is_dir() and any(target.iterdir()):  # another command has filled it meanwhile
            return _refuse_other(target, record)
        raise
    return True


def check_derivation(derivation: Derivation, dataset: Dataset) -> None:
    """Raise UsageError if the derivation does not fit the data set, DataError if nothing can be derived from it."""
    layout = dataset.layout
    if layout.dtype != "uint8" or layout.targets:
        raise DataError(f"{dataset.uri} contains {layout.describe()}: only labelled uint8 images can be derived")
    if derivation.labels == "coarse" and not layout.coarse:
        raise UsageError(f"--labels coarse: {dataset.uri} contains {layout.describe()}, without coarse labels")
    _check_squares(layout.shape, derivation.shrink)


def content_digest(dataset: Dataset) -> str:
    """Return a digest of every row, independent of file locations. Costs 1 microsecond per CIFAR row."""
    with np.errstate(over="ignore"):
        total = sum(fingerprint(block) for block in dataset.read(0, dataset.rows)) & WORD
    return f"{dataset.rows}-{total:016x}"


def _check_squares(shape: tuple[int, int, int], factor: int) -> None:
    if shape[1] % factor or shape[2] % factor:
        raise UsageError(f"--shrink {factor} must divide the images' height and width, {shape[1]} and {shape[2]}")


def _refuse_other(target: Path, expected: dict[str, object]) -> bool:
    """Return False if the folder holds the same derivation, complete. Raises UsageError or DataError otherwise."""
    try:
        # Folders of earlier versions lack the changes that these did not know.
        record = asdict(Derivation()) | parse_object((target / RECORD).read_bytes())
    except (OSError, ValueError):
        raise UsageError(f"--to {target} contains other files; choose a folder that does not exist yet") from None
    if record != expected:
        differing = next(key for key in expected | record if record.get(key) != expected.get(key))
        values = f"{differing} {record.get(differing)}, not {expected.get(differing)}"
        raise UsageError(f"{target} was derived with {values}; choose another folder, or delete it")
    # The record is written last, but a user may have deleted files since.
    missing = next(
        (name for name in [TRAIN, *([TEST] if expected["eval"] else [])] if not (target / name).is_file()), None
    )
    if missing:
        raise DataError(f"{target / missing} is missing; delete {target} and run the command again")
    return False


def _read(dataset: Dataset, count: int, derivation: Derivation) -> tuple[Layout, Columns]:
    """Return the layout and all columns of the first ``count`` rows, with shrunk images and the derivation's labels."""
    layout = dataset.layout
    labels = []
    coarse = []
    images = []
    # Shrunk block by block, so that memory never holds all images in full size.
    for block in dataset.read(0, count):
        labels.append(block.labels)
        if block.columns.coarse_labels is not None:
            coarse.append(block.columns.coarse_labels)
        images.append(shrink_images(block.images, layout.shape, derivation.shrink))
    channels, height, width = layout.shape
    smaller = replace(layout, shape=(channels, height // derivation.shrink, width // derivation.shrink))
    rows = Columns(np.concatenate(labels), np.concatenate(images), np.concatenate(coarse) if coarse else None)
    if derivation.labels == "given":
        return smaller, rows
    assert rows.coarse_labels is not None, "check_derivation"
    return replace(smaller, coarse=None), Columns(rows.coarse_labels, rows.images)


def _write(path: Path, layout: Layout, rows: Columns, order: Ints | None = None) -> None:
    """Write the rows as Parquet, with ids 0, 1, ... in the order written.

    order: positions of the rows to write, in that order; default: all, 0, 1, ..."""
    schema = record_schema(layout, neighbourhood=False, copy=False)
    whole = Block(np.arange(len(rows.labels)), rows)
    step = block_rows(layout.record_bytes)
    order = whole.ids if order is None else order
    count = len(order)
    with pq.ParquetWriter(path, schema, compression="none") as writer:
        for low in range(0, count, step):
            # Its ids are positions in ``rows``; in the new file, an id is the position there.
            batch = record_batch(schema, whole, order[low : low + step])
            ids = pa.array(np.arange(low, min(low + step, count)))
            writer.write_batch(batch.set_column(0, schema.field("id"), ids))


def parser() -> Parser:
    flags = command_line.parser("python -m pipeline derive", main.__doc__, "")
    flags.add_argument("--input", required=True, metavar="URI", help="folder or file of labelled images")
    flags.add_argument("--eval-input", metavar="URI", help="evaluation images, if --input has none")
    flags.add_argument("--to", required=True, metavar="DIR", help="local folder to create")
    add_flags(flags.add_argument_group("changes"), Derivation)
    return flags


def main(argv: Sequence[str]) -> None:
    """Write a smaller or long-tailed copy of a data set, or a copy in an order that round robin deals badly."""

    def run() -> int:
        args = command_line.parse(parser(), argv)
        is_new = derive(args.input, local_folder(args.to, "--to"), from_flags(Derivation, args), args.eval_input)
        print(f"{args.to}: {'written' if is_new else 'already written, nothing to do'}")
        return 0

    execute(run, interrupted="nothing was written; run it again")


if __name__ == "__main__":
    main(sys.argv[1:])
