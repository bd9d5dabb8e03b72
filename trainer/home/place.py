"""The path of a file or folder of a run: a ``pathlib.Path`` on a local disk, a ``StorePlace`` elsewhere.

Both have the few methods of a path that a run needs. The functions below do the rest, or do it more safely."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, TypeAlias, TypeVar

from pipeline.core.atomic import sync, write_durably
from pipeline.core.errors import UsageError
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.retries import with_retries
from pipeline.core.storage.store import Store, configured_store
from pipeline.core.storage.uri import is_remote, split_uri

T = TypeVar("T")
BLOCK_BYTES = 4 << 20  # bytes of a log in memory at a time
KEPT = 256  # files whose content a process caches: states and headers of checkpoints


@dataclass(frozen=True)
class StorePlace:
    """A path on HDFS or in an object store. Picklable; str() omits the store."""

    uri: str
    store: Store

    def __str__(self) -> str:
        return self.uri

    def __truediv__(self, name: str) -> StorePlace:
        return StorePlace(f"{self.uri.rstrip('/')}/{name}", self.store)

    @property
    def name(self) -> str:
        return self.uri.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> StorePlace:
        return StorePlace(self.uri.rstrip("/").rpartition("/")[0], self.store)

    def exists(self) -> bool:
        return with_retries(self.store.exists)(self.uri)

    def is_dir(self) -> bool:
        try:
            return with_retries(self.store.info)(self.uri).is_dir
        except (FileNotFoundError, NotADirectoryError):
            return False

    def read_bytes(self) -> bytes:
        return with_retries(self.store.read)(self.uri)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the file. A missing file is not an error, even without ``missing_ok``."""
        with_retries(self.store.delete)(self.uri)


Place: TypeAlias = Path | StorePlace


def place_of(uri: str, store: Store | None = None) -> Place:
    """Return the place of a URI or path. Raises UsageError for an invalid address.

    store: the store of a remote place (default: the one that HADOOP_CONF_DIR configures)."""
    store = store or configured_store()
    location = store.resolve(uri)
    return StorePlace(location, store) if is_remote(location) else Path(location)


def resolve_home(output: str) -> str:
    """Return --output in its canonical form for all processes: an absolute path or a canonical URI.

    Raises UsageError for an address that cannot be written, or a local path that leads through a file."""
    if split_uri(output)[0] in ("http", "https"):
        raise UsageError(f"--output {output}: that is for reading; give a local folder, hdfs:// or s3://")
    try:
        home = place_of(output)
    except UsageError as error:
        raise UsageError(f"--output {output or repr(output)}: {error}") from None
    if isinstance(home, Path):
        blocked = next((part for part in (home, *home.parents) if part.exists()), home)
        if not blocked.is_dir():
            raise UsageError(f"--output {output}: {blocked} is not a folder; choose another")
    return str(home)


def is_file(place: Place) -> bool:
    """Return whether a file exists where a folder is needed. Raises OSError.

    Not retried, so that an unreachable store fails fast."""
    if isinstance(place, Path):
        return place.exists() and not place.is_dir()
    try:
        return not place.store.info(place.uri).is_dir
    except (FileNotFoundError, NotADirectoryError):
        return False


def write_whole(place: Place, data: bytes | Path) -> None:
    """Replace a file atomically: after a crash either the old or the new content is there. Raises OSError.

    data: the content, or a local file, of which a copy to a store has a few blocks in memory."""
    if isinstance(place, Path):
        write_durably(place, data if isinstance(data, bytes) else data.read_bytes())
    else:
        place.store.replace(place.uri, data)


def copy_into(place: Place, file: BinaryIO) -> None:
    """Write the content of a file into a local one, which is open for writing and empty, in blocks.

    All bytes are of one version: a read of a file that is replaced begins anew. Raises FileNotFoundError and
    OSError."""

    def write() -> None:
        """Copy once."""
        file.seek(0)
        file.truncate()
        with open(place, "rb") if isinstance(place, Path) else place.store.open(place.uri) as source:
            shutil.copyfileobj(source, file, BLOCK_BYTES)

    with_retries(write)()


def make(folder: Place) -> None:
    """Create a folder durably if it does not exist. Raises OSError."""
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)
    else:
        with_retries(folder.store.makedirs)(folder.uri)


def entries(folder: Place) -> list[FileInfo]:
    """Return the entries of a folder, sorted by name; none if it does not exist. Raises OSError.

    Costs one operation of a store."""
    if isinstance(folder, Path):
        try:
            infos = [_local_info(entry) for entry in os.scandir(folder)]
        except FileNotFoundError:
            return []
        return sorted(filter(None, infos), key=lambda entry: entry.name)
    return with_retries(folder.store.list)(folder.uri)


def _local_info(entry: os.DirEntry[str]) -> FileInfo | None:
    """Return an entry of a local folder; None if it was deleted meanwhile, or is a broken link."""
    try:
        status = entry.stat()
    except FileNotFoundError:
        return None
    return FileInfo(entry.path, status.st_size, status.st_mtime_ns // 1_000_000, entry.is_dir())


def read_range(place: Place, offset: int, length: int) -> bytes:
    """Return up to ``length`` bytes from an offset. Raises OSError."""
    if isinstance(place, Path):
        with open(place, "rb") as file:
            file.seek(offset)
            return file.read(length)
    return with_retries(place.store.read_range)(place.uri, offset, length)


def blocks(place: Place, size: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Yield a file's content in pieces of at most ``size`` bytes. Raises FileNotFoundError and OSError."""
    if isinstance(place, Path):
        with open(place, "rb") as file:
            while data := file.read(size):
                yield data
        return
    length = with_retries(place.store.info)(place.uri).bytes
    for offset in range(0, length, size):
        yield read_range(place, offset, min(size, length - offset))


def append_lines(path: Path, lines: bytes) -> bytes:
    """Append whole lines to a local file in one write, behind a newline if its last line is cut off.

    Returns the lines that are not in the file because this has filled the disk; b"" if all are. Raises OSError if there
    was no room for any."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    with open(os.open(path, flags, 0o666), "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        newline = b"\n" if size and os.pread(file.fileno(), 1, size - 1) != b"\n" else b""
        written = file.write(newline + lines)
        if written == len(newline + lines):
            return b""
        # The write that fills a disk is a short one. The line that it has cut off goes again, unless another process
        # has appended to the file since; the next line is behind a newline then.
        whole = lines.rfind(b"\n", 0, max(0, written - len(newline))) + 1
        if file.seek(0, os.SEEK_END) == size + written:
            file.truncate(size + len(newline) + whole if whole else size)
        return lines[whole:]


def line_blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Regroup pieces of a file into blocks of whole lines; an unterminated last line is a block of its own."""
    rest = b""
    for piece in pieces:
        whole, newline, tail = (rest + piece).rpartition(b"\n")
        if newline:
            yield whole + newline
        rest = tail
    if rest:
        yield rest


def remembered(read: Callable[[Place, int], T]) -> Callable[[Place, FileInfo], T]:
    """Return a cached form of ``read(place, bytes)``, which takes a file's entry in the listing of its folder.

    A file in a store is read again only if its entry has changed; a local file is read every time. Caches KEPT
    files."""

    @lru_cache(maxsize=KEPT)
    def once(place: StorePlace, file: FileInfo) -> T:
        return read(place, file.bytes)

    return lambda place, file: read(place, file.bytes) if isinstance(place, Path) else once(place, file)


def delete_tree(folder: Place) -> None:
    """Delete a folder with its content. Raises OSError."""
    if isinstance(folder, Path):
        shutil.rmtree(folder)
    else:
        with_retries(folder.store.delete)(folder.uri)


def remove_empty(folder: Place) -> None:
    """Remove a folder if it is empty."""
    Store().remove_empty(str(folder)) if isinstance(folder, Path) else folder.store.remove_empty(folder.uri)


def listing(folder: Place) -> list[str]:
    """Return the relative paths of all files below a folder, sorted; a link to a folder counts as a file."""
    if isinstance(folder, StorePlace):
        below = with_retries(folder.store.walk)(folder.uri)
        return sorted(path.removeprefix(folder.uri.rstrip("/") + "/") for path in below)
    paths = []
    for where, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        paths += [os.path.relpath(os.path.join(where, name), folder) for name in (*files, *links)]
    return sorted(paths)
