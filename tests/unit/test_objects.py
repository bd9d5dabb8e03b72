"""Objects as files: what only an object store does, what it refuses, and that keys stay secret."""

from __future__ import annotations

import pickle
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, cast

import obstore
import pytest
from obstore.exceptions import GenericError

from pipeline.core.errors import JobError, UsageError
from pipeline.core.shardset.attempt import Attempt, make_task_folder, seems_alive
from pipeline.core.storage import object_client, store
from pipeline.core.storage.object_client import convert_errors
from pipeline.core.storage.objects import SINGLE_PUT_BYTES, part_bytes
from pipeline.core.storage.retries import LastingError, is_transient
from pipeline.core.storage.s3a import s3_config, s3_credential, s3a_settings
from pipeline.core.storage.store import Store, configured_store
from tests.clusters import S3
from tests.clusters.machine import free_ports
from tests.support.places import STORE, files_below

SECRET = "of-no-use-elsewhere"
KEYS = (("fs.s3a.access.key", "tests"), ("fs.s3a.secret.key", SECRET))


@pytest.fixture
def folder(s3: S3, request: pytest.FixtureRequest) -> str:
    return f"{s3.uri}/{request.function.__name__}"


def uploads(s3: S3) -> int:
    """How many uploads in parts were begun and neither completed nor aborted."""
    with urllib.request.urlopen(f"{s3.url}/{s3.bucket}?uploads") as answer:
        return int(answer.read().count(b"<UploadId>"))


class Answering(BaseHTTPRequestHandler):
    """A server that gives the same answer to everything. status 0: none."""

    status, body, asked = 200, b"", 0

    def answer(self) -> None:
        type(self).asked += 1
        if not self.status:
            time.sleep(3600)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.send_header("ETag", '"0"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.body)

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = answer

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def answering(status: int, body: bytes = b"") -> Iterator[Store]:
    """A store at a server that gives one answer."""
    handler = type("Handler", (Answering,), {"status": status, "body": body})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield Store((*KEYS, ("fs.s3a.endpoint", f"http://127.0.0.1:{server.server_port}")))
    finally:
        server.shutdown()
        server.server_close()


def error(code: str, message: str) -> bytes:
    return (
        f"<Error><Code>{code}</Code><Message>{message}</Message><AWSAccessKeyId>AKIA</AWSAccessKeyId></Error>".encode()
    )


@pytest.mark.parametrize(
    ("status", "body", "kind", "expected"),
    [
        (403, error("SignatureDoesNotMatch", "It does not match."), PermissionError, "DoesNotMatch; .*; check the rights"),
        (403, error("RequestTimeTooSkewed", "Too large."), OSError, "RequestTimeTooSkewed; .*; set this machine's clock"),
        (403, error("InvalidAccessKeyId", "Unknown key."), PermissionError, "check the rights of your key on s3://bucket"),
        (400, error("AuthorizationHeaderMalformed", "expecting 'eu-west-1'"), LastingError, "eu-west-1'; check AWS_REGION"),
        (301, error("PermanentRedirect", "Use another endpoint."), LastingError, "check AWS_REGION"),
        (404, error("NoSuchBucket", "None."), LastingError, "there is no bucket s3://bucket at http://127.0.0.1"),
        (501, error("NotImplemented", "A header is not."), LastingError, "A header is not."),
        (503, error("SlowDown", "Reduce your rate."), OSError, "Reduce your rate.; check that http://127.0.0.1"),
        (400, error("RequestTimeout", "It was not read."), OSError, "It was not read.; check that http://127.0.0.1"),
    ],
)  # fmt: skip
def test_what_a_store_refuses_is_one_line_with_the_next_step(
    status: int, body: bytes, kind: type[OSError], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_client, "RETRIES", 1)
    with answering(status, body) as store, pytest.raises(OSError, match=expected) as caught:
        store.write_new("s3://bucket/file", b"data") if kind is not OSError else store.files("s3://bucket/").list(
            "s3://bucket/x"
        )
    assert type(caught.value) is kind
    assert is_transient(caught.value) == (kind is OSError)
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 300
    assert not any(secret in line for secret in (SECRET, "AKIA"))


@pytest.mark.full
def test_an_endpoint_that_is_not_there_is_one_line() -> None:
    store = Store((*KEYS, ("fs.s3a.endpoint", f"http://127.0.0.1:{free_ports(1)[0]}")))
    with pytest.raises(OSError, match=r"s3://bucket/x: .*refused.*; check that http://127\.0\.0\.1:\d+ is up"):
        store.info("s3://bucket/x")


def test_a_store_that_ignores_the_condition_of_a_put_is_found_out() -> None:
    with answering(200) as store, pytest.raises(LastingError, match="ignores If-None-Match, which commits rest on"):
        store.files("s3://bucket/").put_new("s3://bucket/file", b"data")  # type: ignore[attr-defined]


def test_hadoops_settings_say_where_a_bucket_is_and_its_own_win() -> None:
    conf = {
        "fs.s3a.endpoint": "minio:9000",
        "fs.s3a.connection.ssl.enabled": "False",
        "fs.s3a.access.key": "all",
        "fs.s3a.bucket.mine.access.key": "mine",
        "fs.s3a.secret.key": "s",
        "fs.s3a.endpoint.region": "eu-west-1",
    }
    settings = s3a_settings("mine", conf)
    assert s3_config(settings) == {"endpoint": "http://minio:9000", "region": "eu-west-1"}
    assert s3_credential(settings) == {
        "access_key_id": "mine", "secret_access_key": "s", "token": None, "expires_at": None,
    }  # fmt: skip
    assert s3a_settings("other", conf)["access.key"] == "all"
    assert s3_config({"endpoint": "s3.amazonaws.com"}) == {}  # Hadoop's default, which knows one region
    assert s3_config({"endpoint": "e"}) == {"endpoint": "https://e"}
    assert s3_config({"path.style.access": "FALSE"}) == {"virtual_hosted_style_request": True}
    assert s3_config({"aws.credentials.provider": "org.x.AnonymousAWSCredentialsProvider"}) == {"skip_signature": True}


def test_keys_are_not_printed_and_are_in_no_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(KEYS)
    assert SECRET not in repr(store) + repr(store.files("s3://bucket/")) + repr(store.files("s3://bucket/").__dict__)
    assert pickle.loads(pickle.dumps(store)) == store
    with pytest.raises(UsageError) as caught:
        store.resolve(f"s3n://key:{SECRET}@bucket/x")
    assert SECRET not in str(caught.value)
    site = "".join(f"<property><name>{name}</name><value>{value}</value></property>" for name, value in KEYS)
    (tmp_path / "core-site.xml").write_text(f"<configuration>{site}</configuration>")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    assert configured_store() == store


class Forgetful:
    """obstore, whose first conditional put is carried out and then tried again, as after a lost answer."""

    def __init__(self) -> None:
        self.puts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(obstore, name)

    def put(self, *arguments: Any, **options: Any) -> Any:
        self.puts += 1
        done = obstore.put(*arguments, **options)
        return obstore.put(*arguments, **options) if self.puts == 1 else done


@pytest.mark.slow
def test_the_next_run_deletes_the_files_of_a_late_task(folder: str) -> None:
    """A folder cannot be made before its first file, the heartbeat: one without is of no run that is about to begin."""
    with Attempt(STORE, folder) as attempt:
        task = f"{attempt.folder}/task"
        make_task_folder(STORE, task)
    with pytest.raises(JobError, match="no longer exists"):
        make_task_folder(STORE, task)
    STORE.write_new(f"{task}/part-00000.parquet", b"late")
    assert not seems_alive(STORE, folder, attempt.id)
    with Attempt(STORE, folder):
        pass
    assert files_below(folder) == set()


class Recorder(BaseHTTPRequestHandler):
    """A proxy that passes requests on and keeps their headers."""

    seen: ClassVar[list[tuple[str, str, dict[str, str]]]] = []

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen.append((self.command, self.path, {name.lower(): value for name, value in self.headers.items()}))
        host, _, path = self.path.removeprefix("http://").partition("/")
        connection = HTTPConnection(host)
        connection.request(self.command, f"/{path}", body, dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        # A HEAD's answer tells the length of what it does not send.
        self.send_header("Content-Length", answer.getheader("Content-Length") or str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = pass_on

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.slow
def test_hadoops_encryption_payer_and_proxy_apply_to_objects(s3: S3, folder: str) -> None:
    """Of a put, an upload in parts, a copy and a conditional put."""
    Recorder.seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    key = "arn:aws:kms:us-east-1:000000000000:key/11111111-2222-3333-4444-555555555555"
    settings = {
        "endpoint": s3.url,
        "encryption.algorithm": "SSE-KMS",
        "encryption.key": key,
        "requester.pays.enabled": "true",
        "proxy.host": "127.0.0.1",
        "proxy.port": str(server.server_port),
    }
    store = Store((*KEYS, *((f"fs.s3a.{name}", value) for name, value in settings.items())))
    try:
        store.write_new(f"{folder}/small", b"data")
        with store.create(f"{folder}/large") as file:
            file.write(bytes(SINGLE_PUT_BYTES + 1))
        store.rename(f"{folder}/small", f"{folder}/moved")
        store.put_new(f"{folder}/put", b"data")
        store.replace(f"{folder}/put", b"other")
    finally:
        server.shutdown()
        server.server_close()
    for name in ("large", "moved", "put"):
        key_of = f"{folder.removeprefix(s3.uri)}/{name}".strip("/")
        client: Any = cast(Any, STORE.files(folder)).client
        url: Any = obstore.sign(client, "HEAD", key_of, timedelta(minutes=1))
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as answer:
            assert answer.headers["x-amz-server-side-encryption"] == "aws:kms", name
            assert answer.headers["x-amz-server-side-encryption-aws-kms-key-id"] == key, name
    assert {command for command, _, _ in Recorder.seen} >= {"PUT", "POST", "GET"}
    assert all(headers.get("x-amz-request-payer") == "requester" for _, _, headers in Recorder.seen)


@pytest.mark.parametrize(
    ("root", "keys"), [("gs://bucket", "the variables that obstore reads"), ("s3://bucket", "AWS_ACCESS_KEY_ID and")]
)
@pytest.mark.parametrize("text", ["status code: 403", "no answer of 169.254.169.254", "connection refused"])
def test_an_error_of_a_store_names_its_own_settings(root: str, keys: str, text: str) -> None:
    """Google's and Azure's stores have no keys of Amazon's."""
    with pytest.raises(OSError, match=root) as caught, convert_errors(f"{root}/file", root, "its endpoint"):
        raise GenericError(text)
    if text == "connection refused" and root == "s3://bucket":
        keys = "AWS_ENDPOINT_URL, fs.s3a.endpoint"
    assert keys in str(caught.value)
    assert ("AWS" in str(caught.value)) == (root == "s3://bucket")


def test_a_client_of_hdfs_gets_no_keys_of_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []
    monkeypatch.setattr(store, "_hdfs", lambda authority, conf, pid: given.append(dict(conf)))
    Store((*KEYS, ("dfs.nameservices", "cluster"), ("fs.defaultFS", "hdfs://cluster"))).files("hdfs://cluster/file")
    assert given == [{"dfs.nameservices": "cluster", "fs.defaultFS": "hdfs://cluster"}]


def test_parts_of_a_long_file_are_no_more_than_s3_takes() -> None:
    for size in (0, 1, 80 << 30, (80 << 30) + 1, 5 << 40):
        assert part_bytes(size) >= 8 << 20
        assert -(-size // part_bytes(size)) <= 10_000
    assert part_bytes(78 << 30) == 8 << 20
