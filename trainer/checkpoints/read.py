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

Listing = Mapping[str, FileInfo]  # the entries of a folder by name
_content = remembered(lambda place, size: place.read_bytes())


def read_state(root: Place, version: int) -> RunState:
    """Read the state of a version. Raises DataError with the file if it is missing, broken or of another version."""
    return _state(root, version, list_folder(folder_of(root, version)))


def _state(root: Place, version: int, listing: Listing) -> RunState:
    """Read the state of a version, like ``read_state``, from a folder that is listed already."""
    place = folder_of(root, version) / STATE
    try:
        state = RunState.from_bytes(_content(place, _entry(place, listing)))
    except FileNotFoundError:
        raise DataError(f"{place} is missing: the checkpoint was never finished") from None
    except ValueError:
        raise broken(place, "is not the state of a checkpoint") from None
    if state.version != version:
        raise broken(place, f"is of version {state.version}, not {version}")
    return state


def read_slice(place: Place, version: int, generation: int, listing: Listing) -> StoredSlice:
    """Open a slice and check everything but its elements. O(1) in its size. Raises DataError with the file.

    Args:
        place: the file.
        version, generation: those that its header must have.
        listing: of its folder.
    """
    try:
        header = header_of(place, _entry(place, listing))
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


def slices_of(root: Place, state: RunState, listing: Listing | None = None) -> list[StoredSlice]:
    """Open the slices of the checkpoint with a given state; check that together they cover the flat vector once.

    O(servers). Raises DataError. listing: of its folder, if known."""
    folder = folder_of(root, state.version)
    inside = listing or list_folder(folder)
    slices = [read_slice(folder / name, state.version, state.generation, inside) for name in _slice_names(state)]
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
    listing = list_folder(folder_of(root, version))
    state = _state(root, version, listing)
    slices = slices_of(root, state, listing)
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


def list_folder(folder: Place) -> Listing:
    """Return the entries of a folder by name. Costs one request to a store."""
    return {entry.name: entry for entry in entries(folder)}


def _entry(place: Place, listing: Listing) -> FileInfo:
    """Return the entry of a file in its folder. Raises FileNotFoundError."""
    if place.name not in listing:
        raise FileNotFoundError(place)
    return listing[place.name]


def versions(root: Place) -> list[int]:
    """Return all versions with a folder, complete or not, in ascending order."""
    return _versions(list_folder(root))


def _versions(listing: Listing) -> list[int]:
    return sorted(int(name) for name in listing if re.fullmatch(r"\d{8,}", name))


def whole(root: Place) -> list[int]:
    """Return the complete versions in ascending order. The content of slices is not checked."""
    return [state.version for state in whole_states(root)]


def whole_states(root: Place) -> list[RunState]:
    """Return the states of the complete versions in ascending order. Raises OSError if the folder cannot be read.

    On a remote store it costs a listing, one more per checkpoint, and a read per new state."""
    return [state for state, _ in states_and_listings(root)]


def states_and_listings(root: Place) -> list[tuple[RunState, Listing]]:
    """Return the states of the complete versions in ascending order, each with the entries of its folder by name.

    Checkpoints that a roll-back made void, or whose state is damaged, are left out. Raises OSError if the folder cannot
    be read. On a remote store it costs a listing, one more per checkpoint, and a read per new state."""
    listing = list_folder(root)
    result = []
    generations = _generations(root, listing)
    for version in _versions(listing):
        inside = list_folder(folder_of(root, version))
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
    listing = list_folder(root)
    generations = _generations(root, listing)
    for version in reversed(_versions(listing)):
        try:
            inside = list_folder(folder_of(root, version))
            state = _finished_state(root, version, generations, inside)
            if state and (not verify or slices_of(root, state, inside)):
                return state
        except DataError as error:
            if warn:
                warn(str(error))
    return None


def is_whole(root: Place, state: RunState) -> bool:
    """Return whether the checkpoint with a given state is still there, complete and not void."""
    listing = list_folder(folder_of(root, state.version))
    return _whole_state(root, state.version, read_generations(root), listing) == state


def marked_states(root: Place) -> list[tuple[RunState, EvaluationMark | None]]:
    """Return the states of complete checkpoints with their evaluations. Costs as ``whole_states``."""
    return [(state, evaluation_of(root, state, listing)) for state, listing in states_and_listings(root)]


def whole_state(root: Place, version: int, generations: Generations) -> RunState | None:
    """Return the state of a version if its checkpoint is complete and not void by the generations, else None."""
    return _whole_state(root, version, generations, list_folder(folder_of(root, version)))


def unevaluated(root: Place) -> list[RunState]:
    """Return the complete checkpoints that wait for the evaluator, oldest first: ends of epochs and of the run."""
    return waiting_of(marked_states(root))


def waiting_of(states_with_marks: Iterable[tuple[RunState, EvaluationMark | None]]) -> list[RunState]:
    """Return the states that wait for the evaluator.

    states_with_marks: states with their evaluations, None for those without."""
    return [state for state, mark in states_with_marks if state.is_for_evaluation and not mark]


def evaluation_of(root: Place, state: RunState, listing: Listing | None = None) -> EvaluationMark | None:
    """Return the evaluation of the checkpoint with a given state, or None. listing: of its folder, if known."""
    folder = folder_of(root, state.version)
    try:
        evaluation = EvaluationMark.from_bytes(
            _content(folder / EVALUATED, (listing or list_folder(folder))[EVALUATED])
        )
    except (FileNotFoundError, KeyError, ValueError):
        return None
    return evaluation if evaluation.is_of(state) else None


def _generations(root: Place, listing: Listing) -> Generations:
    return read_generations(root) if GENERATIONS in listing else Generations()


def _whole_state(root: Place, version: int, generations: Generations, listing: Listing) -> RunState | None:
    try:
        return _finished_state(root, version, generations, listing)
    except DataError:
        return None


def _finished_state(root: Place, version: int, generations: Generations, listing: Listing) -> RunState | None:
    """Return the state of a complete checkpoint that is not void, else None. Raises DataError for a broken state.

    generations: of the run, by which a checkpoint is void; listing: of the checkpoint's folder."""
    if STATE not in listing:
        return None
    state = _state(root, version, listing)
    if not generations.includes(state.generation, version):
        return None
    has_parts = all(name in listing and listing[name].bytes == size for name, size in state.parts.items())
    return state if has_parts and all(name in listing for name in _slice_names(state)) else None


def is_sound(root: Place, state: RunState, listing: Listing | None = None) -> bool:
    """Return whether the slices of a checkpoint are undamaged. listing: of its folder, if known."""
    try:
        return bool(slices_of(root, state, listing))
    except DataError:
        return False


def _slice_names(state: RunState) -> Iterator[str]:
    """Yield the names of the slices, lazily, because a damaged state may have a huge number of servers."""
    return (slice_name(index, state.num_servers, state.generation) for index in range(state.num_servers))
