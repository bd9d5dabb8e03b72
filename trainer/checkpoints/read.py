"""Reading of checkpoints: complete versions, sound versions (complete and undamaged), their states and slices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.storage.files import FileInfo
from trainer.checkpoints.generations import GENERATIONS, Generations, read_generations
from trainer.checkpoints.slice_file import Float32s, StoredSlice, broken, header_of, numbers_in, slots_in
from trainer.checkpoints.state import EVALUATED, STATE, EvaluationMark, RunState, folder_of, slice_name
from trainer.home.place import Place, entries, remembered

Listed = Mapping[str, FileInfo]
_content = remembered(lambda place, size: place.read_bytes())


def read_state(root: Place, version: int) -> RunState:
    """Read the state of a version. Raises DataError with the file if it is missing, broken or of another version."""
    return _state(root, version, listed(folder_of(root, version)))


def _state(root: Place, version: int, names: Listed) -> RunState:
    """Read the state of a version, like ``read_state``, from a folder that is listed already. names: its entries."""
    place = folder_of(root, version) / STATE
    try:
        state = RunState.from_bytes(_content(place, _entry(place, names)))
    except FileNotFoundError:
        raise DataError(f"{place} is missing: the checkpoint was never finished") from None
    except ValueError:
        raise broken(place, "is not the state of a checkpoint") from None
    if state.version != version:
        raise broken(place, f"is of version {state.version}, not {version}")
    return state


def read_slice(place: Place, version: int, generation: int, names: Listed) -> StoredSlice:
    """Open a slice and check everything but its elements. O(1) in its size. Raises DataError with the file.

    Args:
        place: the file.
        version, generation: those that its header must have.
        names: the entries of its folder.
    """
    try:
        header = header_of(place, _entry(place, names))
        numbers = numbers_in(header)
        slots = slots_in(header)
        length, states = (header.arrays[name][1] for name in ("values", "momentum"))
    except FileNotFoundError:
        raise DataError(f"{place} is missing: the checkpoint was never finished") from None
    except (ValueError, KeyError, TypeError) as error:
        raise broken(place, f"is torn or no slice of a checkpoint ({error})") from None
    # A renamed slice of another checkpoint is intact, but would mix parameters of two versions.
    for name, required in (("version", version), ("generation", generation)):
        if numbers[name] != required:
            raise broken(place, f"is of {name} {numbers[name]}, not {required}")
    if length != numbers["end"] - numbers["begin"]:
        raise broken(place, f"holds {length} values, not {numbers['end'] - numbers['begin']}")
    return StoredSlice(place, numbers["begin"], numbers["end"], numbers["total"], states // slots, header, slots)


def read_slices(root: Place, version: int) -> tuple[RunState, list[StoredSlice]]:
    """Open the state and all slices of a checkpoint, and check that they fit together. O(servers). Raises DataError."""
    names = listed(folder_of(root, version))
    state = _state(root, version, names)
    return state, _slices(root, state, names)


def slices_of(root: Place, state: RunState) -> list[StoredSlice]:
    """Open the slices of the checkpoint with a given state. Raises DataError."""
    return _slices(root, state, listed(folder_of(root, state.version)))


def _slices(root: Place, state: RunState, names: Listed) -> list[StoredSlice]:
    """Open the slices of a checkpoint; check that together they cover the flat vector once. Raises DataError.

    names: the entries of its folder."""
    folder = folder_of(root, state.version)
    slices = [read_slice(folder / name, state.version, state.generation, names) for name in _slice_names(state)]
    at = 0
    for part in slices:
        parameters = min(max(state.num_parameters - part.begin, 0), part.end - part.begin)
        if (part.begin, part.total, part.num_parameters) != (at, state.total, parameters):
            raise broken(part.place, f"does not fit {STATE} and its neighbours")
        at = part.end
    if at != state.total:
        raise broken(slices[-1].place, f"ends at {at}, not at {state.total}")
    return slices


def read_slice_range(root: Place, version: int, begin: int, end: int) -> tuple[Float32s, Float32s]:
    """Read values [end-begin] of the flat vector, and the momentum of the parameters among them (see ParameterSlice).

    Any number of servers may have written the checkpoint. Only the range is read. Raises DataError, and ValueError for
    a range outside the vector."""
    state, slices = read_slices(root, version)
    if not 0 <= begin <= end <= state.total:
        raise ValueError(f"[{begin}, {end}) is no range of {state.total} elements")
    values = np.concatenate([part.values(begin, end) for part in slices])
    return values, np.concatenate([part.momentum(begin, end) for part in slices])


def read_vector(root: Place, version: int) -> Float32s:
    """Read all values of a checkpoint, float32 [P+Q]: parameters, then BatchNorm's statistics. Raises DataError."""
    return vector_of(root, read_state(root, version))


def vector_of(root: Place, state: RunState) -> Float32s:
    """Read all values of the checkpoint with a given state. Raises DataError if another generation has replaced it."""
    return np.concatenate([part.values(0, part.total) for part in slices_of(root, state)])


def listed(folder: Place) -> Listed:
    """Return the entries of a folder by name. Costs one listing."""
    return {entry.name: entry for entry in entries(folder)}


def _entry(place: Place, names: Listed) -> FileInfo:
    """Return the entry of a file in its folder. Raises FileNotFoundError."""
    if place.name not in names:
        raise FileNotFoundError(place)
    return names[place.name]


def versions(root: Place) -> list[int]:
    """Return all versions with a folder, complete or not, in ascending order."""
    return _versions(listed(root))


def _versions(names: Listed) -> list[int]:
    return sorted(int(name) for name in names if re.fullmatch(r"\d{8,}", name))


def whole(root: Place) -> list[int]:
    """Return the complete versions in ascending order. The content of slices is not checked."""
    return [state.version for state in whole_states(root)]


def whole_states(root: Place) -> list[RunState]:
    """Return the states of the complete versions in ascending order. Raises OSError if the folder cannot be read.

    On a remote store it costs a listing, one more per checkpoint, and a read per new state."""
    return [state for state, _ in states_and_names(root)]


def states_and_names(root: Place) -> list[tuple[RunState, Listed]]:
    """Return the states of the complete versions in ascending order, each with the entries of its folder by name.

    Checkpoints that a roll-back made void, or whose state is damaged, are left out. Raises OSError if the folder cannot
    be read. On a remote store it costs a listing, one more per checkpoint, and a read per new state."""
    names = listed(root)
    result = []
    generations = _generations(root, names)
    for version in _versions(names):
        inside = listed(folder_of(root, version))
        if state := _whole_state(root, version, generations, inside):
            result.append((state, inside))
    return result


def newest(root: Place, *, verify: bool = False, warn: Callable[[str], None] | None = None) -> int | None:
    """Return the newest complete version, or None if there is none. See ``newest_state`` for the arguments."""
    state = newest_state(root, verify=verify, warn=warn)
    return None if state is None else state.version


def newest_state(root: Place, *, verify: bool = False, warn: Callable[[str], None] | None = None) -> RunState | None:
    """Return the state of the newest complete version, or None if there is none.

    verify: skip versions whose slices are damaged; warn: called with the text of each error on the way."""
    names = listed(root)
    generations = _generations(root, names)
    for version in reversed(_versions(names)):
        try:
            inside = listed(folder_of(root, version))
            state = _finished_state(root, version, generations, inside)
            if state and (not verify or _slices(root, state, inside)):
                return state
        except DataError as error:
            if warn:
                warn(str(error))
    return None


def is_whole(root: Place, state: RunState) -> bool:
    """Return whether the checkpoint with a given state is still there, complete and not void."""
    names = listed(folder_of(root, state.version))
    return _whole_state(root, state.version, read_generations(root), names) == state


def marked_states(root: Place) -> list[tuple[RunState, EvaluationMark | None]]:
    """Return the states of complete checkpoints with their evaluations. Costs as ``whole_states``."""
    return [(state, evaluation_of(root, state, names)) for state, names in states_and_names(root)]


def whole_state(root: Place, version: int, generations: Generations) -> RunState | None:
    """Return the state of a version if its checkpoint is complete and not void by the generations, else None."""
    return _whole_state(root, version, generations, listed(folder_of(root, version)))


def unevaluated(root: Place) -> list[RunState]:
    """Return the complete checkpoints that wait for the evaluator, oldest first: ends of epochs and of the run."""
    return waiting_of(marked_states(root))


def waiting_of(states_with_marks: Iterable[tuple[RunState, EvaluationMark | None]]) -> list[RunState]:
    """Return the states that wait for the evaluator.

    states_with_marks: states with their evaluations, None for those without."""
    return [state for state, mark in states_with_marks if state.is_for_evaluation and not mark]


def evaluation_of(root: Place, state: RunState, names: Listed | None = None) -> EvaluationMark | None:
    """Return the evaluation of the checkpoint with a given state, or None. names: entries of its folder, if known."""
    folder = folder_of(root, state.version)
    try:
        evaluation = EvaluationMark.from_bytes(_content(folder / EVALUATED, (names or listed(folder))[EVALUATED]))
    except (FileNotFoundError, KeyError, ValueError):
        return None
    return evaluation if evaluation.is_of(state) else None


def _generations(root: Place, names: Listed) -> Generations:
    return read_generations(root) if GENERATIONS in names else Generations()


def _whole_state(root: Place, version: int, generations: Generations, names: Listed) -> RunState | None:
    try:
        return _finished_state(root, version, generations, names)
    except DataError:
        return None


def _finished_state(root: Place, version: int, generations: Generations, names: Listed) -> RunState | None:
    """Return the state of a complete checkpoint that is not void, else None. Raises DataError for a broken state.

    generations: the generations of the run, by which a checkpoint is void; names: the entries of the checkpoint's
    folder."""
    if STATE not in names:
        return None
    state = _state(root, version, names)
    if not generations.includes(state.generation, version):
        return None
    has_parts = all(name in names and names[name].bytes == size for name, size in state.parts.items())
    return state if has_parts and all(name in names for name in _slice_names(state)) else None


def is_sound(root: Place, state: RunState, names: Listed) -> bool:
    """Return whether the slices of a checkpoint are undamaged. names: entries of its folder."""
    try:
        return bool(_slices(root, state, names))
    except DataError:
        return False


def _slice_names(state: RunState) -> Iterator[str]:
    """Yield the names of the slices, lazily, because a damaged state may have a huge number of servers."""
    return (slice_name(index, state.num_servers, state.generation) for index in range(state.num_servers))
