"""Files through WebHDFS where the server refuses: a server on this machine that gives the answers of a NameNode."""

from __future__ import annotations

import errno
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.core.errors import UsageError
from pipeline.core.storage.hdfs import KEYTAB, PRINCIPAL, kerberos_login
from pipeline.core.storage.retries import LastingError, is_transient
from pipeline.core.storage.store import Store
from pipeline.core.storage.webhdfs import connect


@pytest.fixture
def refuse() -> Iterator[tuple[str, dict[str, object]]]:
    """The address of a server, and the answer that it gives to every request: status and exception."""
    answer: dict[str, object] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = {"RemoteException": {"exception": answer["exception"], "message": "no\n\tat java.lang"}}
            data = json.dumps(body).encode() if answer["exception"] else b"<html>Authentication required</html>"
            self.send_response(int(str(answer["status"])))
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_PUT = do_DELETE = do_GET

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"webhdfs://127.0.0.1:{server.server_address[1]}", answer
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("status", "exception", "kind", "transient"),
    [
        (404, "FileNotFoundException", FileNotFoundError, False),
        (403, "AccessControlException", PermissionError, False),
        (403, "FileAlreadyExistsException", FileExistsError, False),
        (403, "AlreadyBeingCreatedException", FileExistsError, False),
        (403, "ParentNotDirectoryException", NotADirectoryError, False),
        (400, "IllegalArgumentException", LastingError, False),
        (403, "NSQuotaExceededException", OSError, False),
        (403, "SafeModeException", OSError, True),  # the NameNode leaves it
        (401, None, PermissionError, False),
    ],
)
def test_a_refusal_is_one_line_of_the_stores_errors(
    refuse: tuple[str, dict[str, object]], status: int, exception: str | None, kind: type[OSError], transient: bool
) -> None:
    root, answer = refuse
    answer |= {"status": status, "exception": exception}
    with pytest.raises(kind) as caught:
        Store().makedirs(f"{root}/a")
    assert str(caught.value).startswith(f"{root}/a: " if exception != "NSQuotaExceededException" else "[Errno")
    assert "\n" not in str(caught.value)
    assert is_transient(caught.value) == transient
    if exception == "NSQuotaExceededException":
        assert caught.value.errno == errno.EDQUOT
    if status == 401:
        assert "run kinit first" in str(caught.value)


def test_web_addresses_are_canonical() -> None:
    store = Store((("fs.defaultFS", "hdfs://names"),))
    assert store.resolve("webhdfs://host:9870/a/../b/") == "webhdfs://host:9870/b"
    assert store.resolve("swebhdfs://names/a") == "swebhdfs://names/a"
    with pytest.raises(UsageError, match="'' is not host:port; write webhdfs://host:port/path"):
        store.resolve("webhdfs:///a")


@pytest.mark.parametrize("value", ["kerberos", "KERBEROS"])
def test_kerberos_is_asked_for_in_any_case(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hadoop accepts the value in any case."""
    monkeypatch.setitem(sys.modules, "hdfs.ext.kerberos", None)  # as if it were not installed
    with pytest.raises(UsageError, match="asks for Kerberos: install"):
        connect("http://127.0.0.1:1", {"hadoop.security.authentication": value})


@pytest.mark.slow
def test_a_keytab_is_used_where_it_is(tmp_path: Path) -> None:
    conf = {KEYTAB: f"{tmp_path}/alice.keytab", PRINCIPAL: "alice@REALM"}
    assert kerberos_login({}) == kerberos_login(conf) == {}
    Path(conf[KEYTAB]).touch()
    login = kerberos_login(conf)
    assert (login["kerberos_principal"], login["kerberos_keytab"]) == ("alice@REALM", conf[KEYTAB])
    assert login["kerberos_cache"].startswith("MEMORY:")
