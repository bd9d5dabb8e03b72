"""What readers of a set must find while its jobs are killed: by its manifest, and by all files in the workers' folders."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.core.storage.retries import is_transient
from tests.clusters.cluster_runs import STORE, digests, strays, whole


class Failed(AssertionError):
    """A set that is not what it must be, or a run that did not end as it must."""


@dataclass
class Reader:
    """Reads the set by its manifest, again and again, until it is closed. expected: the files of the right sets."""

    output: str
    expected: Mapping[int, dict[str, str]]
    seen: int = 0
    wrong: str | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Reader:
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join(60)

    def _watch(self) -> None:
        while not self.stop.wait(1.0):
            try:
                self.look()
            except Failed as error:
                self.wrong = str(error)
                return
            except OSError as error:
                if not is_transient(error):
                    self.wrong = repr(error)
                    return

    def look(self) -> None:
        """One whole set, of the right content. A set that was replaced while it was read is read again."""
        before = None
        while True:
            try:
                found = digests(self.output)
            except (AssertionError, FileNotFoundError) as error:
                if before is not None and str(error) == before:
                    raise Failed(f"{self.output} is not whole: {error}") from error
                before = str(error)
                time.sleep(0.2)
                continue
            if found not in self.expected.values():
                raise Failed(f"{self.output} is whole, but is no set that was asked for")
            self.seen += 1
            return


def heartless(output: str) -> bool:
    attempts = STORE.list(f"{output}/_attempts")
    return any(not any(entry.name == "beat" and entry.bytes for entry in STORE.list(each.path)) for each in attempts)


def check_plain(output: str) -> None:
    """Raises Failed where a reader of all files in the workers' folders finds others than the set's, or anything is left."""
    listed = {file.path for file in whole(output).files()}
    folders = [entry for entry in STORE.list(output) if entry.name.startswith("worker=")]
    there = {f"{folder.name}/{file.name}" for folder in folders for file in STORE.list(folder.path)}
    if there != listed:
        raise Failed(f"{output}: files that no manifest lists, or that are gone: {sorted(there ^ listed)}")
    if left := strays(output):
        raise Failed(f"{output}: left over: {left}")
