"""The numbered versions of a set. Each number is taken at most once, by a claim of its file. No Spark.

OUTPUT/_manifests/000042.json   a committed manifest; an empty file marks a number that can no longer be committed
OUTPUT/manifest.json            a copy of the newest version, for readers of a single file; updated right after the commit

A claim (storage/claim.py) is link() on a local disk, a rename without overwriting on HDFS, and a conditional PUT on S3.
Of all processes that commit under one number exactly one succeeds, however long another was suspended. Numbers only grow:
files with numbers below the newest manifest are deleted, files above it are kept."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.core.json_values import fits, parse
from pipeline.core.storage.claim import claim
from pipeline.core.storage.retries import with_retries
from pipeline.core.storage.store import Store

NAME = "manifest.json"
FOLDER = "_manifests"
_FILE = re.compile(r"(\d+)\.json")
# The part of a file name that tells its version: the number, and the attempt that wrote the file.
STAMP = r"(?:v(?P<version>\d+)-)?(?P<attempt>\w+)"
_STAMPED_PART = re.compile(rf"(?P<part>/part-\d+)-{STAMP}(?=\.parquet$)")


def stamped_path(path: str, stamp: str) -> str:
    """Return the path under OUTPUT of a version's file.

    path: without the stamp, such as ``worker=000/part-00001.parquet`` or ``_model/pca/arrays.npz``."""
    if path.startswith("_model/"):
        return f"_model/{stamp}/{path.removeprefix('_model/')}"
    stem, dot, suffix = path.rpartition(".")
    return f"{stem}-{stamp}{dot}{suffix}"


def unstamped(path: str) -> str:
    """Return the path of a Parquet file without its stamp, which is the same in every version."""
    return _STAMPED_PART.sub(r"\g<part>", path)


@dataclass(frozen=True)
class VersionNumbers:
    """The version numbers in use.

    Attributes:
        last: the highest number that is taken, 0 if none is.
        newest: the highest number with a manifest, 0 if there is none.
        older: paths of the files with numbers below ``newest``.
    """

    last: int
    newest: int
    older: tuple[str, ...] = ()


def versions_in_use(store: Store, uri: str) -> VersionNumbers:
    """List the version numbers in use. Costs one listing, and does not read manifest.json: see ``last_version_in_use``."""
    files = {}
    for entry in store.list(f"{uri}/{FOLDER}"):
        # A name that is not written as path_of() writes it would be counted and then not be found.
        if (match := _FILE.fullmatch(entry.name)) and entry.name == path_of("", int(match[1])).rpartition("/")[2]:
            files[int(match[1])] = entry
    newest = max((number for number, entry in files.items() if entry.bytes), default=0)
    return VersionNumbers(
        max(files, default=0), newest, tuple(entry.path for number, entry in files.items() if number < newest)
    )


def last_version_in_use(store: Store, uri: str) -> int:
    """Return the highest number that is taken, also by a manifest.json that was copied here without its versions."""
    return max(versions_in_use(store, uri).last, copied_version(store, uri))


def path_of(uri: str, number: int) -> str:
    return f"{uri}/{FOLDER}/{number:06d}.json"


def commit_version(store: Store, staged: str, uri: str, number: int) -> bool:
    """Commit a staged file as version ``number``; return False if the number was already taken.

    Manifests of different runs differ, because the names of their files do. Raises OSError."""
    manifest = with_retries(store.read)(staged)
    target = path_of(uri, number)
    with_retries(store.makedirs)(f"{uri}/{FOLDER}")
    if with_retries(claim)(store, target, manifest, staged=staged) != manifest:
        return False
    with_retries(store.sync_folder)(f"{uri}/{FOLDER}")
    # Numbers of deleted versions are free again, but a manifest below the newest version is not read.
    if with_retries(versions_in_use)(store, uri).newest > number:
        with_retries(store.delete)(target)
        return False
    return True


def withhold(store: Store, uri: str, number: int, scratch: str) -> bool:
    """Take a number without a manifest, so that no run can commit it; return False if one has committed it meanwhile.

    All runs that withhold a number write the same empty file, so several may succeed. scratch: a folder that only the
    caller uses."""
    staged = f"{scratch}/withheld-{number}"
    store.makedirs(scratch)
    store.write_new(staged, b"")
    store.makedirs(f"{uri}/{FOLDER}")
    if claim(store, path_of(uri, number), b"", staged=staged) != b"":
        return False
    store.sync_folder(f"{uri}/{FOLDER}")
    return True


def copied_version(store: Store, uri: str) -> int:
    """Return the version that manifest.json is a copy of, 0 if it is missing or carries no version."""
    try:
        return version_of(parse(store.read(f"{uri}/{NAME}")))
    except (FileNotFoundError, ValueError):
        return 0


def is_behind(store: Store, uri: str) -> bool:
    """Return whether a run was killed after its commit and before it updated manifest.json."""
    return versions_in_use(store, uri).newest > copied_version(store, uri)


def version_of(manifest: object) -> int:
    number = manifest.get("version", 0) if isinstance(manifest, dict) else 0
    return number if fits(number, int) and isinstance(number, int) else 0


def copy_newest(store: Store, uri: str, scratch: str) -> None:
    """Update manifest.json to the newest version, also against concurrent writers, and delete older versions.

    scratch: a folder that only the caller uses."""
    while (now := versions_in_use(store, uri)).newest > copied_version(store, uri):
        staged = f"{scratch}/{NAME}-{now.newest}"
        try:
            data = store.read(path_of(uri, now.newest))
        except FileNotFoundError:
            continue  # a newer version has replaced it since
        store.makedirs(scratch)  # deleted if another run considered the owner dead
        store.write_new(staged, data)
        store.rename(staged, f"{uri}/{NAME}", overwrite=True)
        store.sync_folder(uri)
    for path in now.older:
        store.delete(path)
