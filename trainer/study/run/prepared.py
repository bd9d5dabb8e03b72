"""The record of the shard sets that ``--prepare`` made. A study trains on them without Spark and without its data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.core.atomic import write_durably
from pipeline.core.errors import DataError
from pipeline.core.json_values import fits, parse_object

PREPARED = "prepared.json"
KEY = "sets"
Fingerprints = dict[str, str]  # of the training images (train), the evaluation images (eval) and the shards of a set


def flatten(identity: dict[str, Any]) -> Fingerprints:
    """Return the identity of a set, as a line of the ledger has it, in the form of the record."""
    return {**identity["data"], "shards": identity["shards"]}


def write_prepared(root: Path, prepared: dict[str, Fingerprints]) -> None:
    """Write the fingerprints of prepared sets by name, in addition to those that the record has."""
    content = {KEY: read_prepared(root) | prepared}
    write_durably(root / PREPARED, (json.dumps(content, indent=1) + "\n").encode())


def read_prepared(root: Path) -> dict[str, Fingerprints]:
    """Return the fingerprints of a study's prepared sets; empty if none were prepared. Raises DataError if damaged."""
    path = root / PREPARED
    if not path.exists():
        return {}
    try:
        prepared: dict[str, Fingerprints] = parse_object(path.read_bytes())[KEY]
    except (ValueError, KeyError):
        prepared = {"": {}}
    if not fits(prepared, dict[str, dict[str, str]]) or {} in prepared.values():
        raise DataError(f"{path} is damaged; restore it, or delete it and run the command again with --prepare")
    return prepared
