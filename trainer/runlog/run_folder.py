"""The folder of a run: what may be in it, and whether a start there is a new run, goes on, or finds all done.

config.json says whose folder it is: it is written before anything else, and removed first."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import sha256
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.json_values import build, parse_object
from pipeline.core.shardset.versions import unstamped
from pipeline.core.storage.uri import is_remote
from trainer.checkpoints.generations import GENERATIONS
from trainer.config import Config
from trainer.home import segments
from trainer.home.lease import leased
from trainer.home.place import Place, is_file, listing, remove_empty, resolve_home, write_whole
from trainer.run_files import (
    BEST,
    BEST_OF,
    CHECKPOINTS,
    CONFIG,
    FOLLOWED,
    LEASE,
    LOCK,
    LOGS,
    METRICS,
    MODEL,
    PUSHES,
    REPORT,
    RESULT,
    SEGMENTS,
    TENSORBOARD,
)

if TYPE_CHECKING:
    from trainer.data.shards import Shards  # loading it takes a second, which --help should not

_FILE = "(" + "|".join(map(re.escape, (CONFIG, RESULT, METRICS, PUSHES, REPORT, MODEL, BEST, BEST_OF))) + ")"
_DRAFT = rf"\.?{_FILE}(\.[0-9a-f]{{8}})?\.tmp"
_GENERATIONS = rf"({re.escape(GENERATIONS)}|\.{re.escape(GENERATIONS)}\.[0-9a-f]{{8}}\.tmp)"
_LOG = rf"{LOGS}/[\w.-]+\.(log|tmp)"
_HELD = rf"{re.escape(LOCK)}|{re.escape(LEASE)}/[\w.-]+"
# All that a run writes; --overwrite deletes nothing else.
OWNED = re.compile(
    rf"{_FILE}|{_DRAFT}|{_LOG}|{_HELD}|{CHECKPOINTS}/(\d{{8,}}|\.void)/[\w.-]+"
    rf"|{FOLLOWED}/(worker-\d+-\d+\.json|\.[\w.-]+\.tmp)"
    rf"|{CHECKPOINTS}/{_GENERATIONS}|{TENSORBOARD}/\.?events\.out\.tfevents\.[\w.-]+"
    rf"|{segments.NAMES.pattern}|{SEGMENTS}/\.[\w.-]+\.tmp"
)
# What a start leaves that failed before its first update, or another host's that came first: nothing to lose.
EARLY = re.compile(
    rf"{re.escape(CONFIG)}|{_DRAFT}|{_LOG}|{_HELD}|{CHECKPOINTS}/0{{8}}/[\w.-]+|{SEGMENTS}/(\d+\.(begun|settled)|host-.*)"
)


class Start(Enum):
    """What a start in a folder amounts to."""

    NEW = "new"
    GO_ON = "go on"
    FINISHED = "finished"


@dataclass(frozen=True)
class RunRecord:
    """What config.json holds: the configuration, of the shards their numbers and a digest of their content, of a run in
    virtual time what stands for its machines, and of one on a cluster the threads of each worker (0 elsewhere)."""

    config: Config
    num_workers: int
    rows: int
    shards: str
    simulated: dict[str, Any] | None = None
    threads: int = 0

    @classmethod
    def of(cls, config: Config, shards: Shards) -> RunRecord:
        return cls(config, shards.num_workers, shards.rows, digest(shards))

    @property
    def steps(self) -> int:
        """Mini-batches each worker runs in all."""
        return self.config.steps_per_worker(self.rows)

    def essentials(self) -> dict[str, Any]:
        """What a run cannot change on its way, by name; the shards first, because they decide on the workers."""
        about = {"worker count": self.num_workers, "shard digest": self.shards}
        virtual = {"virtual machines": self.simulated} if self.simulated is not None else {}
        return about | virtual | self.config.essentials()

    def to_json(self) -> dict[str, Any]:
        about = {"num_workers": self.num_workers, "rows": self.rows, "digest": self.shards}
        virtual = {"simulated": self.simulated} if self.simulated is not None else {}
        threads = {"threads": self.threads} if self.threads else {}
        return {"config": self.config.to_json(), "shards": about} | virtual | threads

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunRecord:
        """Raises KeyError, TypeError, ValueError or UsageError for what is not a run of this version."""
        about = values["shards"]
        config = Config.from_json(values["config"])
        return build(
            cls,
            {
                "config": config,
                "num_workers": about["num_workers"],
                "rows": about["rows"],
                "shards": about["digest"],
                "simulated": values.get("simulated"),
                "threads": values.get("threads", 0),
            },
        )


def digest(shards: Shards) -> str:
    """Of every row that is trained or evaluated on, and of which worker has it: equal for a set that was moved, and for one
    that was made again."""
    files = [*shards.files(), *shards.eval_files()]
    return sha256("\n".join(f"{unstamped(file.path)} {file.sha256}" for file in files).encode()).hexdigest()[:16]


def resolve_output(output: str) -> Path:
    """The folder of a virtual run or a study, as an absolute path. Raises UsageError for one that is not local."""
    home = resolve_home(output)
    if is_remote(home):
        raise UsageError(
            f"--output {output} must be a folder of this machine: virtual runs and studies are written there"
        )
    return Path(home)


@contextmanager
def locked(output: Place, lost: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Two runs in one folder would mix their checkpoints. On a local disk the lock goes with the process, however it ends;
    elsewhere it is a lease, and ``lost`` is called, by a thread, if another start takes it over from a process that was
    frozen.

    Raises JobError while another process holds it, OSError where the folder cannot be written."""
    if not isinstance(output, Path):
        with leased(output, lost):
            yield
        return
    output.mkdir(parents=True, exist_ok=True)
    with open(output / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(
                f"{output} is in use by a run that has not ended; wait for it, or choose another --output"
            ) from None
        yield


def unchecked(record: RunRecord) -> RunRecord:
    return record


@contextmanager
def settled(
    output: Place,
    requested: RunRecord,
    *,
    resume: bool,
    overwrite: bool,
    check: Callable[[RunRecord], RunRecord] = unchecked,
    lost: Callable[[], object] = lambda: None,
) -> Iterator[Start]:
    """Decide what a start in a folder amounts to, make the folder ready for it, and keep others out while it runs.

    check: raises UsageError or DataError for a start that has something to do and cannot; it is asked before anything in
    the folder is changed, and then nothing is. It gets what was requested, with the threads that a run which goes on had,
    and returns what is recorded. lost: see ``locked``. Needs no torch: the roles may run elsewhere.

    Raises UsageError where it would mix or lose what is there, DataError where config.json is damaged, JobError while
    another run is there, OSError where the folder cannot be reached."""
    if is_file(output):
        raise UsageError(f"--output {output} is not a folder; choose another")
    if overwrite or not (output / CONFIG).exists():
        _refuse_foreign(output, listing(output))
    with _without_trace(output), locked(output, lost):
        names = listing(output)
        is_new = overwrite or all(EARLY.fullmatch(name) for name in names)
        start, saved = Start.NEW, None if is_new else _saved(output)
        if not is_new:
            start = decide(output, saved, requested, is_finished=_is_finished(output), resume=resume)
        if start is not Start.FINISHED:
            record = check(replace(requested, threads=saved.threads) if saved else requested)
            if is_new:
                _delete(output, names if overwrite else [name for name in names if not name.startswith("logs/")])
                if not isinstance(output, Path):
                    segments.void(output)
            elif not isinstance(output, Path):
                _delete(output, [name for name in names if re.fullmatch(_DRAFT, name)])  # a local write removes those
            (output / RESULT).unlink(missing_ok=True)  # first: a longer run that is killed now is not a finished one
            write_whole(output / CONFIG, (json.dumps(record.to_json(), indent=1) + "\n").encode())
        yield start


@contextmanager
def _without_trace(output: Place) -> Iterator[None]:
    """A start that is refused before it has written its configuration leaves a folder as it was, absent or empty."""
    missing = [folder for folder in _with_parents(output) if not folder.exists()]
    try:
        yield
    except (UsageError, DataError):
        left = listing(output)
        if all(re.fullmatch(_HELD, name) for name in left):
            _delete(output, left, held=True)
        for folder in missing:
            remove_empty(folder)  # nothing where others have put something into it
        raise


def _with_parents(folder: Place) -> Iterator[Place]:
    """Innermost first; the parents of one in a store are its own business."""
    yield folder
    yield from folder.parents if isinstance(folder, Path) else ()


def decide(output: Place, saved: RunRecord | None, requested: RunRecord, *, is_finished: bool, resume: bool) -> Start:
    """What a start without --overwrite amounts to in a folder that holds results; saved: whose they are, None if
    nothing tells. Raises UsageError. Pure."""
    if saved is None:
        raise UsageError(f"{output} holds a run without its {CONFIG}; choose another --output, or --overwrite")
    _refuse_other(output, saved, requested, resume)
    if not is_finished and not resume:
        raise UsageError(f"{output} holds a run that has not ended; --resume goes on with it, --overwrite starts anew")
    if not is_finished:
        return Start.GO_ON
    if requested.steps < saved.steps:
        raise UsageError(
            f"{output} holds a finished run of {saved.steps} steps a worker, more than the {requested.steps} asked for;"
            f" choose another --output, or --overwrite"
        )
    if requested.steps > saved.steps and not resume:
        raise UsageError(
            f"{output} holds a finished run of {saved.steps} steps a worker; --resume goes on to the {requested.steps}"
            f" asked for, --overwrite starts anew"
        )
    return Start.GO_ON if requested.steps > saved.steps else Start.FINISHED


def _refuse_other(output: Place, saved: RunRecord, requested: RunRecord, resume: bool) -> None:
    before, now = saved.essentials(), requested.essentials()
    for name in now | before:
        if before.get(name) != now.get(name):
            other = f"{name} {before.get(name)}, not {now.get(name)}"
            what = "--resume cannot change it: " if resume else ""
            raise UsageError(f"{output} holds a run with {other}; {what}choose another --output, or --overwrite")


def _refuse_foreign(output: Place, names: list[str]) -> None:
    """Raises UsageError if there is a file that no run writes: the folder is somebody else's."""
    foreign = [name for name in names if not OWNED.fullmatch(name)]
    if foreign:
        raise UsageError(f"{output} holds {foreign[0]}, which no run wrote; choose a folder of its own for --output")


def _delete(output: Place, names: list[str], *, held: bool = False) -> None:
    """Remove the named files and the folders that are left empty; what holds the folder, and the numbers of
    starts, stay, unless ``held``."""
    for name in sorted(names, key=lambda name: name != CONFIG):
        if held or not (re.fullmatch(_HELD, name) or segments.MARKS.fullmatch(name)):
            (output / name).unlink(missing_ok=True)
    folders = {str(folder) for name in names for folder in PurePath(name).parents} - {"."}
    for folder in sorted(folders, reverse=True):
        remove_empty(output / folder)


def read_record(output: Place) -> RunRecord:
    """Return the record of the run in a folder. Raises OSError, and as ``from_json`` where it is damaged."""
    return RunRecord.from_json(parse_object((output / CONFIG).read_bytes()))


def _saved(output: Place) -> RunRecord | None:
    try:
        return read_record(output)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, UsageError):
        raise DataError(
            f"{output / CONFIG} is damaged, or of another version; choose another --output, or --overwrite"
        ) from None


def saved_generation(output: Place) -> int | None:
    """Of a set that grows, the generation with which the run in a folder began; None where there is no such run. Raises
    DataError where its configuration is damaged."""
    saved = _saved(output)
    return saved.config.data.generation if saved else None


def _is_finished(output: Place) -> bool:
    try:
        return bool(parse_object((output / RESULT).read_bytes())["cause"] == "finished")
    except (OSError, ValueError, KeyError):
        return False
