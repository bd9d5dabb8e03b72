"""Clients of object stores: endpoints, credentials, timeouts, and the translation of errors.

S3 is configured by AWS_* variables, or by Hadoop's fs.s3a.* settings (s3a.py), which override them. ~/.aws is not read.
Other stores are configured by obstore's variables (GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME, ...)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pipeline.core.storage.retries import LastingError
from pipeline.core.storage.s3a import proxy_config, s3_config, s3_credential, s3a_settings

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
CREDENTIALS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or fs.s3a.access.key and fs.s3a.secret.key"
# A missing endpoint fails within seconds. A busy one is retried for longer than S3 throttles a caller.
RETRIES = 5
RETRIED_S = 15
CONNECT_S = 4
SILENCE_S = 30


def client_of(root: str, conf: Mapping[str, str]) -> tuple[Any, str]:
    """Return a client of an object store, and its endpoint for error messages. Sends nothing yet.

    root: ``s3://bucket``, ``gs://bucket`` or ``abfs://container@account...``. conf: Hadoop's settings. Raises
    UsageError for a setting that cannot be applied."""
    from obstore.store import S3Store, from_url

    retry: RetryConfig = {
        "max_retries": RETRIES,
        "retry_timeout": timedelta(seconds=RETRIED_S),
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=3), "base": 2},
    }
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "read_timeout": timedelta(seconds=SILENCE_S),
        "timeout": timedelta(minutes=10),  # limit for a whole transfer
    }
    if not root.startswith("s3://"):
        return from_url(root, client_options=client, retry_config=retry), root
    settings = s3a_settings(bucket := root.removeprefix("s3://"), conf)
    config = s3_config(settings)
    default_endpoint = next((value for name in ENDPOINT_VARIABLES if (value := os.environ.get(name))), "")
    endpoint = str(config.get("endpoint", default_endpoint))
    if endpoint.startswith("http://"):
        client["allow_http"] = True
    client |= proxy_config(settings)
    # Without keys of Hadoop, obstore looks for credentials itself.
    keys = (lambda: s3_credential(settings)) if "access.key" in settings else None
    store = S3Store(bucket, config=config, client_options=client, retry_config=retry, credential_provider=keys)
    proxy_text = f" through the proxy {settings['proxy.host']}" if "proxy_url" in client else ""
    return store, (endpoint or "AWS") + proxy_text


@contextmanager
def convert_errors(path: str, root: str, place: str) -> Iterator[None]:
    """Convert obstore's errors in a context to Python's own, with a one-line message that names the next step.

    Args:
        path: path of the request.
        root: root of the store, such as ``s3://bucket``.
        place: endpoint for the message.
    """
    from obstore.exceptions import BaseError

    try:
        yield
    except (LastingError, FileExistsError, PermissionError):
        raise
    except (BaseError, OSError, ValueError) as error:
        raise _plain(error, path, root, place) from error


def _plain(error: Exception, path: str, root: str, place: str) -> OSError:
    """Return Python's own error for an error of obstore, with a message that names the next step.

    Args:
        error: the error, whose text obstore makes of the store's answer and a trace.
        path: path of the request.
        root: root of the store, such as ``s3://bucket``.
        place: endpoint for the message.
    """
    text = str(error)
    reply = "; ".join(re.findall(r"<(?:Code|Message)>([^<]*)<", text.partition("Debug source")[0]))
    # obstore reports the status only as part of its text.
    status = next(iter(re.findall(r"status code: (\d{3})", text)), "")
    kind = type(error).__name__
    fact = reply or _cause(text)
    amazon = root.startswith("s3:")
    keys = CREDENTIALS if amazon else "the variables that obstore reads"
    endpoint = "AWS_ENDPOINT_URL, fs.s3a.endpoint" if amazon else keys
    if "NoSuchBucket" in reply or "ContainerNotFound" in reply:
        return LastingError(f"{path}: there is no bucket {root} at {place}; create it, or correct the path")
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{path} does not exist")
    if kind == "AlreadyExistsError":
        return FileExistsError(f"{path} exists")
    if "169.254." in text or "metadata.google" in text:
        return PermissionError(f"{path}: no credentials were found; set {keys}")
    if "RequestTimeTooSkewed" in reply:
        return OSError(f"{path}: {fact}; set this machine's clock, which differs from that of {place}")
    if status in ("401", "403") or kind in ("PermissionDeniedError", "UnauthenticatedError") or "ExpiredToken" in reply:
        # An answer without a body does not say if a clock is the reason.
        clock = "" if reply else ", and this machine's clock"
        return PermissionError(f"{path}: {fact}; check the rights of your key on {root}, and {keys}{clock}")
    # S3 answers a request that arrives too slowly with 400, too.
    is_refused = status == "400" and "RequestTimeout" not in reply
    if status.startswith("3") or is_refused or "redirect" in text:
        return LastingError(f"{path}: {fact}; check AWS_REGION or fs.s3a.endpoint.region, and the endpoint {place}")
    if isinstance(error, ValueError) or kind in ("InvalidPathError", "NotSupportedError") or status == "501":
        return LastingError(f"{path}: {fact}")
    if kind == "PreconditionError":
        return OSError(f"{path} was replaced while it was read; read it again")
    return OSError(f"{path}: {fact}; check that {place} is up and in reach ({endpoint})")


def _cause(text: str) -> str:
    """Return the innermost reason in an obstore trace, or its first line without the request."""
    reasons = re.findall(r'(?:error|message): "([^"]+)"', text) or re.findall(r"kind: (TimedOut|Timeout)", text)
    first = text.splitlines()[0] if text else "no reason was given"
    return str(reasons[-1]) if reasons else first.rpartition(" - ")[2].strip(": ")[:300]
