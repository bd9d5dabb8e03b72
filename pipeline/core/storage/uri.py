"""The parts of a URI."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.core.errors import UsageError

WEB_SCHEMES = ("webhdfs", "swebhdfs")  # HDFS by HTTP and by HTTPS
HDFS_SCHEMES = ("hdfs", *WEB_SCHEMES)
PATTERN_SIGNS = set("{}[]*?\\")  # with which Spark reads a path as a pattern
DATAFRAME = "dataframe:"  # begins the name of a DataFrame, which only a program in Python can pass


def local_folder(uri: str, flag: str) -> Path:
    """Return the local folder of a flag. Raises UsageError if it is not on this machine, such as ``s3:/bucket``."""
    refuse_home(uri)
    scheme, authority, path = split_uri(uri)
    if scheme not in ("", "file") or authority not in ("", "localhost"):
        raise UsageError(f"{flag} {uri} must be a folder of this machine; copy it from there")
    return Path(path)


def refuse_home(uri: str) -> None:
    """Raise UsageError for a path that begins with ~, which shells expand at the start of a word alone."""
    if uri.startswith("~"):
        raise UsageError(
            f"{uri} names a home folder, which only a shell knows here: write $HOME, or ./~ for a folder ~"
        )


def is_hdfs(uri: str) -> bool:
    """True if a URI is on HDFS, by its own protocol or through WebHDFS."""
    return split_uri(uri)[0] in HDFS_SCHEMES


def names_dataframe(uri: str) -> bool:
    """True if an input is a DataFrame, not an address."""
    return uri.startswith(DATAFRAME)


def names_table(uri: str) -> bool:
    """True if an input is a table of Spark, or a DataFrame that a notebook passes, and not a path."""
    return uri.startswith(("table:", "delta:", "iceberg:", DATAFRAME))


def is_remote(path: str) -> bool:
    """True if a resolved path is not on a local disk."""
    return "://" in path


def split_uri(uri: str) -> tuple[str, str, str]:
    """Split a URI into (scheme, authority, path). The path is kept as it is, including #, ? and ;."""
    with_authority = r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)"
    # dbfs:/x has a scheme although it lacks //, and is not a path in a local folder "dbfs:"
    without = r"(file|hdfs|s3[an]?|gs|abfss?|az|[A-Za-z][A-Za-z0-9+.-]*(?=:/)):(?!//)"
    match = re.fullmatch(rf"(?:{with_authority}|{without})?(.*)", uri, re.DOTALL)
    assert match, "the pattern matches every text"
    return match[1] or match[3] or "", match[2] or "", match[4]


def readable(path: str) -> str:
    """Return a path that can be printed: bytes that are not UTF-8 become escapes such as ``\\udcff``."""
    return path.encode(errors="backslashreplace").decode()


def spark_path(place: str) -> str:
    """Return a resolved path as Spark must get it: it takes a plain path for one of its default file system."""
    return place if "://" in place else f"file://{place}"
