"""The claim of a path: one owner, whatever races and lost answers there are."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from pipeline.core.storage import objects
from pipeline.core.storage.claim import claim
from pipeline.core.storage.retries import with_retries
from pipeline.core.storage.store import Store
from tests.support.places import STORE, put

FAULTS = ("", "refused", "lost answer", "lost answer, denied by its repetition")


@dataclass(frozen=True)
class FaultyStore(Store):
    """Files in memory.

    Attributes:
        stored: contents by path.
        faults: faults of the next changes, the first one next.
        unreadable: errors of the next reads.
    """

    stored: dict[str, bytes] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    unreadable: list[OSError] = field(default_factory=list)

    def put_new(self, uri: str, data: bytes) -> None:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "refused":
            raise ConnectionResetError("connection reset")
        if uri in self.stored:
            raise FileExistsError(uri)
        self.stored[uri] = data
        if fault == "lost answer":
            raise ConnectionResetError("connection reset")
        if fault:  # as a client says that repeats a call by itself
            raise FileExistsError(uri)

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        if source not in self.stored:
            raise FileNotFoundError(source)
        try:
            self.put_new(target, self.stored[source])
        finally:
            if self.stored.get(target) == self.stored[source]:
                del self.stored[source]

    def read(self, uri: str) -> bytes:
        if self.unreadable:
            raise self.unreadable.pop(0)
        if uri not in self.stored:
            raise FileNotFoundError(uri)
        return self.stored[uri]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries wait for no time."""
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)


def test_a_claimed_path_keeps_its_record(place: str) -> None:
    path = f"{place}/a/b/record"
    assert claim(STORE, path, b"one") == b"one"
    assert claim(STORE, path, b"two") == b"one"
    assert claim(STORE, path, b"one") == b"one", "as after a lost answer"
    put(f"{place}/draft", b"three")
    assert claim(STORE, path, b"three", staged=f"{place}/draft") == b"one"
    assert claim(STORE, f"{place}/other", b"three", staged=f"{place}/draft") == b"three"
    assert sorted(STORE.walk(place)) == [path, f"{place}/other"]


@pytest.mark.parametrize("with_draft", [False, True])
def test_many_claimants_learn_of_one_owner(with_draft: bool, tmp_path: Path) -> None:
    def claimed(path: str, number: int) -> bytes | None:
        staged = f"{path}-{number}" if with_draft else None
        if staged:
            put(staged, f"{number}".encode())
        return claim(STORE, path, f"{number}".encode(), staged=staged)

    for turn in range(20):
        path = f"{tmp_path}/{turn}/record"
        with ThreadPoolExecutor(8) as pool:
            answers = set(pool.map(claimed, [path] * 8, range(8)))
        assert answers == {STORE.read(path)}


@pytest.mark.parametrize("with_draft", [False, True])
@pytest.mark.parametrize("unread", [0, 1])
def test_faults_leave_one_owner_whom_all_know(with_draft: bool, unread: int) -> None:
    """Two claimants, each with every sequence of two faults and then good answers, and reads that fail at first."""
    for faults in product(FAULTS, repeat=4):
        store = FaultyStore(stored={"one": b"1", "two": b"2"})
        answers = []
        for name, of_claimant in (("one", faults[:2]), ("two", faults[2:])):
            store.faults[:] = of_claimant
            store.unreadable[:] = [ConnectionResetError("connection reset")] * unread
            staged = name if with_draft else None
            answers.append(with_retries(claim)(store, "record", store.stored[name], staged=staged))
        assert answers == [b"1", b"1"], faults
        assert store.stored["record"] == b"1"


@pytest.mark.parametrize("failing", ["put", "get"])
def test_a_failed_claim_keeps_anothers_object(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claimant whose conditional PUT, or whose look at the object that refused it, fails once in the store."""
    monkeypatch.setattr(objects, "client_of", lambda root, conf: (MemoryStore(), "memory"))
    path = f"s3://claims-{failing}/record"
    assert claim(STORE, path, b"one") == b"one"
    answer = getattr(obstore, failing)
    errors = [GenericError("503 SlowDown")]

    def fail_once(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return answer(*args, **options)

    monkeypatch.setattr(obstore, failing, fail_once)
    assert claim(STORE, path, b"two") == b"one"
    assert not errors
    assert STORE.read(path) == b"one"


def test_an_error_that_wrote_nothing_is_raised() -> None:
    store = FaultyStore(faults=["refused"])
    with pytest.raises(ConnectionResetError):
        claim(store, "record", b"1")
    with pytest.raises(FileNotFoundError):
        claim(store, "record", b"1", staged="missing")
    assert claim(store, "record", b"1") == b"1"


def test_an_owner_that_cannot_be_read_is_an_error() -> None:
    """A taken path is neither the caller's nor another's while its record is unknown."""
    denied = PermissionError(errno.EACCES, "Permission denied", "record")
    store = FaultyStore(stored={"record": b"2"}, unreadable=[denied])
    with pytest.raises(PermissionError):
        claim(store, "record", b"1")


def test_a_record_that_was_deleted_since_is_nobodys() -> None:
    gone = FaultyStore(stored={"record": b"2"}, unreadable=[FileNotFoundError(errno.ENOENT, "no such file", "record")])
    assert claim(gone, "record", b"1") is None
