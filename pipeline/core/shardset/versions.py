"""The numbered versions of a set. A number is taken once: by a file that is put where none is, or not at all. No Spark.

OUTPUT/_manifests/000042.json   a committed manifest; an empty file: a number that nobody may commit as any more
OUTPUT/manifest.json            a copy of the newest, for readers of one file; behind it for a moment at most

link() on a local disk, a rename without overwriting on HDFS and a conditional PUT on S3 put a file if absent, so of any
number of processes that commit as one number one succeeds, however long another was frozen. Numbers only grow: files below
the newest manifest are deleted, what lies above it stays."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.core.json_values import fits, parse
from pipeline.core.storage.retries import with_retries
from pipeline.core.storage.store import Store

NAME = "manifest.json"
FOLDER = "_manifests"
_FILE = re.compile(r"(\d+)\.json")
# What a version puts into the names of its files: its number and the attempt that wrote it.
STAMP = r"(?:v(?P<version>\d+)-)?(?P<attempt>\w+)"
_STAMPED_PART = re.compile(rf"(?P<part>/part-\d+)-{STAMP}(?=\.parquet$)")


def stamped(path: str, stamp: str) -> str:
    """The place of a file under OUTPUT once it is of a version: ``worker=000/part-00001.parquet``,
    ``_model/pca/arrays.npz``."""
    if path.startswith("_model/"):
        return f"_model/{stamp}/{path.removeprefix('_model/')}"
    stem, dot, suffix = path.rpartition(".")
    return f"{stem}-{stamp}{dot}{suffix}"


def unstamped(path: str) -> str:
    """The place of a Parquet file whichever version it is of: equal rows have equal ones, whoever wrote them and when."""
    return _STAMPED_PART.sub(r"\g<part>", path)


@dataclass(frozen=True)
class Taken:
    """last: the highest number that is taken; newest: the highest that holds a manifest; 0 for none. older: paths of the
    files below the newest."""

    last: int
    newest: int
    older: tuple[str, ...] = ()


def taken(store: Store, uri: str) -> Taken:
    """One listing. The number of manifest.json is not looked at: see ``last_taken``."""
    files = {}
    for entry in store.list(f"{uri}/{FOLDER}"):
        # A name that is not written as path_of() writes it would be counted and then not be found.
        if (match := _FILE.fullmatch(entry.name)) and entry.name == path_of("", int(match[1])).rpartition("/")[2]:
            files[int(match[1])] = entry
    newest = max((number for number, entry in files.items() if entry.bytes), default=0)
    return Taken(max(files, default=0), newest, tuple(entry.path for number, entry in files.items() if number < newest))


def last_taken(store: Store, uri: str) -> int:
    """The highest number that is taken, be it by a manifest.json that was copied here without its versions."""
    return max(taken(store, uri).last, copied(store, uri))


def path_of(uri: str, number: int) -> str:
    return f"{uri}/{FOLDER}/{number:06d}.json"


def put(store: Store, staged: str, uri: str, number: int) -> bool:
    """Have the content of a staged file be version ``number``; whether it is. False: the number was taken before.

    Where a lost answer leaves it open, what stands there tells. Raises OSError where nothing does."""
    data, target = with_retries(store.read)(staged), path_of(uri, number)
    with_retries(store.makedirs)(f"{uri}/{FOLDER}")
    if not with_retries(_take)(store, staged, target, data):
        return False
    with_retries(store.sync_folder)(f"{uri}/{FOLDER}")
    # A number may be free again because a far newer version stands: nothing counts below that.
    if with_retries(taken)(store, uri).newest > number:
        with_retries(store.delete)(target)
        return False
    return True


def _take(store: Store, staged: str, target: str, data: bytes) -> bool:
    """Rename a staged manifest to a version's path, and tell whether its content stands there; may be tried again."""
    try:
        store.rename(staged, target)
    except OSError as error:
        try:
            there = with_retries(store.read)(target)
        except FileNotFoundError:
            there = None  # taken, and deleted since as a newer one stands; or nothing was done
        if there != data:
            if isinstance(error, FileExistsError):
                return False
            raise
    return True


def withhold(store: Store, uri: str, number: int, scratch: str) -> bool:
    """Take a number without a manifest, so that nobody commits as it any more. False: look again who has taken it.

    scratch: a folder of one's own. Nothing is ever deleted at a number that others may take."""
    staged = f"{scratch}/withheld-{number}"
    store.makedirs(scratch)
    store.delete(staged)
    store.write_new(staged, b"")
    store.makedirs(f"{uri}/{FOLDER}")
    try:
        store.rename(staged, path_of(uri, number))
    except OSError:
        if not store.exists(path_of(uri, number)):
            raise
        return False
    store.sync_folder(f"{uri}/{FOLDER}")
    return True


def copied(store: Store, uri: str) -> int:
    """The number of the version that manifest.json is a copy of; 0 where it is none, or of none."""
    try:
        return version_of(parse(store.read(f"{uri}/{NAME}")))
    except (FileNotFoundError, ValueError):
        return 0


def is_behind(store: Store, uri: str) -> bool:
    """Whether a run was killed between its commit and the copy."""
    return taken(store, uri).newest > copied(store, uri)


def version_of(manifest: object) -> int:
    number = manifest.get("version", 0) if isinstance(manifest, dict) else 0
    return number if fits(number, int) and isinstance(number, int) else 0


def copy_newest(store: Store, uri: str, scratch: str) -> None:
    """Bring manifest.json up to the newest version, whoever writes an older one at the same moment, and delete the older
    versions. scratch: a folder of one's own."""
    while (now := taken(store, uri)).newest > copied(store, uri):
        staged = f"{scratch}/{NAME}-{now.newest}"
        store.delete(staged)
        try:
            data = store.read(path_of(uri, now.newest))
        except FileNotFoundError:
            continue  # replaced since
        store.makedirs(scratch)  # which may be gone, where its owner was taken for dead
        store.write_new(staged, data)
        store.rename(staged, f"{uri}/{NAME}", overwrite=True)
        store.sync_folder(uri)
    for path in now.older:
        store.delete(path)
