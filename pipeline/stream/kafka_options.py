"""Properties of Kafka's consumer from the command line or a file, such as settings of SASL and SSL. Pure.

Values may be secret: they appear in no message and are not stored in the set."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pipeline.core.errors import UsageError

FLAG = "--kafka-option"
FILE_FLAG = "--kafka-options"
PREFIX = "kafka."  # prefix of the consumer's properties among the options of Spark's source
# Set by the stream and by Spark's source.
RESERVED = {
    "bootstrap.servers", "auto.offset.reset", "enable.auto.commit", "key.deserializer", "value.deserializer",
    "interceptor.classes",
}  # fmt: skip
_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+")
_LINE_END = re.compile(r"\r\n|\r|\n")
_PROPERTY = re.compile(r"((?:\\.|[^\\=:\s])*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_SPACE = " \t\f"


def consumer_options(texts: Sequence[str], path: str | None) -> dict[str, str]:
    """Return the properties of a file, overridden by properties from the command line.

    Args:
        texts: KEY=VALUE each, with or without Spark's prefix "kafka.".
        path: a local file in the form of Kafka's client.properties; None: no file.

    Raises:
        UsageError: the file cannot be read, a key is no property of a consumer, or the stream sets it itself.
    """
    options = {}
    if path is not None:
        try:
            text = Path(path).read_text(encoding="latin-1")  # as Java reads it
        except OSError as error:
            raise UsageError(f"{FILE_FLAG} {path}: {error.strerror}; give a local file of the driver") from None
        options = {_key_without_prefix(key, f"{FILE_FLAG} {path}"): value for key, value in properties(text).items()}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator:
            raise UsageError(f"{FLAG} needs KEY=VALUE, such as security.protocol=SASL_SSL, but a value has no '='")
        options[_key_without_prefix(key.strip(), FLAG)] = value
    return options


def properties(text: str) -> dict[str, str]:
    """Parse a text in the format of java.util.Properties."""
    options = {}
    lines = iter(_LINE_END.split(text))
    for line in lines:
        line = line.lstrip(_SPACE)
        if not line or line[0] in "#!":
            continue
        # An odd number of backslashes at the end: the next line belongs to this one.
        while (len(line) - len(line.rstrip("\\"))) % 2:
            line = line[:-1] + next(lines, "").lstrip(_SPACE)
        match = _PROPERTY.fullmatch(line)
        assert match  # every part of the pattern may be empty, and the last takes all
        options[_unescape(match[1])] = _unescape(match[2])
    return options


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else _CONTROL.get(match[2], match[2]), text)


def _key_without_prefix(key: str, flag: str) -> str:
    """Return a key without Spark's prefix. Raises UsageError."""
    name = key.removeprefix(PREFIX)
    if not _KEY.fullmatch(name):
        raise UsageError(f"{flag}: {key!r} is not a property of a Kafka consumer, such as security.protocol")
    if name.lower() in RESERVED:
        raise UsageError(f"{flag}: the stream sets {name} itself; leave it out")
    return name
