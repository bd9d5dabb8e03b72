"""Blocks of bash whose commands of the project run in this process, which has loaded torch and has a Spark.

A `sharding train` imports torch twice, and a `spark-submit` starts a JVM: both take longer than the work of an example."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import BinaryIO

from tests.clusters import ROOT
from tests.support.application import run_program

SHARDING = ROOT / "pipeline" / "entry.py"
# Two functions stand in for the programs of their names. A spark-submit with options of its own is a real one.
FUNCTIONS = """
run_there() {{
    local code
    printf '%s\\0' "$#" "$@" >&{requests}
    read -r code <&{answers}
    cat '{folder}/out'
    cat '{folder}/err' >&2
    return "$code"
}}
sharding() {{ run_there '{sharding}' "$@"; }}
spark-submit() {{ if [[ $1 == -* ]]; then command spark-submit "$@"; else run_there "$@"; fi; }}
"""


def run_shell(text: str, folder: Path, env: Mapping[str, str]) -> CompletedProcess[str]:
    """Run lines of bash in a folder.

    This process runs each `sharding`, and each `spark-submit` whose first word is a job: in the given folder, with its own
    environment, and one after the other. So they must not be in a pipe with each other, and a variable or folder that the
    lines set does not reach them."""
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        asked, requests = os.pipe()
        answers, answered = os.pipe()
        functions = FUNCTIONS.format(requests=requests, answers=answers, folder=scratch, sharding=SHARDING)
        command = ["bash", "-euo", "pipefail", "-c", f"{functions}\n{text}"]
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=err, pass_fds=(requests, answers))
        os.close(requests)
        os.close(answers)
        with process, open(asked, "rb") as incoming, open(answered, "w", buffering=1) as outgoing:
            for program, *arguments in _commands(incoming):
                ended = run_program(folder / program, *arguments, folder=folder)
                (Path(scratch) / "out").write_text(ended.out)
                (Path(scratch) / "err").write_text(ended.err)
                outgoing.write(f"{ended.code}\n")
        said = [_text(file) for file in (out, err)]
    return CompletedProcess(command, process.returncode, *said)


def _commands(incoming: BinaryIO) -> Iterator[list[str]]:
    """Yield the words of each command that bash sends, until its end. Their number comes first, and a NUL after each."""
    fields = _fields(incoming)
    for number in fields:
        yield [next(fields) for _ in range(int(number))]


def _fields(incoming: BinaryIO) -> Iterator[str]:
    """Yield the fields, each as soon as its NUL has come."""
    field = bytearray()
    while byte := incoming.read(1):
        if byte == b"\0":
            yield field.decode()
            field.clear()
        else:
            field += byte


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
