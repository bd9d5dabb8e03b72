"""An S3 server on this machine: the class S3."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import urllib.request
import venv
from datetime import timedelta
from pathlib import Path

from pipeline.errors import JobError
from tests.clusters.machine import HOST, cache_folder, free_ports, locked
from tests.clusters.servers import Cluster, Server, wait_until

REQUIREMENTS = Path(__file__).with_name("moto.txt")
SERVER = Path(__file__).with_name("s3_server.py")
START_TIMEOUT = timedelta(seconds=60)


def moto_python() -> Path:
    """An interpreter with moto, made on first use in the cache folder: 28 packages, 140 MB, 15 s. Raises JobError."""
    folder = cache_folder() / f"moto-{hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]}"
    python, ready = folder / "bin" / "python", folder / "ready"
    with locked(cache_folder()):
        if not ready.exists():
            shutil.rmtree(folder, ignore_errors=True)
            install = ["install", "--quiet", "--no-deps", "--requirement", str(REQUIREMENTS)]
            uv = shutil.which("uv")
            venv.create(folder, symlinks=True, with_pip=not uv)
            command = [uv, "pip", *install, "--python", str(python)] if uv else [str(python), "-m", "pip", *install]
            print(f"installing {REQUIREMENTS.name} into {folder}", file=sys.stderr, flush=True)
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise JobError(f"could not install moto: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
            ready.touch()
    return python


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
        command: list[str | Path] = [moto_python(), SERVER, str(self.port), self.bucket]
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
