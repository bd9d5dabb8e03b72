"""The tests' S3 server: moto over HTTP, in an environment of its own, without this project. Arguments: the port, the bucket.

moto looks whether an object is there and then puts it, as two steps of a thread, and S3 does so in one. So requests are
handled one at a time: what races here is the clients alone."""

import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
from werkzeug.test import Client


class OneAtATime:
    def __init__(self, app: Callable[[dict[str, Any], Any], Iterable[bytes]]) -> None:
        self.app, self.lock = app, threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Any) -> list[bytes]:
        with self.lock:
            return list(self.app(environ, start))


if __name__ == "__main__":
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = OneAtATime(DomainDispatcherApplication(create_backend_app))
    assert Client(app).put(f"/{sys.argv[2]}").status_code == 200
    make_server("127.0.0.1", int(sys.argv[1]), app, threaded=True).serve_forever()
