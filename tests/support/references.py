"""Lookup of the files and keys that the product writes in its references, pipeline/FILES.md and trainer/FILES.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SETS = "pipeline/FILES.md"
RUNS = "trainer/FILES.md"
# The section of a file, by its name or by the name of its folder.
SECTIONS = {
    "manifest.json": (SETS, "manifest.json"),
    "_manifests": (SETS, "manifest.json"),
    "quality.json": (SETS, "quality.json"),
    "compare.json": (SETS, "compare.json"),
    "_quarantine": (SETS, "_quarantine/batch-NNNNNNNN.jsonl"),
    "_taken": (SETS, "_taken/batch-NNNNNNNN.jsonl"),
    "config.json": (RUNS, "config.json"),
    "result.json": (RUNS, "result.json"),
    "best.json": (RUNS, "Models"),
    "export.json": (RUNS, "Models"),
    "state.json": (RUNS, "checkpoints"),
    "evaluated": (RUNS, "checkpoints"),
    "followed": (RUNS, "followed"),
    "comparison.json": (RUNS, "comparison.json"),
    "ledger.jsonl": (RUNS, "Studies: ledger.jsonl"),
    "plan.json": (RUNS, "plan.json"),
}


def table(document: str, heading: str) -> Iterator[list[list[str]]]:
    """Yield the rows of the tables under a heading: for each cell the names that it has in backticks."""
    text = (ROOT / document).read_text()
    sections = re.split(r"^#{1,3} (.*)\n", text, flags=re.MULTILINE)
    headings = dict(zip(sections[1::2], sections[2::2], strict=True))
    for line in headings[heading].splitlines():
        if line.startswith("|"):
            yield [re.findall(r"`([^`]+)`", cell) for cell in line.strip()[1:-1].split("|")]


def names(document: str, heading: str) -> set[str]:
    """Return the names in the first column of the tables under a heading."""
    return {name for row in table(document, heading) for name in row[0]}


def events() -> dict[str, set[str]]:
    """Return the documented keys of each kind of event in metrics.jsonl."""
    found: dict[str, set[str]] = {}
    kind = ""
    for row in table(RUNS, "metrics.jsonl"):
        kind = row[0][0] if row[0] else kind
        if kind:
            found.setdefault(kind, {"event", "time"}).update(row[1])
    return found


def unknown_keys(value: Any, known: set[str]) -> set[str]:
    """Return the places of a JSON value that a reference lacks, such as ``workers[].rows``.

    Objects without documented keys of their own, such as ``seconds``, are open: only their own name is looked up."""
    parents = {name[:end] for name in known for end, letter in enumerate(name) if letter in ".["}

    def look_up(value: Any, place: str) -> set[str]:
        if isinstance(value, list):
            return set().union(*(look_up(item, f"{place}[]") for item in value))
        if not isinstance(value, dict) or (place and place not in parents):
            return set()
        found: set[str] = set()
        for key, item in value.items():
            at = f"{place}.{key}" if place else key
            found |= look_up(item, at) if at in known or at in parents else {at}
        return found

    return look_up(value, "")


def undocumented(path: Path) -> set[str]:
    """Return the keys of a written file that its reference lacks."""
    if path.name == "metrics.jsonl":
        known = events()
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return {f"{line['event']}.{key}" for line in lines for key in line if key not in known.get(line["event"], ())}
    if path.name == "pushes.csv":
        return set(path.read_text().partition("\n")[0].split(",")) - names(RUNS, "pushes.csv")
    section = SECTIONS.get(path.name) or SECTIONS.get(path.parent.name)
    if path.name == "config.json" and (path.parent / "README.md").exists():  # an exported model, not a run
        section = (RUNS, "Models")
    if not section or not path.stat().st_size:
        return set()
    texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    found = set()
    for value in map(json.loads, texts):
        for entry in value if isinstance(value, list) else [value]:  # compare.json is a list of entries
            found |= unknown_keys(entry, names(*section))
    return found


def undocumented_below(folder: Path) -> dict[str, set[str]]:
    """Return the keys that the references lack, by file, of all sets, runs and studies below a folder."""
    found = {str(path.relative_to(folder)): undocumented(path) for path in folder.rglob("*") if path.is_file()}
    return {path: keys for path, keys in found.items() if keys}


def unlisted(folder: Path, document: str) -> set[str]:
    """Return the files and folders at the top of a set or a run that the first table of its reference lacks."""
    title = (ROOT / document).read_text().partition("\n")[0].removeprefix("# ")
    listed = {name.partition("/")[0] for name in names(document, title)}
    found = {re.sub(r"=\d+$", "=000", path.name) for path in folder.iterdir()}
    return found - listed
