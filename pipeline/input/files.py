"""The files of an input: one file, a folder, its partition folders (``label=3/``), or the matches of a pattern."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase

from pipeline.core.errors import DataError, UsageError
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.core.storage.uri import is_remote, readable

# Files that hold no records: of the official CIFAR archives, and of saved data sets.
COMPANIONS = {
    "batches.meta", "batches.meta.txt", "meta", "readme.html",
    "fine_label_names.txt", "coarse_label_names.txt",
    "dataset_info.json", "dataset_dict.json", "state.json",  # of Hugging Face's save_to_disk
}  # fmt: skip
# Names of splits that data hubs use, at the start of a file name: test_batch.bin, valid-0.parquet; not values.parquet.
TEST = re.compile(r"(test|testing|eval|evaluation|t10k)(?![A-Za-z])")
VALIDATION = re.compile(r"(val|valid|validation|dev)(?![A-Za-z])")
TRAINING = re.compile(r"train|training")
SPLIT = re.compile(rf"{TRAINING.pattern}|{TEST.pattern}|{VALIDATION.pattern}")
IMAGE_SUFFIXES = {
    "avif", "bmp", "gif", "jfif", "jp2", "jpe", "jpeg", "jpg", "pbm", "pgm", "png", "pnm", "ppm", "tif", "tiff", "webp",
}  # fmt: skip
# Logs that list a table's valid files. Without its log, the files of a table include removed and failed rows.
TABLE_LOGS = {
    "_delta_log": "a Delta table",
    ".hoodie": "a Hudi table",
    "_spark_metadata": "the output of a Spark stream",
}
PARTITION = re.compile(r"[^=._][^=]*=.*")  # the name of a folder that Hive or Spark's partitionBy() writes
CLASS_KEYS = ("label", "labels", "fine_label", "class", "cls")  # keys of partition folders that name a class
LISTED_AT_ONCE = 16


def input_files(store: Store, uri: str, evaluation: bool, *, folders: bool = False) -> list[FileInfo]:
    """Return the data files of an input, sorted by path, without companion files.

    If the input has training and test files, only one side is returned. Costs a listing for every folder, and for every
    level of a pattern. Raises DataError if there is nothing to read, or an entry that is no data file.

    Args:
        store: the file system.
        uri: the resolved path.
        evaluation: return the evaluation files instead of the training files.
        folders: return folders alone, without the files beside them.
    """
    entries = match_paths(store, uri)
    # The matches of a pattern do not include the log of their table, so look for it in their folders.
    for folder in {file.path.rpartition("/")[0] for file in entries if not file.is_dir and file.path != uri}:
        for log in TABLE_LOGS:
            if store.exists(f"{folder}/{log}"):
                _refuse_table(folder, log)
    if len(entries) == 1 and not entries[0].is_dir:
        return with_names_in_utf8(entries)
    below = [file for entry in entries for file in (entries_below(store, entry.path) if entry.is_dir else [entry])]
    below = [entry for entry in below if _is_data(entry)]
    if folders:  # before the folders of splits are entered, which have no files beside them
        below = [entry for entry in below if entry.is_dir or is_image_name(entry.name)]
    below = fold_images(_enter_splits(store, below, evaluation))
    if folders:
        below = [entry for entry in below if entry.is_dir or entry.name in TABLE_LOGS]
    return with_names_in_utf8(_choose(sorted(below, key=lambda file: file.path), uri, evaluation))


def with_names_in_utf8(files: list[FileInfo]) -> list[FileInfo]:
    """Return the files. Raises DataError for a name that is not UTF-8, which no manifest can hold."""
    for file in files:
        if (name := readable(file.path)) != file.path:
            raise DataError(f"{name} has a name that is not UTF-8: rename it")
    return files


def fold_images(entries: list[FileInfo]) -> list[FileInfo]:
    """Return entries with the folder of image files in place of the files, so that a folder is listed once, by tasks."""
    folders = {entry.path: entry.path.rpartition("/")[0] for entry in entries}
    parents = {folders[entry.path] for entry in entries if not entry.is_dir and is_image_name(entry.name)}
    # A folder inside the folder of a class belongs to that class.
    remaining = [
        entry
        for entry in entries
        if (folders[entry.path] not in parents if entry.is_dir else not is_image_name(entry.name))
    ]
    return remaining + [FileInfo(folder, 0, 0, is_dir=True) for folder in parents]


def is_image_name(name: str) -> bool:
    """True if a file has the suffix of an image file."""
    return name.rpartition(".")[2].lower() in IMAGE_SUFFIXES


def _is_data(entry: FileInfo) -> bool:
    """True unless an entry is hidden or known to hold no records. Logs of tables and unfinished copies are reported."""
    return entry.name in TABLE_LOGS or not (entry.name.startswith((".", "_")) or entry.name in COMPANIONS)


def _enter_splits(store: Store, entries: list[FileInfo], evaluation: bool) -> list[FileInfo]:
    """Return the entries of the folders of one split, if all entries are folders with the names of splits.

    For the training side these are folders such as train, else the folders of the test or the validation split; all
    folders, if there is only one side."""
    if not entries or not all(entry.is_dir and SPLIT.fullmatch(entry.name) for entry in entries):
        return entries
    held_out = [entry for entry in entries if not TRAINING.fullmatch(entry.name)]
    training = [entry for entry in entries if TRAINING.fullmatch(entry.name)]
    tests = [entry for entry in held_out if TEST.fullmatch(entry.name)]
    side = ((tests or held_out) if evaluation else training) if training and held_out else entries
    return [entry for folder in side for entry in entries_below(store, folder.path) if _is_data(entry)]


def match_paths(store: Store, uri: str, flag: str = "--input") -> list[FileInfo]:
    """Return the file or folder of a path, or the matches of a pattern.

    Args:
        store: the file system.
        uri: the path or pattern.
        flag: the flag that holds it, for error lines.

    Raises:
        DataError: there is none, or it may not be read.
    """
    try:
        # The name of an existing folder may contain brackets, so it is tried as a path before it is matched.
        if not is_pattern(uri) or store.exists(uri):
            return [store.info(uri)]
        if matched := sorted(_match_pattern(store, uri), key=lambda entry: entry.path):
            return matched
        raise DataError(f"{uri} matches no file or folder; check {flag}")
    except FileNotFoundError:
        raise DataError(f"{uri} does not exist; check {flag}") from None
    except PermissionError as error:
        raise DataError(f"{uri} cannot be read: permission denied ({error})") from None
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
            raise DataError(f"{uri} does not exist: {error.strerror}; check {flag}") from None
        raise


def plain_files(store: Store, entries: list[FileInfo]) -> list[FileInfo]:
    """Return the visible, non-empty files among some entries and directly in their folders, sorted by path."""
    below = [file for entry in entries for file in (store.list(entry.path) if entry.is_dir else [entry])]
    files = [file for file in below if not file.is_dir and file.name[0] not in "._" and file.bytes]
    return sorted(files, key=lambda file: file.path)


def is_pattern(uri: str) -> bool:
    return any(sign in uri for sign in "*?[")


def fixed_part(uri: str) -> str:
    """Return the folder above the first part of a path that is a pattern; a path without patterns unchanged."""
    parts = uri.split("/")
    first = next((at for at, part in enumerate(parts) if is_pattern(part)), len(parts))
    return "/".join(parts[:first]) or "/"


def _match_pattern(store: Store, uri: str) -> Iterator[FileInfo]:
    """Yield the matches of a pattern, part by part as in a shell: * and ? do not match a slash.

    Names that begin with a dot or, as in Spark, an underscore match only patterns that begin with the same
    character."""
    folders = [fixed_part(uri)]
    parts = uri.removeprefix(fixed_part(uri)).strip("/").split("/")
    for depth, part in enumerate(parts, 1):
        listed = [entry for folder in folders for entry in _list_folder(store, folder)]
        # The current folder, which is above a relative pattern, may have a name like proj[1].
        entries = [entry for entry in listed if entry.name == part] or [
            entry
            for entry in listed
            if fnmatchcase(entry.name, part) and (entry.name[0] not in "._" or entry.name[0] == part[0])
        ]
        if depth == len(parts):
            yield from entries
        folders = [entry.path for entry in entries if entry.is_dir]


def entries_below(store: Store, folder: str) -> list[FileInfo]:
    """Return the files and folders in a folder and, at any depth, in its partition folders (``label=3``).

    The partition folders themselves are not returned. Costs one listing per folder. Raises DataError for a folder that
    may not be listed."""
    result = []
    level = [folder]
    with ThreadPoolExecutor(LISTED_AT_ONCE) as pool:
        while level:
            entries = [
                entry
                for folder_entries in pool.map(lambda path: _list_folder(store, path), level)
                for entry in folder_entries
            ]
            level = [entry.path for entry in entries if entry.is_dir and PARTITION.fullmatch(entry.name)]
            result += [entry for entry in entries if not (entry.is_dir and PARTITION.fullmatch(entry.name))]
    return result


def is_test(path: str) -> bool:
    """True if a file is of the test split, by its own name or the value of a partition folder, such as split=test."""
    return _begins(path, TEST)


def is_evaluation(path: str) -> bool:
    """True if a file is of the test or the validation split."""
    return is_test(path) or _begins(path, VALIDATION)


def _begins(path: str, word: re.Pattern[str]) -> bool:
    """True if the file name, or the value of a partition folder above it, begins with the word."""
    *folders, name = path.split("/")
    values = [folder.partition("=")[2] for folder in folders]
    return any(word.match(each) for each in (name, *values))


def _twins(entries: list[FileInfo], word: re.Pattern[str]) -> set[str]:
    """Return the paths of files that are named like a training file but for the word: x_test.npy beside x_train.npy."""
    paths = {entry.path for entry in entries}
    twins = set()
    for entry in entries:
        folder = entry.path[: -len(entry.name)]
        for match in re.finditer(rf"(?<![A-Za-z])(?:{word.pattern})", entry.name):
            before, after = entry.name[: match.start()], entry.name[match.end() :]
            if any(f"{folder}{before}{name}{after}" in paths for name in TRAINING.pattern.split("|")):
                twins.add(entry.path)
    return twins


def check_no_table(entries: Iterable[FileInfo]) -> None:
    """Raise DataError if the log of a table, such as Delta's, is among the entries of a folder."""
    for entry in entries:
        if entry.is_dir and entry.name in TABLE_LOGS:
            _refuse_table(entry.path.rpartition("/")[0], entry.name)


def _refuse_table(folder: str, log: str) -> None:
    advice = "read it with Spark's own reader, write the rows as Parquet, and name that folder"
    if log == "_delta_log":
        advice = f"the jobs read it by --input delta:{folder} --id-column NAME"
    raise DataError(
        f"{folder} is {TABLE_LOGS[log]}: its {log} says which files count, and reading all of them would take removed rows"
        f" too; {advice}"
    )


def may_match(uri: str, path: str) -> bool:
    """True if a pattern matches a path or a folder above the path, whether or not they exist."""
    parts = uri.rstrip("/").split("/")
    ours = path.split("/")
    return len(ours) >= len(parts) and all(map(fnmatchcase, ours, parts))


def _list_folder(store: Store, uri: str) -> list[FileInfo]:
    """Return the entries of a folder; none for a path that is no folder. Raises DataError if it may not be listed."""
    try:
        return store.list(uri)
    except PermissionError:
        raise DataError(f"{uri} cannot be listed: permission denied") from None
    except NotADirectoryError:  # a file above a pattern, or a folder that was just replaced
        return []


def _choose(entries: list[FileInfo], uri: str, evaluation: bool) -> list[FileInfo]:
    """Return the data files among sorted entries: the training files, or the evaluation files if ``evaluation``.

    If the names do not distinguish training from evaluation files, all files are returned. Raises DataError for the log
    of a table, an unfinished copy, another folder, or no data file."""
    check_no_table(entries)
    only_folders = all(entry.is_dir for entry in entries)
    for entry in entries:
        if entry.name.endswith("._COPYING_"):
            raise DataError(
                f"{entry.path} is being copied there; wait until the copy is complete, or remove it if the copy was"
                " abandoned"
            )
        if entry.is_dir and not only_folders:
            raise DataError(
                f"{entry.path} is a folder inside the input; name the folder that holds the data files, or give --format"
                " image-folder if it holds the images of a class"
            )
    above = len(fixed_part(uri))
    plain = [file for file in entries if not file.is_dir]
    test_twins = _twins(plain, TEST)
    twins = test_twins | _twins(plain, VALIDATION)
    tests = [file for file in entries if is_evaluation(_split_path(file, above)) or file.path in twins]
    files = entries
    if tests and len(tests) < len(entries):
        held_out = {file.path for file in tests}
        # An input with test and validation files is evaluated on the test split only.
        of_test = [file for file in tests if is_test(_split_path(file, above)) or file.path in test_twins]
        files = (of_test or tests) if evaluation else [file for file in entries if file.path not in held_out]
    if not files:
        raise DataError(f"{uri} holds no data files; `sharding formats` lists what is read")
    return files


def _split_path(entry: FileInfo, above: int) -> str:
    """Return the part of a path that may name a split: of a file, the path below the input.

    Of a folder of images, only partition folders such as split=test/ count, because a class may have the name of a
    split. above: the length of the path of the input."""
    path = entry.path[above:]
    if not entry.is_dir:
        return path
    return "".join(f"{part}/" for part in path.split("/") if "=" in part and part.partition("=")[0] not in CLASS_KEYS)


def class_of_folder(path: str) -> str:
    """Return the name of the class of a folder of images: of its partition folder label=..., or its own."""
    parts = [part.partition("=") for part in path.split("/")]
    return next((value for key, _, value in reversed(parts) if value and key in CLASS_KEYS), path.rpartition("/")[2])


def check_apart(store: Store, output: str, source: str, flag: str = "--output") -> None:
    """Raise UsageError if the output and an input contain each other, or if the input's pattern would match the output.

    A set inside its own input would be read as input by the next run.

    Args:
        store: the file system.
        output: the resolved output.
        source: the resolved input, which may be a pattern.
        flag: of the output.
    """
    if is_pattern(source) and not store.exists(source) and may_match(source, output):
        raise UsageError(f"{flag} {output} matches the input {source}; choose another folder")
    for path in [entry.path for entry in match_paths(store, source)] if is_pattern(source) else [source]:
        output_path, source_path = (_real(each).rstrip("/") + "/" for each in (output, path))
        if output_path.startswith(source_path) or source_path.startswith(output_path):
            raise UsageError(f"{flag} {output} and the input {path} overlap; choose a folder of its own")


def _real(path: str) -> str:
    """Return a local path without symbolic links, so that a set never replaces its own input."""
    return path if is_remote(path) else os.path.realpath(path)
