"""The parts of a URI."""

from __future__ import annotations

import re


def split_uri(uri: str) -> tuple[str, str, str]:
    """(scheme, authority, path); the path as it stands, whatever #, ? or ; it holds."""
    match = re.fullmatch(r"(?:([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)|(file|hdfs):(?!//))?(.*)", uri, re.DOTALL)
    assert match, "the pattern matches every text"
    return match[1] or match[3] or "", match[2] or "", match[4]
