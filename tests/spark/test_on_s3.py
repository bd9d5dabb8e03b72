"""A set made, reported on and trained on where everything lies in a bucket."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.clusters import ROOT, S3
from tests.conftest import make_rows, write_binary
from tests.support.application import run_application
from tests.support.places import STORE, put


def test_a_bucket_holds_input_shards_and_run(s3: S3, tmp_path: Path) -> None:
    """Shards on S3 are those of local files, and a run in the bucket reads them and leaves its model and report there."""
    local, root = write_binary(tmp_path / "in", *make_rows(300)), f"{s3.uri}/bucket-alone"
    (local / "test_batch.bin").write_bytes((local / "data_batch_2.bin").read_bytes()[: 3073 * 50])
    for path in local.iterdir():
        put(f"{root}/in/{path.name}", path.read_bytes())
    here, there = tmp_path / "shards", f"{root}/shards"
    jobs = [
        ("stratified.py", "--input", source, "--eval-input", source, "--output", output, "--workers", 2, *flags)
        for source, output, *flags in ((local, here, "--no-report"), (f"{root}/in", there))
    ]
    for done in run_application(tmp_path, jobs)[0]:
        assert done.code == 0, done.err
    assert STORE.exists(f"{there}/report.html")
    manifests: list[Any] = [json.loads(STORE.read(f"{folder}/manifest.json")) for folder in (str(here), there)]
    shas = [[[file["sha256"] for file in worker["files"]] for worker in each["workers"]] for each in manifests]
    assert shas[0] == shas[1]

    run = f"{root}/run"
    flags = ("--model", "logistic", "--steps", "4", "--batch-size", "20")
    command = [sys.executable, "-m", "trainer", "--shards", there, "--output", run, *flags]
    trained = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert json.loads(STORE.read(f"{run}/result.json"))["updates"] == 8
    for name in ("model.safetensors", "report.html"):
        assert STORE.exists(f"{run}/{name}"), name
