"""Damaged and hostile files of every kind that the product reads: each is refused in one line, or read as it may be.

A child process reads them, one after the other, under limits of memory and time. Forbidden are any other exception, a
crash, a hang, more memory, and a file written or a program started anywhere."""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.core.errors import JobError
from tests.campaigns.fuzz_kinds import KINDS, Kind
from tests.campaigns.mutations import FORMS

MEMORY_BYTES = 512 << 20  # that reading a file may take
SECONDS = 10.0  # of one file; a child that says nothing for three times as long is killed
LONGEST_LINE = 2000
BROKEN = 99  # the exit code of a child that fails by itself
# What a reader never does, as the interpreter reports it; and how a file is opened that is to be written.
DEEDS = {
    "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.system", "os.exec", "os.posix_spawn",
    "os.fork", "os.truncate", "shutil.rmtree", "subprocess.Popen", "socket.connect", "ctypes.dlopen",
}  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Failure(NamedTuple):
    """What a damaged file led to. number: of the file, of its kind and seed."""

    kind: str
    seed: int
    number: int
    what: str

    def __str__(self) -> str:
        again = f"python -m tests.campaigns.fuzz --kind {self.kind} --seed {self.seed} --only {self.number}"
        return f"{self.kind}, seed {self.seed}, number {self.number}: {self.what}\n  again: {again}"


class Outcome(NamedTuple):
    """counts: of files by how reading them ended."""

    counts: Counter[str]
    failures: list[Failure]


class TooLong(BaseException):
    """A file that took more than SECONDS. Not an Exception, so that no reader takes it for damage."""


class Forbidden(BaseException):
    """A deed that no reader may do."""


def fuzz(name: str, numbers: Sequence[int], seed: int) -> Outcome:
    """Read the damaged files of some numbers of one kind."""
    kind, counts, failures = KINDS[name], Counter[str](), list[Failure]()
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole")
        whole.mkdir()
        kind.make(whole)
        left = list(numbers)
        while left:
            done = 0
            for number, end, what in _read_by_child(kind, name, whole, left, seed):
                done += 1
                counts[end] += 1
                if end == "failure":
                    failures.append(Failure(name, seed, number, what))
            left = left[done:]
    return Outcome(counts, failures)


def _read_by_child(
    kind: Kind, name: str, whole: Path, numbers: Sequence[int], seed: int
) -> Iterator[tuple[int, str, str]]:
    """The end of each file, in order, up to one that ends the child."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        code = 0
        try:
            os.close(ours)
            _be_child(kind, name, whole, numbers, seed, theirs)
        except BaseException:
            traceback.print_exc()
            code = BROKEN
        finally:
            os._exit(code)
    os.close(theirs)
    done, text = 0, b""
    killed = False
    try:
        while True:
            if not select.select([ours], [], [], 3 * SECONDS)[0]:
                killed = True
                os.kill(child, signal.SIGKILL)
            data = os.read(ours, 1 << 16)
            if not data:
                break
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                end, what = json.loads(line)
                yield numbers[done], end, what
                done += 1
    finally:
        os.close(ours)
        _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == BROKEN:
        raise AssertionError(f"the campaign itself fails at {name}, after {done} files: its trace is above")
    if done < len(numbers):
        how = f"hangs for {3 * SECONDS:g} s" if killed else f"the process ends ({os.waitstatus_to_exitcode(status)})"
        yield numbers[done], "failure", how


def _be_child(kind: Kind, name: str, whole: Path, numbers: Sequence[int], seed: int, pipe: int) -> None:
    sys.dont_write_bytecode = True
    work = whole.parent / "work"
    shutil.rmtree(work, ignore_errors=True)  # of a child that a file has ended
    shutil.copytree(whole, work)
    expected = kind.read(work)  # what is loaded once does not count
    shutil.rmtree(work)
    watch = _Watch(work if kind.may_write else None)
    sys.addaudithook(watch)
    signal.signal(signal.SIGALRM, _too_long)
    limit = _data_bytes() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    for number in numbers:
        shutil.copytree(whole, work, dirs_exist_ok=True)
        rng = np.random.default_rng([seed, zlib.crc32(name.encode()), number])
        damage(kind, work, rng)
        end, what = _end_of(kind, work, expected, watch)
        shutil.rmtree(work)
        os.write(pipe, json.dumps([end, what]).encode() + b"\n")


def damage(kind: Kind, work: Path, rng: np.random.Generator) -> None:
    """Damage one file of a folder."""
    paths = sorted(path for path in work.rglob("*") if path.is_file())
    choices = [(path, forms) for path in paths for pattern, forms in kind.files.items() if path.match(pattern)]
    path, forms = choices[int(rng.integers(len(choices)))]
    form = str(rng.choice(forms))
    path.write_bytes(FORMS[form](path.read_bytes(), rng))
    if kind.seal:
        kind.seal(work)


def _end_of(kind: Kind, work: Path, expected: Any, watch: _Watch) -> tuple[str, str]:
    """How reading a damaged folder ended, and what was wrong where it is a failure."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with watch:
            found = kind.read(work)
    except JobError as error:
        line = str(error)
        if "\n" in line or not line or len(line) > LONGEST_LINE:
            return "failure", f"not one line: {line[:300]!r}"
        return "refused", ""
    except TooLong:
        return "failure", f"takes more than {SECONDS:g} s"
    except Forbidden as error:
        return "failure", f"does {error}"
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-3:]
        where = " < ".join(f"{Path(entry.filename).name}:{entry.lineno}" for entry in reversed(frame))
        return "failure", f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({where})"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if kind.is_exact and found != expected:
        return "failure", "reads other content than was written"
    return "read", ""


def _too_long(number: int, frame: object) -> None:
    raise TooLong


class _Watch:
    """An audit hook that forbids deeds while a file is read. allowed: a folder in which files may be written."""

    def __init__(self, allowed: Path | None) -> None:
        self.active, self.allowed = False, allowed

    def __enter__(self) -> None:
        self.active = True

    def __exit__(self, *_: object) -> None:
        self.active = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event in DEEDS or (event == "open" and isinstance(args[2], int) and args[2] & WRITING):
            if self.allowed and isinstance(args[0], str) and Path(args[0]).is_relative_to(self.allowed):
                return
            self.active = False
            raise Forbidden(f"{event} {str(args[0])[:200]}")


def _data_bytes() -> int:
    """What RLIMIT_DATA counts of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmData")


def main(argv: list[str] | None = None) -> int:
    assert __doc__
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.fuzz", description=__doc__.split("\n\n")[0])
    parser.add_argument("--files", type=int, default=10_000, help="damaged files of each kind (default %(default)s)")
    parser.add_argument("--kind", choices=sorted(KINDS), help="this kind alone (default: all)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the damage (default: the clock's)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="the file of this number alone; it is kept")
    args = parser.parse_args(argv)
    names = [args.kind] if args.kind else list(KINDS)
    if args.only is not None:
        return _repeat(names, args.only, args.seed)
    print(f"seed {args.seed}", flush=True)
    failures = []
    for name in names:
        began = time.monotonic()
        outcome = fuzz(name, range(args.files), args.seed)
        counts = ", ".join(f"{count} {end}" for end, count in sorted(outcome.counts.items()))
        print(f"{name}: {counts} in {time.monotonic() - began:.0f} s", flush=True)
        for failure in outcome.failures:
            print(failure, flush=True)
        failures += outcome.failures
    print(f"{len(failures)} failures")
    return 1 if failures else 0


def _repeat(names: Sequence[str], number: int, seed: int) -> int:
    """Read one damaged file of each kind in this process, with the whole trace; it stays where it is."""
    for name in names:
        whole = Path(tempfile.mkdtemp(), name)
        whole.mkdir()
        KINDS[name].make(whole)
        damage(KINDS[name], whole, np.random.default_rng([seed, zlib.crc32(name.encode()), number]))
        print(f"{whole} is read", flush=True)
        print(KINDS[name].read(whole))
    return 0


if __name__ == "__main__":
    sys.exit(main())
