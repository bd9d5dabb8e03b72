"""A cache of rows that are expensive to decode: decoded once for all passes, into the executor's local folder.

Spark gives its executors' Python a local folder and deletes it with the application. Arrow maps the files from there.
Rows are decoded by each pass instead if there is no such folder or no room in it, or if local files must be
encrypted."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import PIL
import pyarrow as pa

from pipeline.core.shardset.layout import Layout
from pipeline.core.storage.store import Store
from pipeline.input.converted import read_converted
from pipeline.input.formats.base import Columns, DataFile, Format

LOCAL_DIRS = "SPARK_LOCAL_DIRS"  # the variable that Spark sets for its executors' Python
SPARE = 5  # 1/5 of a disk stays free: Spark itself needs room, and YARN stops using disks that are 90 % full


def decoder_versions() -> str:
    """Return the versions that decide which pixels an image file decodes to in this process."""
    return f"Pillow {PIL.__version__}, numpy {np.__version__}"


def read_decoded(
    kind: Format, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
) -> Iterator[Columns]:
    """Yield the records start <= r < stop like ``read_converted``, with the same arguments.

    Images that are expensive to decode are decoded once, by the first caller, and kept."""
    step = file.decode_rows if images else 0
    if not step:
        yield from read_converted(kind, store, file, start, stop, layout, images)
        return
    for low in range(start - start % step, stop, step):
        high = min(low + step, file.rows)
        path = _decoded_file(kind, store, file, low, high, layout)
        if path is None:
            yield from read_converted(kind, store, file, max(start, low), min(stop, high), layout, True)
        else:
            yield from _read_mapped(path, max(start, low) - low, min(stop, high) - low, layout)


def _decoded_file(kind: Format, store: Store, file: DataFile, low: int, high: int, layout: Layout) -> Path | None:
    """Return the file of decoded rows low <= r < high, made if it does not exist; None if it cannot be made.

    Args:
        kind: the format of the input file.
        store: the file system of the input.
        file: the input file.
        low: the first record.
        high: the record after the last.
        layout: the layout of the rows.
    """
    folders = os.environ.get(LOCAL_DIRS)
    if not folders or store.encrypts_spill:
        return None
    name = hashlib.sha256(f"{file} {layout} {low}".encode()).hexdigest()[:32]
    choices = folders.split(",")
    path = Path(choices[int(name, 16) % len(choices)], "decoded", name)
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        disk = shutil.disk_usage(path.parent)
        if disk.free - (high - low) * layout.record_bytes < (disk.used + disk.free) // SPARE:
            return None
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second task waits instead of decoding the same rows
            if not path.exists():
                _write_decoded(path, read_converted(kind, store, file, low, high, layout, True))
    except OSError:  # from the disk, or from the input: then the pass, which reads the input itself, raises it again
        return None
    return path


def _write_decoded(path: Path, batches: Iterator[Columns]) -> None:
    """Write rows block by block."""
    # A rename at the end, so that other tasks never see a partial file.
    handle, name = tempfile.mkstemp(dir=path.parent)
    os.close(handle)
    try:
        with pa.OSFile(name, "wb") as sink:
            writer = None
            for columns in batches:
                batch = _batch(columns)
                writer = writer or pa.ipc.new_file(sink, batch.schema)
                writer.write_batch(batch)
            if writer:
                writer.close()
        os.replace(name, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def _batch(columns: Columns) -> pa.RecordBatch:
    """Return rows as an Arrow batch, with images as binary values of one size, whose bytes are not copied."""
    assert columns.images is not None, "read with images=True"
    rows, size = columns.images.shape
    images = pa.py_buffer(np.ascontiguousarray(columns.images))
    present = {"label": columns.labels, "coarse_label": columns.coarse_labels, "target": columns.targets}
    arrays = {name: pa.array(column) for name, column in present.items() if column is not None}
    arrays |= columns.attributes
    arrays["image"] = pa.Array.from_buffers(pa.binary(size), rows, [None, images])
    return pa.RecordBatch.from_pydict(arrays)


def _read_mapped(path: Path, start: int, stop: int, layout: Layout) -> Iterator[Columns]:
    """Yield rows start <= r < stop of a decoded file, in the blocks that were written, without a copy."""
    names = [column.name for column in layout.attributes]
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    at = 0
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number)
        low = max(start - at, 0)
        high = min(stop - at, len(batch))
        if low < high:
            part = batch.slice(low, high - low)
            # Kept columns stay in Arrow, because they may hold text and nulls.
            beside = {name: part.column(name).to_numpy() for name in part.schema.names if name not in ("image", *names)}
            data = np.frombuffer(batch.column("image").buffers()[1], np.uint8).reshape(len(batch), -1)
            yield Columns(
                beside["label"],
                data[low:high],
                beside.get("coarse_label"),
                None,
                beside.get("target"),
                {name: part.column(name) for name in names},
            )
        at += len(batch)
