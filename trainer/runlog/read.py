"""The reader of a run's log, which skips the events and pushes that a roll-back made void."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import DataError
from pipeline.core.json_values import parse
from trainer.checkpoints.generations import Generations
from trainer.checkpoints.state import rank
from trainer.home.place import Place, blocks, line_blocks
from trainer.run_files import METRICS
from trainer.runlog.events import COLUMNS
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.evaluation import EvaluationEvent
from trainer.runlog.kinds.parse import event_from_json
from trainer.runlog.kinds.run import EarlyStopEvent, GenerationEvent, StageEvent
from trainer.runlog.kinds.training import PassEvent

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    import pandas as pd

NAMES = COLUMNS.split(",")
OPTIONAL = ("loss", "step_s", "read_s")  # a row may lack them: NaN
INTEGERS = [name for name in NAMES if name not in (*OPTIONAL, "seconds")]
FEWEST_ROWS = 1 << 12  # rows for which memory is allocated at least
ROWS_AT_ONCE = 1 << 20
# Sound integers are below these limits. Generations are microseconds since 1970: 16 digits until the year 2286. Longer
# numbers have the digits of a cut-off row before them, and such a newest generation would make all later pushes void.
LIMITS = dict.fromkeys(INTEGERS, 1 << 31) | {"generation": 10**16}
FLOATS = dict.fromkeys((*OPTIONAL, "seconds"), "float64")
PLAIN = dict.fromkeys(INTEGERS, "int64") | FLOATS
# The types of columns that are requested by name: 10^7 rows of eight columns are 0.3 GB.
SMALL = PLAIN | dict.fromkeys(INTEGERS, "int32") | {"generation": "int64", "accepted": "int8", "loss": "float32"}


def iter_events(path: Place) -> Iterator[LogEvent]:
    """Yield all events of metrics.jsonl in file order, void ones included. An absent file has none.

    Skips lines that a full disk or a kill cut off, without losing an event that follows on the same line, and lines
    whose values have wrong types. Holds one piece of the file in memory at a time."""
    try:
        for block in line_blocks(blocks(path)):
            yield from events_in(block)
    except FileNotFoundError:
        return


def events_in(block: bytes) -> Iterator[LogEvent]:
    """Yield the events of some lines. Lines without a valid event are skipped."""
    for line in block.split(b"\n"):
        if (event := parse_event(line.decode(errors="replace"))) is not None:
            yield event


def read_events(path: Place) -> list[LogEvent]:
    """Return the events of ``iter_events`` as a list."""
    return list(iter_events(path))


class Surviving:
    """The events that count: a roll-back or restart at a version makes all events of later versions so far void.

    An event that names its generation may be logged late; it is also void if a later generation began before its
    version. Passes that a refused gradient ended after the checkpoint, at its version, end again, and count once. A run
    that ends early with a checkpoint does not enter the stage that began with it."""

    def __init__(self) -> None:
        self.events: list[LogEvent] = []
        self._generations = Generations()
        self._passes = 0  # number of the last one that has ended

    def add(self, event: LogEvent) -> None:
        """Add the next event of the log, and drop the events that it makes void."""
        back_to = event.resumes_from()
        if back_to is not None:
            self.events = [earlier for earlier in self.events if earlier.version_or_zero() <= back_to]
        if isinstance(event, EarlyStopEvent):
            self.events = [earlier for earlier in self.events if not _begins_at(earlier, event.version)]
        if isinstance(event, PassEvent):
            # True only after a roll-back, so that this scan of all events is rare.
            if event.first <= self._passes:
                self.events = [earlier for earlier in self.events if not _repeats(event, earlier)]
            self._passes = event.last
        if isinstance(event, GenerationEvent):
            self._generations = self._generations.begin(event.generation, event.version)
        else:
            generation = self._generations.latest if event.generation is None else event.generation
            if not self._generations.includes(generation, event.version_or_zero()):
                return
        self.events.append(event)


def _begins_at(event: LogEvent, version: int) -> bool:
    """Return whether an event is the begin of a stage with the checkpoint of a version."""
    return isinstance(event, StageEvent) and event.version == version


def _repeats(event: PassEvent, earlier: LogEvent) -> bool:
    return isinstance(earlier, PassEvent) and earlier.last >= event.first


def surviving_events(events: Iterable[LogEvent]) -> list[LogEvent]:
    """Return the events that no later roll-back or restart has made void (see ``Surviving``)."""
    filter_ = Surviving()
    for event in events:
        filter_.add(event)
    return filter_.events


def evaluations(events: Iterable[LogEvent]) -> list[EvaluationEvent]:
    """Return the evaluations that count, sorted by version."""
    return evaluations_of(surviving_events(events))


def evaluations_of(live: Iterable[LogEvent]) -> list[EvaluationEvent]:
    """Return the evaluations among events that count, sorted by version."""
    return sorted((event for event in live if isinstance(event, EvaluationEvent)), key=lambda event: event.version)


def best(evaluated: Iterable[EvaluationEvent]) -> EvaluationEvent | None:
    """Return the best evaluation by ``rank``, the first one of equals; None without evaluations."""
    return max(evaluated, key=lambda event: rank(event.accuracy, event.loss), default=None)


def read_pushes(path: Place, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Return the pushes that count, one per row.

    A generation that began at version v makes the rows of earlier generations beyond v void, and refused ones at v that
    it repeats. Skips rows that a crash or a full disk damaged and warns about their number on stderr; a cut-off last line
    is not counted. Columns are found by the file's header, in any order; columns unknown to this version are ignored, and
    those in ``OPTIONAL`` may be missing. About 1.5 s for a million rows.

    Args:
        path: pushes.csv; metrics.jsonl beside it has the starts of generations. An absent file has no rows.
        columns: the columns to return, in small types (default: all, integers as int64).
    Raises:
        DataError: a column is missing.
        OSError: the file cannot be read.
    """
    import pandas as pd  # takes half a second, which the processes of a run save

    names, types = (NAMES, PLAIN) if columns is None else (list(columns), SMALL)
    needed = ("generation", "version", "accepted", "worker", "clock")
    parts = _Parts(path, {name: types[name] for name in (*names, *needed)})
    try:
        num_damaged = parts.read()
    except FileNotFoundError:
        num_damaged = 0
    if num_damaged and (str(path), num_damaged) not in _warned_of:
        _warned_of.add((str(path), num_damaged))
        rows = "1 damaged row is" if num_damaged == 1 else f"{num_damaged:,} damaged rows are"
        logger.warning(f"{path}: {rows} left out of its {parts.rows + num_damaged:,}")
    counts = parts.surviving(logged_generations(path.parent / METRICS))
    arrays = {name: parts.take(name)[counts] for name in names}
    return pd.DataFrame(arrays, columns=names, copy=False)


_warned_of: set[tuple[str, int]] = set()  # (file, damaged rows) of which this process has warned


def logged_generations(path: Place) -> Generations:
    """Return the generations that are logged in metrics.jsonl; none for an absent file."""
    result = Generations()
    mark = b'"event": "generation"'
    try:
        for block in line_blocks(blocks(path)):
            for line in block.split(b"\n") if mark in block else ():
                event = parse_event(line.decode(errors="replace")) if mark in line else None
                if isinstance(event, GenerationEvent):
                    result = result.begin(event.generation, event.version)
    except FileNotFoundError:
        pass
    return result


class _Parts:
    """Columns of pushes.csv, read block by block. path: the file; types: numpy types by column; rows: rows read so far."""

    def __init__(self, path: Place, types: dict[str, str]) -> None:
        self.path = path
        self.rows = 0
        self._columns: dict[str, npt.NDArray[Any]] = {name: np.empty(0, kind) for name, kind in types.items()}
        self._columns["generation"] = np.empty(0, np.int32)  # codes of generations
        self._codes: dict[int, int] = {}  # a code per generation: 0, 1, ... in the order of their appearance

    def read(self) -> int:
        """Read the file and return the number of its damaged rows. Raises DataError, FileNotFoundError and OSError."""
        header = ""
        num_damaged = 0
        for block in line_blocks(blocks(self.path)):
            if not header:
                first, _, rest = block.partition(b"\n")
                header = _header(first.decode(errors="replace"), self.path)
                block = block if _is_row(first) else rest
            if not block.strip():
                continue
            empty = sum(not line for line in block.split(b"\n")) - 1 if b"\n\n" in block else 0
            lines = block.count(b"\n") - empty
            num_kept = self._add(header, block)
            num_damaged += lines - num_kept if block.endswith(b"\n") else 0  # a cut-off last line is not counted
        return num_damaged

    def _add(self, header: str, block: bytes) -> int:
        """Parse a block of rows, append the sound ones to the columns, and return their number. Raises DataError.

        A row is sound if it has as many fields as ``header`` has names, its integers are in range and not negative, and
        its seconds are finite.

        block: whole lines, the last one of the file perhaps cut off."""
        import pandas as pd

        # A row of zeros goes before each block, because pandas skips rows longer than the first, which may be damaged.
        zeros = ",".join("0" for _ in header.split(","))
        source = BytesIO(f"{header}\n{zeros}\n".encode() + block)
        reading: dict[str, Any] = {"index_col": False, "on_bad_lines": "skip", "quoting": csv.QUOTE_NONE}
        try:
            frame = pd.read_csv(source, **reading, encoding_errors="replace", low_memory=False).iloc[1:]
        except (ValueError, OverflowError) as error:
            raise DataError(f"{self.path} cannot be read: {' '.join(str(error).split())[:200]}; restore it") from None
        frame = frame[[name for name in NAMES if name in frame.columns]]
        # A column without damage has numbers already.
        others = [name for name in frame.columns if frame[name].dtype.kind not in "iuf"]
        if others:
            frame = frame.assign(**{name: pd.to_numeric(frame[name], errors="coerce") for name in others})
        frame = frame.dropna(subset=[*INTEGERS, "seconds"])
        sound = np.isfinite(frame["seconds"].to_numpy(np.float64))
        for name in INTEGERS:
            column = frame[name].to_numpy()
            sound &= (column >= 0) & (column < LIMITS[name])
            if column.dtype.kind == "f":
                with np.errstate(invalid="ignore"):  # infinity % 1
                    sound &= column % 1 == 0
        frame = frame[sound]
        for name, stored in self._columns.items():
            if self.rows + len(frame) > len(stored):
                # Large arrays that grow by a quarter: memory of many small ones would not be returned to the system.
                grown = np.empty(max(FEWEST_ROWS, (self.rows + len(frame)) * 5 // 4), stored.dtype)
                grown[: self.rows] = stored[: self.rows]
                self._columns[name] = stored = grown
            values: Any = np.nan
            if name in frame.columns:
                values = frame[name].to_numpy()
            stored[self.rows : self.rows + len(frame)] = self._coded(values) if name == "generation" else values
        self.rows += len(frame)
        return len(frame)

    def _coded(self, generations: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Return the codes of generations, both [rows]. Codes take half the memory."""
        distinct, places = np.unique(generations.astype(np.int64), return_inverse=True)
        codes = [self._codes.setdefault(generation, len(self._codes)) for generation in distinct.tolist()]
        return np.array(codes, np.int32)[places.reshape(-1)]

    def take(self, name: str) -> npt.NDArray[Any]:
        """Return a column [rows]."""
        values = self._columns[name][: self.rows]
        return np.array(list(self._codes), np.int64)[values] if name == "generation" else values

    def surviving(self, generations: Generations) -> npt.NDArray[np.bool_] | slice:
        """Return a mask of the rows that count [rows], or a slice of all or none.

        generations: the generations in the log. If a full disk kept one out of the log, it is assumed to have begun one
        version before its first accepted push."""
        if not self.rows:
            return slice(0)
        codes = self._columns["generation"][: self.rows]
        versions = self.take("version")
        accepted = self.take("accepted") == 1
        numbers = np.array(list(self._codes), np.int64)
        first = np.full(len(numbers), np.iinfo(np.int32).max, np.int32)
        for rows in _slices(self.rows):
            is_used = accepted[rows]
            np.minimum.at(first, codes[rows][is_used], versions[rows][is_used])
        begins = {int(number): int(version) - 1 for number, version in zip(numbers, first, strict=True)}
        for number, version in generations.begun:
            begins[number] = min(version, begins.get(number, version))
        # The last version of a generation that counts is the smallest version at which a later one began.
        last: dict[int, int] = {}
        limit = np.iinfo(np.int32).max
        for number in sorted(begins, reverse=True):
            last[number] = limit
            limit = min(limit, begins[number])
        limits = np.array([last[number] for number in numbers.tolist()], np.int64)
        counts = np.empty(self.rows, np.bool_)
        ambiguous = []
        for rows in _slices(self.rows):
            end = limits[codes[rows]]
            counts[rows] = versions[rows] <= end
            ambiguous.append(rows.start + np.flatnonzero(~accepted[rows] & (versions[rows] == end)))
        # A gradient that was refused after the checkpoint has its version too, and is computed again.
        if len(refused := np.concatenate(ambiguous)):
            counts[refused[self._are_repeated(refused, numbers[codes])]] = False
        return slice(None) if counts.all() else counts

    def _are_repeated(self, rows: npt.NDArray[np.int64], generations: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return for each row whether a later generation has one of the same worker and clock.

        rows: places of rows. generations: of all rows."""
        workers, clocks = self.take("worker"), self.take("clock")
        # Few rows are in doubt, so only those of their workers and clocks are looked at one by one.
        keys = {(int(workers[row]), int(clocks[row])) for row in rows}
        latest = dict.fromkeys(keys, -1)
        later = np.flatnonzero(np.isin(workers, workers[rows]) & np.isin(clocks, clocks[rows]))
        for row in later:
            key = int(workers[row]), int(clocks[row])
            if key in latest:
                latest[key] = max(latest[key], int(generations[row]))
        return np.array([latest[int(workers[row]), int(clocks[row])] > generations[row] for row in rows])


def _slices(rows: int) -> Iterator[slice]:
    """Yield slices of the rows that are small enough for temporary arrays."""
    return (slice(first, first + ROWS_AT_ONCE) for first in range(0, rows, ROWS_AT_ONCE))


def _is_row(line: bytes) -> bool:
    """Return whether the first line is a row, because a full disk kept the header out of the file."""
    return line[:1].isdigit()


def _header(line: str, path: Place) -> str:
    """Return the names of the columns, comma-separated. Raises DataError if a necessary one is missing.

    If a full disk kept the header out of the file, or cut it off, the usual columns are assumed."""
    names = [name.strip() for name in line.strip().split(",")]
    if _is_row(line.encode()) or COLUMNS.startswith(line.strip()) or any(name[:1].isdigit() for name in names):
        return COLUMNS  # the header is missing or cut off, perhaps with a row behind it
    missing = next((name for name in (*INTEGERS, "seconds") if name not in names), None)
    if missing:
        raise DataError(f"{path} has no column {missing}: it is damaged, or was written by another program; restore it")
    return ",".join(names)


def parse_event(line: str) -> LogEvent | None:
    """Return the event of a line, or None if the line has no valid event.

    If a line was cut off and an event was appended to it, the appended event is returned."""
    for text in (line, line[max(line.rfind('{"event"'), 0) :]):
        try:
            # NaN and infinities become None, as in log_event.
            return event_from_json(parse(text, constant=lambda name: None))
        except ValueError:
            continue
    return None
