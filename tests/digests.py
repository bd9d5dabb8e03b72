"""``python -m tests.digests [--root CHECKOUT] [--data DIR]``: what a checkout computes, as digests to compare with others.

A change that should not alter behaviour prints the same lines before and after. Everything goes through the command lines,
so that a checkout with other modules can be asked too: the shards of every strategy file by file, a resharded set, and
the parameters of short training runs whose bits do not depend on timing (one worker, or bsp)."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.numpy import load_file

HERE = Path(__file__).resolve().parent.parent
WORKERS = 5
SHARDING = {
    "round_robin": ["baseline.py", "--strategy", "round_robin"],
    "random": ["baseline.py", "--strategy", "random"],
    "random_iid": ["baseline.py", "--strategy", "random_iid"],
    "stratified": ["stratified.py"],
    "stratified-shuffled": ["stratified.py", "--shuffle-within-class", "--start", "carry"],
    "distribution_aware": ["distribution_aware.py"],
    "distribution_aware-plain": ["distribution_aware.py", "--preset", "plain", "--components", "50", "--n-init", "2"],
    "class_cluster": ["class_cluster.py"],
    "submodular": ["submodular.py"],
    "submodular-facility-location": ["submodular.py", "--function", "facility-location"],
    "hash": ["hash.py"],
    "hash-lsh": ["hash.py", "--family", "lsh"],
    "hash-sign": ["hash.py", "--family", "sign"],
    "dirichlet": ["skewed.py", "--alpha", "0.1"],
    "by_class": ["skewed.py", "--strategy", "by_class"],
    "sorted": ["skewed.py", "--strategy", "sorted"],
    "by_attribute": ["skewed.py", "--strategy", "by_attribute", "--column", "label"],
}
TRAINING = {
    "bsp-1": ["random-1", "--model", "cnn", "--protocol", "bsp"],
    "asp-1": ["random-1", "--model", "cnn", "--protocol", "asp"],
    "ssp-1": ["random-1", "--model", "perceptron", "--protocol", "ssp"],
    "bsp-5": ["stratified", "--model", "cnn", "--protocol", "bsp", "--servers", "2"],
    "bsp-5-resnet": ["stratified", "--model", "resnet20", "--protocol", "bsp", "--steps", "2"],
    "bsp-1-bernoulli": ["random-1", "--model", "logistic", "--protocol", "bsp", "--sampling", "bernoulli"],
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.digests", description=__doc__)
    parser.add_argument("--root", type=Path, default=HERE, help="the checkout to ask (default: this one)")
    parser.add_argument("--data", type=Path, help="images to shard (default: the generated sample)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        data = args.data or folder / "sample"
        if not args.data:
            _run(args.root, folder, [sys.executable, "-m", "pipeline", "sample", "--to", str(data)])
        for name, job in {**SHARDING, "random-1": SHARDING["random"]}.items():
            workers = 1 if name == "random-1" else WORKERS
            _job(args.root, folder, [*job, "--input", str(data), "--workers", str(workers)], name)
            print(f"shards  {name:<26} {_shards(folder / name)}", flush=True)
        _job(
            args.root,
            folder,
            ["reshard.py", "--input", str(folder / "distribution_aware"), "--workers", "3"],
            "reshard",
        )
        print(f"shards  {'reshard':<26} {_shards(folder / 'reshard')}", flush=True)
        for name, (shards, *flags) in TRAINING.items():
            length = [] if "--steps" in flags else ["--steps", "12"]
            command = [
                sys.executable,
                "-m",
                "trainer",
                "--shards",
                str(folder / shards),
                "--output",
                str(folder / name),
            ]
            common = ["--batch-size", "40", "--threads", "1", "--device", "cpu", "--no-report", "--quiet"]
            _run(args.root, folder, [*command, *flags, *length, *common])
            print(f"model   {name:<26} {_model(folder / name / 'model.safetensors')}", flush=True)


def _job(root: Path, folder: Path, job: list[str], name: str) -> None:
    command = [
        "spark-submit",
        "--master",
        "local[2]",
        str(root / "jobs" / job[0]),
        *job[1:],
        "--output",
        str(folder / name),
    ]
    _run(root, folder, [*command, "--no-report", "--quiet"])


def _run(root: Path, folder: Path, command: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(root), "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def _shards(folder: Path) -> str:
    """Digest name, without its stamp, and content of every file that the manifest lists, checked against the files."""
    manifest = json.loads((folder / "manifest.json").read_text())
    lines = []
    for worker in manifest["workers"]:
        for file in worker["files"]:
            found = _digest(folder / file["path"], length=64)
            assert found == file["sha256"], f"{file['path']} is not what the manifest says"
            lines.append(f"{file['path'].replace(manifest['generation'], '*')} {found}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16] + f" of {len(lines)} files"


def _model(path: Path) -> str:
    """Digest the name and the elements of every tensor, without the metadata of the file."""
    tensors = load_file(path)
    content = b"".join(name.encode() + tensors[name].tobytes() for name in sorted(tensors))
    return hashlib.sha256(content).hexdigest()[:16]


def _digest(path: Path, length: int = 16) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:length]


if __name__ == "__main__":
    main()
