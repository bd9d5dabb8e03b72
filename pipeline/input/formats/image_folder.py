"""Folders of image files, one folder per class (ImageFolder): a class's folder is one data file, an image one row."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import CIFAR_SHAPE, Layout
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.files import class_of_folder, is_image_name, with_names_in_utf8
from pipeline.input.formats.base import DECODED_BYTES, Columns, DataFile, Format, block_spans
from pipeline.input.image_files import decode_image, first_shape, shape_of_image
from pipeline.input.read_options import ReadOptions

READ_AT_ONCE = 16  # files that a task reads at the same time; a remote file takes milliseconds
LISTED = 8  # folder listings that a process caches, because each block of rows needs that of its folder


class ImageFolder(Format):
    """The format of a folder whose files, at any depth, are the images of a class.

    Rows have the order of their paths. Files without the suffix of an image file are left out, and counted in the log."""

    name: ClassVar[str] = "image-folder"
    summary: ClassVar[str] = "folders of image files, one per class"
    labels_in: ClassVar[str] = "the folders below the input are the classes"
    opens: ClassVar[bool] = True
    reads_folders: ClassVar[bool] = True
    needs_others: ClassVar[bool] = True

    def recognises(self, file: FileInfo, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        return file.is_dir

    def survey(self, store: Store, file: FileInfo, options: ReadOptions) -> tuple[DataFile, Layout]:
        """Return the rows and layout of one folder, from a listing and its first valid image. Raises DataError."""
        # Labels are numbered later, when the names of all folders are there.
        images, others = _list_files(store, file.path)
        others_count = (
            f"{len(others):,} files without the suffix of an image file, such as {others[0]}" if others else ""
        )
        if not images:
            count = f", but {others_count}" if others else ""
            raise DataError(
                f"{file.path} holds no image files{count}; name the folder above the folders of the classes"
            )
        raw = Layout(CIFAR_SHAPE)
        expected = options.expected_shape and (options.expected_shape, True)
        shape, _ = first_shape(
            (partial(shape_of_image, _read(store, image), raw, image.path) for image in images), expected
        )
        class_name = class_of_folder(options.inner_path(file.path))
        layout = Layout(shape, class_names=(class_name,), named_labels=True)
        return DataFile(
            file.path,
            sum(image.bytes for image in images),
            max(image.modified_ms for image in images),
            len(images),
            decode_rows=max(1, DECODED_BYTES // layout.record_bytes),
            change=_digest(images),
            encoded=True,
            class_name=class_name,
            remark=others_count and f"leaves out {others_count}",
        ), layout

    def read(
        self, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
    ) -> Iterator[Columns]:
        """Yield the images start <= r < stop of a folder. Raises DataError if one is broken, or if files changed."""
        if not images:
            for span in block_spans(start, stop, record_bytes=1):
                yield Columns(_labels(file, span.stop - span.start), None)
            return
        listed = _images_of(store, file.path, file.change)
        if listed is None:
            raise DataError(f"{file.path}: its files changed while they were read")
        # Small files are read beside each other: a remote store takes milliseconds to open one.
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            for span in block_spans(start, stop, layout.record_bytes):
                some = listed[span]
                pixels = np.empty((len(some), layout.record_bytes), np.uint8)
                contents = pool.map(lambda image: _read(store, image), some)
                for at, (image, data) in enumerate(zip(some, contents, strict=True)):
                    pixels[at] = decode_image(data, layout, image.path, file.channels, file.size)
                yield Columns(_labels(file, len(some)), pixels)

    def where(self, file: DataFile, record: int, layout: Layout) -> str:
        return f"{file.path}, image {record} in the order of names"


def _list_files(store: Store, folder: str) -> tuple[list[FileInfo], list[str]]:
    """Return the image files below a folder in the order of their paths, and the paths of other files that are not hidden.

    One listing per folder."""
    images: list[FileInfo] = []
    others: list[str] = []
    for entry in store.list(folder):
        # A folder inside the folder of a class belongs to that class.
        if entry.name[0] in "._":
            continue
        if entry.is_dir:
            deeper_images, deeper_others = _list_files(store, entry.path)
            images += deeper_images
            others += deeper_others
        elif is_image_name(entry.name):
            images.append(entry)
        else:
            others.append(entry.path)
    return sorted(with_names_in_utf8(images), key=lambda image: image.path), sorted(others)


def _digest(images: list[FileInfo]) -> str:
    """Return a digest of paths, sizes, times and change marks of files."""
    lines = (f"{image.path} {image.bytes} {image.modified_ms} {image.change}\n" for image in images)
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()[:32]


@lru_cache(LISTED)
def _images_of(store: Store, folder: str, digest: str) -> list[FileInfo] | None:
    """Return the image files below a folder, or None if they are no longer those of the digest."""
    images, _ = _list_files(store, folder)
    return images if _digest(images) == digest else None


def _read(store: Store, image: FileInfo) -> bytes:
    try:
        return store.read(image.path)
    except FileNotFoundError:
        raise DataError(f"{image.path} was deleted while its folder was read") from None
    except PermissionError:
        raise DataError(f"{image.path} cannot be read: permission denied") from None


def _labels(file: DataFile, rows: int) -> npt.NDArray[np.int32]:
    return np.full(rows, file.label or 0, np.int32)
