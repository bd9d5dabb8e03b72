"""Objects as files: what only an object store does, what it refuses, and that keys stay secret."""

from __future__ import annotations

import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import obstore
import pytest
from obstore.exceptions import GenericError

from pipeline.core.storage import objects
from pipeline.core.storage.objects import SINGLE_PUT_BYTES, ObjectFiles
from pipeline.core.storage.retries import LastingError
from tests.clusters import S3
from tests.support.places import STORE, files_below, put
from tests.unit.test_objects import Forgetful, uploads

pytestmark = pytest.mark.full


@pytest.fixture
def folder(s3: S3, request: pytest.FixtureRequest) -> str:
    return f"{s3.uri}/{request.function.__name__}"


def test_a_forked_process_is_told_so_and_does_not_wait_for_ever(s3: S3) -> None:
    STORE.exists(f"{s3.uri}/x")
    if (child := os.fork()) == 0:
        try:
            STORE.exists(f"{s3.uri}/x")
        except LastingError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize("size", [1000, SINGLE_PUT_BYTES + 1, 3 * SINGLE_PUT_BYTES])
def test_a_file_appears_when_closed_and_never_after_an_exception(size: int, s3: S3, folder: str) -> None:
    data, path = os.urandom(size), f"{folder}/{size}"
    with suppress(ZeroDivisionError), STORE.create(path) as file:
        file.write(data)
        raise ZeroDivisionError
    file = STORE.create(path)
    file.write(data)
    del file  # forgotten, not closed
    assert files_below(folder) & {str(size)} == set()
    with STORE.create(path) as file:
        file.write(data[:500])
        file.write(memoryview(data)[500:])
        assert not STORE.exists(path)
    assert STORE.read(path) == data
    with pytest.raises(FileExistsError), STORE.create(path) as file:
        file.write(data)
    assert uploads(s3) == 0


def test_an_upload_that_fails_leaves_no_parts(s3: S3, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = STORE.create(f"{folder}/long")
    file.write(os.urandom(3 * SINGLE_PUT_BYTES))
    spool = file._spool  # type: ignore[attr-defined]
    read, reads = spool.read, []

    def failing(size: int = -1) -> bytes:
        reads.append(size)
        if len(reads) > 2:
            raise OSError(5, "the local disk failed")
        return bytes(read(size))

    monkeypatch.setattr(spool, "read", failing, raising=False)
    with pytest.raises(OSError, match="the local disk failed"):
        file.close()
    assert not STORE.exists(f"{folder}/long")
    assert uploads(s3) == 0


@pytest.mark.parametrize("size", [1000, SINGLE_PUT_BYTES + 1])
def test_a_move_of_a_long_object_passes_through_this_process(
    size: int, s3: S3, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store refuses to copy it at once, as S3 does above 5 GiB; the target exists already."""

    def refuse(*_: object) -> None:
        raise GenericError(
            "status code: 400 <Code>InvalidRequest</Code><Message>The copy source is too large</Message>"
        )

    data = os.urandom(size)
    put(f"{folder}/source", data)
    put(f"{folder}/target", b"before")
    monkeypatch.setattr(obstore, "copy", refuse)
    with pytest.raises(OSError, match="InvalidRequest; The copy source is too large"):
        STORE.rename(f"{folder}/source", f"{folder}/target", overwrite=True)
    assert STORE.read(f"{folder}/target") == b"before"
    monkeypatch.setattr(objects, "SURE_COPY_BYTES", size - 1)
    STORE.rename(f"{folder}/source", f"{folder}/target", overwrite=True)
    assert STORE.read(f"{folder}/target") == data
    assert files_below(folder) == {"target"}
    with pytest.raises(FileNotFoundError):
        STORE.rename(f"{folder}/source", f"{folder}/target", overwrite=True)
    assert uploads(s3) == 0


def test_a_put_whose_answer_was_lost_differs_from_a_rivals(s3: S3, folder: str) -> None:
    files = ObjectFiles(s3.uri, ())
    files.api = Forgetful()
    files.put_new(f"{folder}/file", b"same")
    with pytest.raises(FileExistsError):
        files.put_new(f"{folder}/file", b"same")


def test_a_replaced_manifest_is_never_read_in_part(s3: S3, folder: str) -> None:
    path, size = f"{folder}/file", objects.FIRST_BYTES * 4
    put(path, b"a" * size)
    with STORE.open(path) as whole, STORE.open(path) as parts:
        assert parts.read(10) == b"a" * 10
        put(path, b"b" * (size + 1))
        assert whole.read() == b"b" * (size + 1)
        parts.seek(-10, os.SEEK_END)
        with pytest.raises(OSError, match="was replaced while it was read"):
            parts.read()


def test_an_empty_object_that_a_console_makes_for_a_folder_is_no_file(s3: S3, folder: str) -> None:
    key = folder.removeprefix("s3:/")
    for name in (f"{key}/", f"{key}/sub/"):
        urllib.request.urlopen(urllib.request.Request(f"{s3.url}{name}", data=b"", method="PUT")).close()
    assert STORE.info(folder).is_dir
    assert [(entry.name, entry.is_dir) for entry in STORE.list(folder)] == [("sub", True)]
    assert STORE.list(f"{folder}/sub") == []


def test_more_objects_than_a_page_are_listed_and_deleted(s3: S3, folder: str) -> None:
    client, key = ObjectFiles(s3.uri, ()).client, folder.removeprefix(s3.uri)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: obstore.put(client, f"{key}/{number:04d}", b""), range(1005)))
    assert len(STORE.list(folder)) == 1005
    STORE.delete(folder)
    assert not STORE.exists(folder)
