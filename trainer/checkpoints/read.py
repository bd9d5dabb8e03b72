"""Reading checkpoints: which versions are whole or sound, their states and their slices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.storage.files import FileInfo
from trainer.checkpoints.generations import GENERATIONS, Generations, read_generations
from trainer.checkpoints.slice_file import Float32s, StoredSlice, broken, header_of, known_of
from trainer.checkpoints.state import EVALUATED, STATE, Evaluated, State, folder_of, slice_name
from trainer.home.place import Place, entries, remembered

Listed = Mapping[str, FileInfo]
_content = remembered(lambda place, size: place.read_bytes())


def read_state(root: Place, version: int) -> State:
    """Raises DataError, naming the file, where it is missing, broken or of another version."""
    return _state(root, version, listed(folder_of(root, version)))


def _state(root: Place, version: int, names: Listed) -> State:
    place = folder_of(root, version) / STATE
    try:
        state = State.from_bytes(_content(place, _entry(place, names)))
    except FileNotFoundError:
        raise DataError(f"{place} is missing: the checkpoint was never finished") from None
    except ValueError:
        raise broken(place, "is not the state of a checkpoint") from None
    if state.version != version:
        raise broken(place, f"is of version {state.version}, not {version}")
    return state


def read_slice(place: Place, version: int, generation: int, names: Listed) -> StoredSlice:
    """Open a slice and check all but its elements. O(1) in its size. names: of its folder. Raises DataError, naming the
    file."""
    try:
        header = header_of(place, _entry(place, names))
        known = known_of(header)
        length, parameters = (header.arrays[name][1] for name in ("values", "momentum"))
    except FileNotFoundError:
        raise DataError(f"{place} is missing: the checkpoint was never finished") from None
    except (ValueError, KeyError, TypeError) as error:
        raise broken(place, f"is torn or no slice of a checkpoint ({error})") from None
    for name, wanted in (("version", version), ("generation", generation)):
        if known[name] != wanted:
            raise broken(place, f"is of {name} {known[name]}, not {wanted}")
    if length != known["end"] - known["begin"]:
        raise broken(place, f"holds {length} values, not {known['end'] - known['begin']}")
    return StoredSlice(place, known["begin"], known["end"], known["total"], parameters, header)


def read_slices(root: Place, version: int) -> tuple[State, list[StoredSlice]]:
    """The state and every slice of a checkpoint, checked to fit together. O(servers). Raises DataError."""
    names = listed(folder_of(root, version))
    state = _state(root, version, names)
    return state, _slices(root, state, names)


def slices_of(root: Place, state: State) -> list[StoredSlice]:
    """The slices of the checkpoint that has this state, as ``read_slices`` gives them."""
    return _slices(root, state, listed(folder_of(root, state.version)))


def _slices(root: Place, state: State, names: Listed) -> list[StoredSlice]:
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
    """Values [end-begin] and the momentum of the parameters among them, however many servers wrote them.

    Reads only what it returns. Raises DataError; ValueError for a range outside the vector."""
    state, slices = read_slices(root, version)
    if not 0 <= begin <= end <= state.total:
        raise ValueError(f"[{begin}, {end}) is no range of {state.total} elements")
    values = np.concatenate([part.values(begin, end) for part in slices])
    return values, np.concatenate([part.momentum(begin, end) for part in slices])


def read_vector(root: Place, version: int) -> Float32s:
    """All values of a checkpoint, float32 [P+Q]: parameters, then BatchNorm's statistics. Raises DataError."""
    return vector_of(root, read_state(root, version))


def vector_of(root: Place, state: State) -> Float32s:
    """The same of the checkpoint that has this state, not of another generation's that has taken its place."""
    return np.concatenate([part.values(0, part.total) for part in slices_of(root, state)])


def listed(folder: Place) -> Listed:
    """What is in a folder, by name. One listing."""
    return {entry.name: entry for entry in entries(folder)}


def _entry(place: Place, names: Listed) -> FileInfo:
    """Raises FileNotFoundError."""
    if place.name not in names:
        raise FileNotFoundError(place)
    return names[place.name]


def versions(root: Place) -> list[int]:
    """Every version that has a folder, finished or not, ascending."""
    return _versions(listed(root))


def _versions(names: Listed) -> list[int]:
    return sorted(int(name) for name in names if re.fullmatch(r"\d{8,}", name))


def whole(root: Place) -> list[int]:
    """The versions whose state and slices are all there, ascending; what the slices hold is not looked at."""
    return [state.version for state in whole_states(root)]


def whole_states(root: Place) -> list[State]:
    """Their states. Elsewhere than on a local disk a listing, one a checkpoint, and a read of each state that is new. Raises
    OSError where the folder cannot be read."""
    return [state for state, _ in states_and_names(root)]


def states_and_names(root: Place) -> list[tuple[State, Listed]]:
    """The same, each with what is in the checkpoint's folder."""
    names, found = listed(root), []
    generations = _generations(root, names)
    for version in _versions(names):
        inside = listed(folder_of(root, version))
        if state := _whole_state(root, version, generations, inside):
            found.append((state, inside))
    return found


def newest(root: Place, *, verify: bool = False, warn: Callable[[str], None] | None = None) -> int | None:
    """The newest whole version, or None. With ``verify`` the newest sound one: a broken one is skipped and told of."""
    names = listed(root)
    generations = _generations(root, names)
    for version in reversed(_versions(names)):
        try:
            inside = listed(folder_of(root, version))
            state = _finished_state(root, version, generations, inside)
            if state and (not verify or _slices(root, state, inside)):
                return version
        except DataError as error:
            if warn:
                warn(str(error))
    return None


def is_whole(root: Place, state: State) -> bool:
    """Whether this is, now, the state of a whole checkpoint: neither discarded, nor of a history that was left."""
    names = listed(folder_of(root, state.version))
    return _whole_state(root, state.version, read_generations(root), names) == state


def marked_states(root: Place) -> list[tuple[State, Evaluated | None]]:
    """The states of whole checkpoints, each with what the evaluator left there. Costs as ``whole_states``."""
    return [(state, evaluation_of(root, state, names)) for state, names in states_and_names(root)]


def unevaluated(root: Place) -> list[State]:
    """The whole checkpoints that wait for the evaluator: ends of epochs and of the run, oldest first."""
    return waiting_of(marked_states(root))


def waiting_of(marked: Iterable[tuple[State, Evaluated | None]]) -> list[State]:
    """Those of some."""
    return [state for state, mark in marked if state.is_for_evaluation and not mark]


def evaluation_of(root: Place, state: State, names: Listed | None = None) -> Evaluated | None:
    """What the evaluator left in the checkpoint that has this state. names: of its folder, where they are known."""
    folder = folder_of(root, state.version)
    try:
        found = Evaluated.from_bytes(_content(folder / EVALUATED, (names or listed(folder))[EVALUATED]))
    except (FileNotFoundError, KeyError, ValueError):
        return None
    return found if found.is_of(state) else None


def _generations(root: Place, names: Listed) -> Generations:
    return read_generations(root) if GENERATIONS in names else Generations()


def _whole_state(root: Place, version: int, generations: Generations, names: Listed) -> State | None:
    try:
        return _finished_state(root, version, generations, names)
    except DataError:
        return None


def _finished_state(root: Place, version: int, generations: Generations, names: Listed) -> State | None:
    """The state, if all files are there and of a history that was not left. Raises DataError if it cannot tell which."""
    if STATE not in names:
        return None
    state = _state(root, version, names)
    if not generations.count(state.generation, version):
        return None
    return state if all(name in names for name in _slice_names(state)) else None


def is_sound(root: Place, state: State, names: Listed) -> bool:
    """names: of the checkpoint's folder."""
    try:
        return bool(_slices(root, state, names))
    except DataError:
        return False


def _slice_names(state: State) -> Iterator[str]:
    """One by one: a damaged state may name very many servers."""
    return (slice_name(index, state.num_servers, state.generation) for index in range(state.num_servers))
