"""Resumable downloads. pooch, which verifies the result, cannot resume by itself."""

import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import urllib3
from tqdm import tqdm

from pipeline.core.atomic import path_in_errors
from pipeline.core.errors import JobError

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 30
ATTEMPTS = 5  # consecutive attempts without a new byte
BACKOFF_S = 1.0
RETRIED_STATUS = (408, 429, 500, 502, 503, 504)


def validator(headers: Mapping[str, str]) -> str:
    """Return a value for If-Range, which prevents joining bytes of two versions of a file; empty if there is none."""
    etag = headers.get("ETag", "")
    if etag and not etag.startswith("W/"):  # a weak tag does not guarantee equal bytes
        return etag
    return headers.get("Last-Modified", "")


def first_byte(content_range: str) -> int:
    """Return the first byte of a 206 response: 500 for ``bytes 500-999/1000``; -1 if the header does not say."""
    start = content_range.removeprefix("bytes ").partition("-")[0]
    return int(start) if start.isdigit() else -1


@dataclass
class ResumingDownloader:
    """A pooch downloader that resumes broken downloads of this run or an earlier one.

    The bytes so far are in the file ``part``, the validator of the server's file beside it in ``part.version``."""

    part: Path
    backoff_s: float = BACKOFF_S
    timeout_s: float = TIMEOUT_S

    def __call__(self, url: str, output_file: str, pooch: object, check_only: bool = False) -> None:
        """Download a URL to ``output_file``, resuming after errors of the connection. Called by pooch.

        Raises JobError after ATTEMPTS failures in a row without a new byte, and for an HTTP error."""
        with self._locked():
            failures = 0
            longest = self._partial_size()
            while True:
                # Only attempts without progress count, so that slow or flaky connections finish eventually.
                try:
                    self._stream(url)
                    break
                except (requests.ConnectionError, requests.Timeout, urllib3.exceptions.HTTPError) as error:
                    # A part that begins anew, as without a validator, has made progress once it is longer than all before.
                    failures = 0 if self._partial_size() > longest else failures + 1
                    longest = max(longest, self._partial_size())
                    if failures >= ATTEMPTS:
                        raise JobError(
                            f"{url}: {innermost_reason(error)}, {ATTEMPTS} times in a row without a new byte, "
                            f"at byte {self._partial_size():,}; check the network and run it again: it resumes where it"
                            " stopped"
                        ) from error
                    time.sleep(self.backoff_s * 2 ** (failures - 1))
            os.replace(self.part, output_file)
            self._version_file.unlink(missing_ok=True)

    @property
    def _version_file(self) -> Path:
        return self.part.with_name(self.part.name + ".version")

    def _partial_size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the partial file for a ``with`` block. Raises JobError if another process holds it."""
        with open(self.part.with_name(self.part.name + ".lock"), "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JobError(f"{self.part} is being written by another fetch; wait for it") from None
            yield  # closing the file releases the lock, also if the process is killed

    def _stream(self, url: str) -> None:
        """Make one request, from the first missing byte if the server supports it, otherwise from the beginning."""
        version = self._version_file.read_text(encoding="utf-8") if self._version_file.exists() else ""
        have = self._partial_size() if version else 0
        # No compression in transit, because offsets count bytes of the file.
        headers = {"Accept-Encoding": "identity"}
        if have:
            headers |= {"Range": f"bytes={have}-", "If-Range": version}
        with requests.get(url, headers=headers, stream=True, timeout=self.timeout_s) as answer:
            if answer.status_code == 416:  # the server's current file has no byte after the part
                self._delete_partial()
                raise requests.ConnectionError("the server's file is shorter than the part downloaded")
            if answer.status_code in RETRIED_STATUS:
                raise requests.ConnectionError(f"the server answers HTTP {answer.status_code}")
            if answer.status_code not in (200, 206):
                raise JobError(
                    f"{url}: the server answers HTTP {answer.status_code} {answer.reason}; "
                    "check the address, or name a mirror with --base-url"
                )
            resumed = answer.status_code == 206 and first_byte(answer.headers.get("Content-Range", "")) == have
            if answer.status_code == 206 and not resumed:
                self._delete_partial()
                raise requests.ConnectionError("the server sent another range than requested")
            start = have if resumed else 0
            self._version_file.write_text(validator(answer.headers), encoding="utf-8")
            self._save(answer, start)

    def _save(self, answer: requests.Response, start: int) -> None:
        """Append the bytes of a response to the partial file. start: its length so far, 0 to write it anew.

        Raises requests.ConnectionError if the response ends early."""
        length = answer.headers.get("Content-Length")
        total = start + int(length) if length else None
        with (
            path_in_errors(self.part),
            open(self.part, "ab" if start else "wb") as file,
            tqdm(
                total=total,
                initial=start,
                desc=self.part.stem,
                unit="B",
                unit_scale=True,
                disable=None,  # no bar if stderr is not a terminal
            ) as bar,
        ):
            # read1 returns all bytes that have arrived; read, and so iter_content, drops an incomplete last chunk.
            while chunk := answer.raw.read1(CHUNK_BYTES):
                file.write(chunk)
                bar.update(len(chunk))
        if total is not None and self._partial_size() < total:
            raise requests.ConnectionError(f"the connection closed {total - self._partial_size():,} bytes early")

    def _delete_partial(self) -> None:
        self.part.unlink(missing_ok=True)
        self._version_file.unlink(missing_ok=True)


def innermost_reason(error: BaseException) -> str:
    """Return the innermost reason in one line, because requests and urllib3 wrap it several times."""
    inner: Any = error
    while (deeper := getattr(inner, "reason", None) or (inner.args and inner.args[-1])) and isinstance(
        deeper, BaseException
    ):
        inner = deeper
    text = inner.strerror if isinstance(inner, OSError) and inner.strerror else str(inner)
    return re.sub(r"\[Errno -?\d+\] ", "", text.rpartition(": ")[2]).strip() or type(inner).__name__
