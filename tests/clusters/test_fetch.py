"""Fetching over real sockets: a server on this machine that breaks in the ways servers do, and a real HDFS."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.core.errors import DataError, UsageError
from pipeline.core.storage.store import Store
from pipeline.datasets import cifar as fetch
from pipeline.datasets.cifar import RECORD, Archive, target_of
from tests.clusters import S3, Hdfs
from tests.unit.test_fetch import FILES, Mirror, archive_of, tar_of

pytestmark = pytest.mark.full


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    served = Mirror(tar_of(FILES, "set"))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.answer(self)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield served
    server.shutdown()
    server.server_close()
    thread.join()


def test_on_hdfs_files_arrive_whole_or_not_at_all(mirror: Mirror, hdfs: Hdfs, tmp_path: Path) -> None:
    archive = archive_of(mirror.data)
    client = hdfs.client()
    web = client.url

    def publish(folder: str, wanted: Archive = archive) -> bool:
        return fetch.fetch(
            wanted, f"hdfs://{folder}", base_url=mirror.url, webhdfs=web, cache=tmp_path, backoff_s=0.001
        )

    assert publish("/data/set")
    assert not publish("/data/set")
    for name, data in FILES.items():
        with client.read(f"/data/set/{name}") as reader:
            assert reader.read() == data
    assert json.loads(target_of(f"{hdfs.uri}/data/set", None).read(RECORD))["md5"] == archive.md5

    client.makedirs("/data/empty")
    assert publish("/data/empty")
    assert "test_batch.bin" in client.list("/data/empty")

    with pytest.raises(DataError):
        publish("/data/half", archive_of(mirror.data, ("absent.bin",)))
    client.write("/data/other/mine", b"1")
    with pytest.raises(UsageError, match="contains other files"):
        publish("/data/other")
    assert sorted(client.list("/data")) == ["empty", "other", "set"]


def test_on_s3_a_killed_upload_is_done_again(
    mirror: Mirror, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.settings.items():
        monkeypatch.setenv(name, value)
    archive, folder = archive_of(mirror.data), f"{s3.uri}/fetched/set"
    store = Store()

    def publish() -> bool:
        return fetch.fetch(archive, folder, base_url=mirror.url, webhdfs=None, cache=tmp_path, backoff_s=0.001)

    put = Store.replace

    def put_or_die(self: Store, uri: str, data: bytes) -> None:
        if uri.endswith("test_batch.bin"):
            raise KeyboardInterrupt
        put(self, uri, data)

    with monkeypatch.context() as killed:
        killed.setattr(Store, "replace", put_or_die)
        with pytest.raises(KeyboardInterrupt):
            publish()
    assert store.exists(f"{folder}/_fetching")
    assert publish()
    assert not publish()
    assert {name: store.read(f"{folder}/{name}") for name in FILES} == FILES
    assert {entry.name for entry in store.list(folder)} == {*FILES, RECORD}
    store.replace(f"{folder}/test_batch.bin", b"")
    with pytest.raises(UsageError, match=r"lost or changed test_batch\.bin"):
        publish()
