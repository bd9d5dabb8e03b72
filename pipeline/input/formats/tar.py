"""Tar archives of samples (WebDataset): files with one key, such as 0001.jpg and 0001.cls, are a row."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import zlib
from collections.abc import Iterator
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import MAX_IMAGE_BYTES
from pipeline.core.shardset.schema import words_of
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.core.storage.uri import readable
from pipeline.input.files import SPLIT, TRAINING, is_image_name
from pipeline.input.formats.gzipped import GZIP, inflate_start
from pipeline.input.formats.inflation import InflationLimit, LimitedReader
from pipeline.input.formats.samples import Sample, SampleFormat

BLOCK = 512  # bytes of a header; contents are padded to a multiple of it
MAGIC_PLACE = 257  # offset of the word ustar in a header
BUFFER_BYTES = 1 << 20
MOST_TEXT = 1 << 20  # bytes of a label or of a sample's JSON
CIFAR_FOLDER = re.compile(rb"(\./)?cifar-(10|100)-(batches-bin|batches-py|binary|python)[/\0]")  # of its archives
LABEL_SUFFIXES = ("cls", "class", "label")
JSON_KEYS = ("label", "cls", "class")


class ArchivedFile(NamedTuple):
    """A file of an archive: the offset of its header, its folder, its name up to the first dot, and its suffix."""

    offset: int
    folder: str
    stem: str
    suffix: str
    data: bytes


class Tar(SampleFormat):
    """The format of tar archives, also compressed by gzip, whose rows have the order of the archive."""

    name: ClassVar[str] = "tar"
    summary: ClassVar[str] = "tar archives of samples (WebDataset), or of folders of image files; also .tar.gz"
    labels_in: ClassVar[str] = "a sample has one in a file .cls or .json, or in the name of its folder"

    def recognises(self, file: FileInfo, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        start = inflate_start(head, 2 * BLOCK)
        return is_tar(start) and not CIFAR_FOLDER.match(start)

    def can_seek(self, head: bytes) -> bool:
        return head[:2] != GZIP

    def samples(
        self, store: Store, path: str, offset: int, image_name: str, label_name: str | None
    ) -> Iterator[Sample]:
        """Yield the samples of an archive; files that are neither images nor beside one are left out."""
        members = read_members(store, path, offset)
        sides: dict[bool, str] = {}  # a folder of training rows, and one of others
        # Only neighbours can be one sample, so that an archive is read in one pass.
        for (folder, stem), some in groupby(members, lambda member: (member.folder, member.stem)):
            place = f"{path}, sample {folder}{'/' * bool(folder)}{stem}"
            first, image, files = _files_of_sample(some, image_name, place)
            if image is None:
                if label_name is not None and any(suffix in files for suffix in (label_name, *LABEL_SUFFIXES)):
                    raise DataError(f"{place} has no image, but only the files .{', .'.join(sorted(files))}")
                continue
            if label_name is None:
                yield Sample(first, image.data, None, place)
                continue
            try:
                label = _label(files, folder, label_name, place)
            except DataError as error:
                yield Sample(first, b"", None, place, error)
                continue
            above = folder.split("/")
            # The last folder may be the class, whatever its name.
            for name in above[:-1] if label == above[-1] else above:
                if SPLIT.fullmatch(name):
                    sides[bool(TRAINING.fullmatch(name))] = name
            if len(sides) > 1:
                raise DataError(
                    f"{path} has the folders {sides[True]} and {sides[False]}, so that evaluation rows would be trained:"
                    " extract it and name its folder, or archive each of them alone"
                )
            yield Sample(first, image.data, label, place)


def _files_of_sample(
    members: Iterator[ArchivedFile], image_name: str, place: str
) -> tuple[int, ArchivedFile | None, dict[str, ArchivedFile]]:
    """Return the offset of a sample, its image, or None, and its files by suffix. Raises DataError for several images."""
    files: dict[str, ArchivedFile] = {}
    image: ArchivedFile | None = None
    first = -1
    for member in members:
        first = member.offset if first < 0 else first
        if member.suffix == image_name if image_name else is_image_name(f".{member.suffix}"):
            # Such as cat.0.jpg and cat.1.jpg: all but one would be lost.
            if image:
                raise DataError(
                    f"{place} has several images, .{image.suffix} and .{member.suffix}: name one by --image-column,"
                    " or give the files names that differ before the first dot"
                )
            image = member
        files[member.suffix] = member
    return first, image, files


def is_tar(head: bytes) -> bool:
    """True if bytes begin as a tar archive."""
    return head[MAGIC_PLACE : MAGIC_PLACE + 5] == b"ustar"


def read_members(store: Store, path: str, offset: int) -> Iterator[ArchivedFile]:
    """Yield the files of an archive, from the header at ``offset`` on. Raises DataError if it is damaged or cut.

    Nothing is written: names that lead out of a folder are only names."""
    try:
        with store.open(path) as raw, io.BufferedReader(raw, BUFFER_BYTES) as file:  # type: ignore[type-var]
            packed = file.peek(2)[:2] == GZIP
            size = store.info(path).bytes
            if not packed and size % BLOCK:
                raise DataError(f"{path} is cut: its size is no multiple of {BLOCK} bytes")
            file.seek(offset)
            content: Any = file
            if packed:
                # Members that are no images are inflated too, and so are headers, which are held whole.
                content = LimitedReader(gzip.GzipFile(fileobj=file), InflationLimit(size))
            with tarfile.open(fileobj=content, mode="r|" if packed else "r:") as archive:
                for info in archive:
                    name = info.name.rpartition("/")[2]
                    is_hidden = name.startswith(".")  # as of the files that macOS adds
                    if info.isfile() and not is_hidden:
                        yield _member(archive, info, path)
                    elif (info.islnk() or info.issym()) and not is_hidden and _is_of_sample(name):
                        raise DataError(
                            f"{path}, file {info.name[:200]}: a link, whose row would be lost; archive the files with tar"
                            " --dereference --hard-dereference"
                        )
                    # It keeps half a kilobyte per file, of which an archive may have millions.
                    archive.members.clear()  # type: ignore[attr-defined]
                end = archive.offset
            # An archive that was cut between two files looks whole, except for the block of zeros at its end.
            if packed:
                while content.read(BUFFER_BYTES):  # up to the checksum
                    pass
            else:
                file.seek(end)
                if file.read(BLOCK) != bytes(BLOCK):
                    raise DataError(f"{path} is cut: it ends at byte {end} without the end of an archive")
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, ValueError, OverflowError) as error:
        raise DataError(f"{path} is a damaged archive: {words_of(error) or type(error).__name__}") from None


def _is_of_sample(name: str) -> bool:
    """True if a file has the suffix of an image, of a label or of a sample's JSON."""
    suffix = name.partition(".")[2].lower()
    return is_image_name(f".{suffix}") or suffix in (*LABEL_SUFFIXES, "json")


def _member(archive: tarfile.TarFile, info: tarfile.TarInfo, path: str) -> ArchivedFile:
    """Read a file of an archive. Raises DataError if it is truncated, or larger than an image may be."""
    folder, _, name = info.name.removeprefix("./").rpartition("/")
    stem, _, suffix = name.partition(".")
    if info.size > MAX_IMAGE_BYTES:
        raise DataError(f"{path}, file {info.name[:200]}: {info.size:,} bytes are more than {MAX_IMAGE_BYTES:,}")
    content = archive.extractfile(info)
    data = content.read() if content else b""
    if len(data) != info.size:
        raise DataError(f"{path}, file {info.name[:200]}: {len(data)} of {info.size} bytes; the archive is cut")
    return ArchivedFile(info.offset, folder, stem, suffix.lower(), data)


def _label(files: dict[str, ArchivedFile], folder: str, name: str, place: str) -> int | str | None:
    """Return the label of a sample: of a file, of a key of its JSON, or of its folder. Raises DataError.

    Args:
        files: the files of the sample, by their suffix.
        folder: their folder.
        name: the value of --label-column, a suffix or a key; "" for the usual ones.
        place: the sample, for error lines.
    """
    # A file of its own wins over a key, and both over the folder.
    for suffix in (name,) if name else LABEL_SUFFIXES:
        if suffix in files and suffix != "json":
            return as_label(_text(files[suffix], place).strip(), place)
    if "json" in files:
        try:
            values = json.loads(_text(files["json"], place))
        except (ValueError, RecursionError):
            raise DataError(f"{place}: its .json is no JSON") from None
        for key in (name,) if name else JSON_KEYS:
            if isinstance(values, dict) and key in values:
                return as_label(values[key], place)
    if name:
        raise DataError(f"{place} has no file .{name}, nor a key {name} in a .json")
    name = folder.rpartition("/")[2]
    if readable(name) != name:
        raise DataError(f"{readable(place)}: its folder is no UTF-8: write the archive with names in UTF-8")
    return name or None


def as_label(value: Any, place: str) -> int | str:
    """Return a label as a number if it is one, else as the name of a class. Raises DataError for other values."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str) or not value:
        raise DataError(f"{place}: the label is {str(value)[:80]!r}, neither a whole number nor a name")
    if readable(value) != value:
        raise DataError(f"{place}: the label {readable(value)[:80]} is no UTF-8: write the archive with names in UTF-8")
    return int(value) if value.removeprefix("-").isdecimal() and len(value) < 12 else value


def _text(member: ArchivedFile, place: str) -> str:
    """Return the content of a small file. Raises DataError if it is no UTF-8 text."""
    try:
        return member.data[:MOST_TEXT].decode()
    except UnicodeDecodeError:
        raise DataError(f"{place}: its .{member.suffix} is no text") from None
