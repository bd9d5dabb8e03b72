"""An S3 server on this machine: the class S3."""

from __future__ import annotations

import os
import urllib.request
from datetime import timedelta
from pathlib import Path

from tests.clusters.machine import HOST, free_ports
from tests.clusters.servers import Cluster, Server, wait_until

SERVER = Path(__file__).with_name("s3_server.py")
START_TIMEOUT = timedelta(seconds=60)


class S3(Cluster):
    """One server with one empty bucket. It takes 1 s to start. The objects are gone when it ends.

    uri: s3://BUCKET; settings: the variables by which clients find it."""

    def __init__(self) -> None:
        super().__init__()
        self.bucket = "sharding-tests"
        self.uri = f"s3://{self.bucket}"
        self.port = free_ports(1)[0]
        self.url = f"http://{HOST}:{self.port}"
        self.settings = {
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "of-no-use-elsewhere",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
        }

    def start(self) -> None:
        from tests.clusters.environments import (
            MOTO,
        )  # here, because `python -m` runs that module and imports this package

        command: list[str | Path] = [MOTO.make(), SERVER, str(self.port), self.bucket]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PYTHON"))}
        server = Server("s3", command, self.folder / "logs" / "s3.log", env)
        self.servers = [server]
        server.start()
        wait_until(self._answers, "the S3 server", self.servers, START_TIMEOUT)

    def _answers(self) -> bool:
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                f"{self.url}/{self.bucket}", timeout=5
            ):
                return True
        except OSError:
            return False
