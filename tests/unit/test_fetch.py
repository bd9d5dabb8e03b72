"""Fetching over real sockets: a server on this machine that breaks in the ways servers do, and a real HDFS."""

import hashlib
import io
import os
import socket
import struct
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.storage.hadoop_conf import hadoop_conf, read_site, webhdfs_address
from pipeline.core.storage.hdfs import PROXY_USER
from pipeline.core.storage.http import ResumingDownloader, first_byte, validator
from pipeline.core.storage.webhdfs import connect, user_name
from pipeline.datasets import cifar as fetch
from pipeline.datasets.cifar import ARCHIVES, RECORD, Archive, target_of
from tests.support.exit_codes import ended

FILES = {"batches.meta.txt": b"a\nb\n", **{f"data_batch_{i}.bin": os.urandom(70_000) for i in range(1, 6)}}
FILES["test_batch.bin"] = os.urandom(50_000)


def tar_of(files: dict[str, bytes], folder: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def archive_of(data: bytes, members: tuple[str, ...] = tuple(FILES)) -> Archive:
    return Archive("set.tar.gz", hashlib.md5(data).hexdigest(), "set", members)


@dataclass
class Mirror:
    """A web server for one file. Each answer takes the next item of ``script``: None answers in full, a number
    breaks the connection after so many bytes of the body, a negative one is an HTTP status to answer with."""

    data: bytes
    ranges: bool = True
    etag: str = '"v1"'
    script: list[int | None] = field(default_factory=list)
    asked: list[str | None] = field(default_factory=list)  # the Range header of each request
    sent_bytes: int = 0
    url: str = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        asked = request.headers.get("Range")
        self.asked.append(asked)
        step = self.script.pop(0) if self.script else None
        if step is not None and step < 0:
            request.send_error(-step)
            return
        start = 0
        if asked and self.ranges and request.headers.get("If-Range") == self.etag:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
        if start >= len(self.data):
            request.send_error(416)
            return
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(self.data) - 1}/{len(self.data)}")
        request.send_header("Content-Length", str(len(self.data) - start))
        if self.etag:
            request.send_header("ETag", self.etag)
        request.end_headers()
        body = self.data[start:] if step is None else self.data[start : start + step]
        self.sent_bytes += len(body)  # before the reader has them, and looks at the sum
        request.wfile.write(body)
        if step is not None:
            request.wfile.flush()
            request.close_connection = True


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


@dataclass
class Place:
    """Where a test fetches to."""

    root: Path

    @property
    def target(self) -> Path:
        return self.root / "data" / "set"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    def fetch(self, mirror: Mirror, archive: Archive | None = None) -> bool:
        return fetch.fetch(
            archive or archive_of(mirror.data),
            str(self.target),
            base_url=mirror.url,
            webhdfs=None,
            cache=self.cache,
            backoff_s=0.001,
        )

    def files(self) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in self.target.iterdir() if p.name != RECORD}

    def leftovers(self) -> list[str]:
        parent = self.target.parent
        return sorted(os.listdir(parent)) if parent.exists() else []


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("name", ["a#1", "a?b", "a;b", "a%20b"])
def test_a_target_is_kept_to_the_letter(tmp_path: Path, name: str) -> None:
    target: Any = target_of(f"file://{tmp_path}/{name}", None)
    assert target.folder == tmp_path / name
    with pytest.raises(UsageError, match="must be a folder of this machine"):
        target_of(f"file://elsewhere/{name}", None)


def test_the_target_holds_exactly_the_official_files(mirror: Mirror, place: Place) -> None:
    assert place.fetch(mirror)
    assert place.files() == FILES
    assert place.leftovers() == ["set"]


def test_a_dropped_connection_goes_on_at_the_byte_where_it_broke(mirror: Mirror, place: Place) -> None:
    mirror.script = [100_000, 50_000]
    assert place.fetch(mirror)
    assert place.files() == FILES
    assert mirror.asked == [None, "bytes=100000-", "bytes=150000-"]
    assert mirror.sent_bytes == len(mirror.data)


def test_a_later_run_goes_on_where_an_earlier_one_gave_up(mirror: Mirror, place: Place) -> None:
    mirror.script = [100_000, 0, 0, 0, 0, 0]
    with pytest.raises(
        JobError, match=r"5 times in a row without a new byte, at byte 100,000; .*resumes where it stopped"
    ):
        place.fetch(mirror)
    assert place.leftovers() == []
    asked_before = len(mirror.asked)
    assert place.fetch(mirror)
    assert mirror.asked[asked_before:] == ["bytes=100000-"]
    assert place.files() == FILES


def test_any_progress_renews_the_attempts(mirror: Mirror, place: Place) -> None:
    mirror.script = [20_000] * 9
    assert place.fetch(mirror)
    assert len(mirror.asked) == 10


def test_a_server_without_ranges_is_read_from_the_beginning(mirror: Mirror, place: Place) -> None:
    mirror.ranges = False
    mirror.script = [100_000]
    assert place.fetch(mirror)
    assert place.files() == FILES


def test_a_server_that_names_no_version_is_read_from_the_beginning(mirror: Mirror, place: Place) -> None:
    mirror.etag = ""
    mirror.script = [100_000]
    assert place.fetch(mirror)
    assert mirror.asked == [None, None]


def test_bytes_of_two_versions_are_never_joined(mirror: Mirror, place: Place) -> None:
    old = mirror.data
    mirror.script = [100_000, 0, 0, 0, 0, 0]
    new = tar_of(dict(reversed(FILES.items())), "set")
    with pytest.raises(JobError):
        place.fetch(mirror, archive_of(new))
    assert new[:100_000] != old[:100_000]
    mirror.data, mirror.etag = new, '"v2"'
    assert place.fetch(mirror, archive_of(new))
    assert place.files() == FILES


def test_a_part_longer_than_the_file_is_thrown_away(mirror: Mirror, place: Place) -> None:
    archive = archive_of(mirror.data)
    place.cache.mkdir()
    part = place.cache / f"set.tar.gz.{archive.md5[:8]}.part"
    part.write_bytes(b"x" * (len(mirror.data) + 5))
    part.with_name(part.name + ".version").write_text('"v1"')
    assert place.fetch(mirror)
    assert place.files() == FILES


def test_a_busy_server_is_asked_again(mirror: Mirror, place: Place) -> None:
    mirror.script = [-503, -500, -429]
    assert place.fetch(mirror)
    assert len(mirror.asked) == 4


def test_a_missing_file_is_not_asked_for_twice(mirror: Mirror, place: Place) -> None:
    mirror.script = [-404]
    with pytest.raises(JobError, match=r"set\.tar\.gz: the server answers HTTP 404 .*--base-url"):
        place.fetch(mirror)
    assert len(mirror.asked) == 1


def test_a_wrong_checksum_publishes_nothing(mirror: Mirror, place: Place) -> None:
    """A wrong checksum publishes nothing and the next run starts over."""
    right = mirror.data
    mirror.data = right[:-1] + b"?"
    with pytest.raises(JobError, match=r"not the published file: its MD5 is not [0-9a-f]{32}; run it again"):
        place.fetch(mirror, archive_of(right))
    assert place.leftovers() == []
    mirror.data = right
    assert place.fetch(mirror)
    assert place.files() == FILES


def test_a_rerun_downloads_nothing_and_writes_nothing(mirror: Mirror, place: Place) -> None:
    place.fetch(mirror)
    before = {p: p.stat().st_mtime_ns for p in place.target.iterdir()}
    assert not place.fetch(mirror)
    assert len(mirror.asked) == 1
    assert {p: p.stat().st_mtime_ns for p in place.target.iterdir()} == before


def test_a_second_target_is_filled_from_the_cache(mirror: Mirror, tmp_path: Path) -> None:
    first = Place(tmp_path)
    first.fetch(mirror)
    fetch.fetch(
        archive_of(mirror.data),
        str(tmp_path / "again"),
        base_url="http://127.0.0.1:9",
        webhdfs=None,
        cache=first.cache,
    )
    assert (tmp_path / "again" / "test_batch.bin").read_bytes() == FILES["test_batch.bin"]


def test_a_truncated_file_is_noticed_on_the_rerun(mirror: Mirror, place: Place) -> None:
    place.fetch(mirror)
    os.truncate(place.target / "data_batch_3.bin", 10)
    with pytest.raises(UsageError, match=r"lost or changed data_batch_3\.bin"):
        place.fetch(mirror)


def test_a_folder_with_other_files_is_left_alone(mirror: Mirror, place: Place) -> None:
    place.target.mkdir(parents=True)
    (place.target / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="contains other files"):
        place.fetch(mirror)
    assert place.files() == {"notes.txt": b"mine"}
    assert mirror.asked == []


def test_an_empty_folder_is_filled(mirror: Mirror, place: Place) -> None:
    place.target.mkdir(parents=True)
    assert place.fetch(mirror)
    assert place.files() == FILES


def test_an_archive_that_lacks_a_file_leaves_no_half_folder(mirror: Mirror, place: Place) -> None:
    with pytest.raises(DataError, match=r"contains no file set/absent\.bin"):
        place.fetch(mirror, archive_of(mirror.data, (*FILES, "absent.bin")))
    assert place.leftovers() == []


def test_a_hostile_archive_writes_nothing_outside_the_target(mirror: Mirror, place: Place) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name in ("../../escaped", str(place.root / "absolute"), "set/good"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"evil"))
        link = tarfile.TarInfo("set/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(link)
    mirror.data = packed.getvalue()
    assert place.fetch(mirror, archive_of(mirror.data, ("good",)))
    assert place.files() == {"good": b"evil"}
    assert sorted(os.listdir(place.root)) == ["cache", "data"]
    with pytest.raises(DataError, match="contains no file set/link"):
        fetch.extract(archive_of(mirror.data, ("link",)), place.cache / "set.tar.gz", place.root)


def test_two_fetches_at_once_do_not_write_one_part(mirror: Mirror, place: Place) -> None:
    archive = archive_of(mirror.data)
    place.cache.mkdir()
    downloader = ResumingDownloader(place.cache / f"set.tar.gz.{archive.md5[:8]}.part")
    with downloader._locked(), pytest.raises(JobError, match="another fetch"):
        place.fetch(mirror)
    assert place.fetch(mirror)


def test_of_two_fetches_at_once_the_second_looks_again(
    mirror: Mirror, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract = fetch.extract

    def extract_later(*arguments: Any) -> None:
        monkeypatch.setattr(fetch, "extract", extract)
        assert place.fetch(mirror)
        extract(*arguments)

    monkeypatch.setattr(fetch, "extract", extract_later)
    assert not place.fetch(mirror)
    assert place.files() == FILES


def run_command(mirror: Mirror, place: Place, *more: str) -> int:
    arguments = ["--to", str(place.target), "--cache", str(place.cache), "--base-url", mirror.url, *more]
    return ended("fetch", "cifar10", *arguments)


def test_the_command_says_what_it_did(
    mirror: Mirror, place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ARCHIVES, ("cifar10", "bin"), archive_of(mirror.data))
    assert run_command(mirror, place) == 0
    assert run_command(mirror, place) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"fetch: cifar10 in {place.target}: complete (7 files)",
        f"fetch: cifar10 in {place.target}: already complete, nothing downloaded (7 files)",
    ]


def test_a_refused_connection_is_one_line_and_exit_1(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch, "BACKOFF_S", 0.001)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, never listening: connections are refused
        nobody = Mirror(b"", url=f"http://127.0.0.1:{unused.getsockname()[1]}")
        assert run_command(nobody, place) == 1
    error = capsys.readouterr().err
    assert "Connection refused" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--base-url", "nonsense"), "is no address to download from"),
        (("--to", "ftp://host/x"), "the scheme 'ftp' is not supported"),
        (("--to", "hdfs://host:1/"), "names no folder"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(
    more: tuple[str, ...], says: str, mirror: Mirror, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(mirror, place, *more) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_an_unusable_cache_is_one_line(mirror: Mirror, place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    file = place.cache.parent / "file"
    file.touch()
    assert run_command(mirror, place, "--cache", str(file / "cache")) == 1
    assert "Not a directory; free space or choose another --to or --cache" in capsys.readouterr().err


def test_an_unknown_data_set_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("fetch", "cifar11", "--to", "x") == 2
    assert "invalid choice: 'cifar11'" in capsys.readouterr().err


def test_a_reset_connection_is_retried(place: Place) -> None:
    data = tar_of(FILES, "set")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            first, _ = listener.accept()
            # Linger of zero seconds: closing sends a reset, as a firewall or a crash does.
            first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            first.recv(4096)
            first.close()
            second, _ = listener.accept()
            second.recv(4096)
            second.sendall(f"HTTP/1.0 200 OK\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
            second.close()

        thread = threading.Thread(target=serve)
        thread.start()
        assert place.fetch(Mirror(data, url=f"http://127.0.0.1:{listener.getsockname()[1]}"))
        thread.join()
    assert place.files() == FILES


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"ETag": '"a"', "Last-Modified": "Mon"}, '"a"'),
        ({"ETag": 'W/"a"', "Last-Modified": "Mon"}, "Mon"),  # weak tags do not promise equal bytes
        ({"ETag": 'W/"a"'}, ""),
        ({}, ""),
    ],
)
def test_only_strong_validators_are_trusted(headers: dict[str, str], expected: str) -> None:
    assert validator(headers) == expected


@pytest.mark.parametrize(
    ("header", "start"), [("bytes 500-999/1000", 500), ("bytes 0-9/*", 0), ("bytes */10", -1), ("", -1)]
)
def test_a_content_range_tells_where_the_answer_starts(header: str, start: int) -> None:
    assert first_byte(header) == start


HA = {
    "dfs.nameservices": "prod",
    "dfs.namenode.http-address.prod.nn1": "m1:9870",
    "dfs.namenode.http-address.prod.nn2": "m2:9870",
    "dfs.namenode.https-address.prod.nn1": "m1:9871",
}


@pytest.mark.parametrize(
    ("authority", "secure", "expected"),
    [
        ("nn:14000", False, "http://nn:14000"),
        ("nn:14000", True, "https://nn:14000"),
        ("nn", False, "http://nn:9870"),
        ("nn", True, "https://nn:9871"),
        ("prod", False, "http://m1:9870;http://m2:9870"),
        ("prod", True, "https://m1:9871"),
    ],
)
def test_the_webhdfs_address_follows_the_hadoop_configuration(authority: str, secure: bool, expected: str) -> None:
    assert webhdfs_address(authority, HA, secure=secure) == expected


def test_a_user_without_a_name_is_told_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def getuser() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", getuser)
    monkeypatch.setenv("HADOOP_USER_NAME", "alice")
    monkeypatch.delenv("SPARK_USER", raising=False)
    assert user_name({}) == "alice"
    assert user_name({PROXY_USER: "bob"}) == "bob"
    monkeypatch.delenv("HADOOP_USER_NAME")
    with pytest.raises(UsageError, match=r"has no name here .*: set HADOOP_USER_NAME"):
        user_name({})


def test_a_hadoop_site_file_is_read() -> None:
    xml = "<configuration><property><name> a.b </name><value>\u00e9</value></property></configuration>"
    assert read_site(xml.encode()) == {"a.b": "\u00e9"}
    assert read_site(f'<?xml version="1.0" encoding="ISO-8859-1"?>{xml}'.encode("latin1")) == {"a.b": "\u00e9"}


@pytest.mark.parametrize("encoding", ["UTF-8", "no-encoding", "gb2312"])
def test_a_hadoop_file_that_cannot_be_decoded_is_one_line(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "core-site.xml").write_bytes(
        f'<?xml version="1.0" encoding="{encoding}"?><a>\u00e9</a>'.encode("latin1")
    )
    with pytest.raises(UsageError, match=r"core-site\.xml is no Hadoop configuration"):
        hadoop_conf(str(tmp_path))


def test_an_absent_webhdfs_is_one_line(mirror: Mirror, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        web = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(JobError, match=r"Connection refused; check that http://127.0.0.1:\d+ is up") as refused:
            fetch.fetch(archive_of(b""), "hdfs://127.0.0.1:1/x", base_url=mirror.url, webhdfs=web, cache=tmp_path)
        assert "\n" not in str(refused.value)


def test_a_cluster_with_kerberos_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdfs.ext.kerberos", None)
    with pytest.raises(
        UsageError, match=r"^http://h:9870 asks for Kerberos: install hdfs\[kerberos\] and run kinit first$"
    ):
        connect("http://h:9870", {"hadoop.security.authentication": "kerberos"})
