"""Reading checkpoints: which versions are whole or sound, their states and their slices."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from pipeline.errors import DataError
from trainer.checkpoints.generations import Generations, read_generations
from trainer.checkpoints.state import EVALUATED, STATE, Evaluated, State, folder_of, slice_name

Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True)
class StoredSlice:
    """A server's file, its range checked against its contents; the elements stay on disk until they are read."""

    path: Path
    begin: int
    end: int
    total: int
    num_parameters: int
    file: Any

    def values(self, begin: int, end: int) -> Float32s:
        """The part of [begin, end) that this slice holds."""
        return self._cut("values", begin, min(end, self.end))

    def momentum(self, begin: int, end: int) -> Float32s:
        """The same of the momentum, which ends with the parameters."""
        return self._cut("momentum", begin, min(end, self.begin + self.num_parameters))

    def _cut(self, name: str, begin: int, end: int) -> Float32s:
        first, last = max(begin, self.begin) - self.begin, end - self.begin
        if first >= last:
            return np.empty(0, np.float32)
        return cast(Float32s, self.file.get_slice(name)[first:last])


def read_state(root: Path, version: int) -> State:
    """Raises DataError, naming the file, where it is missing, broken or of another version."""
    path = folder_of(root, version) / STATE
    try:
        state = State.from_bytes(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path} is missing: the checkpoint was never finished") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _broken(path, "is not the state of a checkpoint") from None
    if state.version != version:
        raise _broken(path, f"is of version {state.version}, not {version}")
    return state


def read_slice(path: Path, version: int, generation: int) -> StoredSlice:
    """Open a slice and check all but its elements. O(1) in its size. Raises DataError, naming the file."""
    try:
        file: Any = safe_open(path, framework="np")
        known = {name: int(file.metadata()[name]) for name in ("version", "generation", "begin", "end", "total")}
        (length,), (parameters,) = (file.get_slice(name).get_shape() for name in ("values", "momentum"))
        types = {file.get_slice(name).get_dtype() for name in ("values", "momentum")}
    except FileNotFoundError:
        raise DataError(f"{path} is missing: the checkpoint was never finished") from None
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise _broken(path, f"is torn or no slice of a checkpoint ({error})") from None
    for name, wanted in (("version", version), ("generation", generation)):
        if known[name] != wanted:
            raise _broken(path, f"is of {name} {known[name]}, not {wanted}")
    if length != known["end"] - known["begin"] or types != {"F32"}:
        raise _broken(path, f"holds {length} values of type {types}, not {known['end'] - known['begin']} of F32")
    return StoredSlice(path, known["begin"], known["end"], known["total"], parameters, file)


def read_slices(root: Path, version: int) -> tuple[State, list[StoredSlice]]:
    """The state and every slice of a checkpoint, checked to fit together. O(servers). Raises DataError."""
    state = read_state(root, version)
    return state, slices_of(root, state)


def slices_of(root: Path, state: State) -> list[StoredSlice]:
    """The slices of the checkpoint that has this state, as ``read_slices`` gives them."""
    paths = _slice_paths(folder_of(root, state.version), state)
    slices = [read_slice(path, state.version, state.generation) for path in paths]
    at = 0
    for part in slices:
        parameters = min(max(state.num_parameters - part.begin, 0), part.end - part.begin)
        if (part.begin, part.total, part.num_parameters) != (at, state.total, parameters):
            raise _broken(part.path, f"does not fit {STATE} and its neighbours")
        at = part.end
    if at != state.total:
        raise _broken(slices[-1].path, f"ends at {at}, not at {state.total}")
    return slices


def read_slice_range(root: Path, version: int, begin: int, end: int) -> tuple[Float32s, Float32s]:
    """Values [end-begin] and the momentum of the parameters among them, however many servers wrote them.

    Reads only what it returns. Raises DataError; ValueError for a range outside the vector."""
    state, slices = read_slices(root, version)
    if not 0 <= begin <= end <= state.total:
        raise ValueError(f"[{begin}, {end}) is no range of {state.total} elements")
    values = np.concatenate([part.values(begin, end) for part in slices])
    return values, np.concatenate([part.momentum(begin, end) for part in slices])


def read_vector(root: Path, version: int) -> Float32s:
    """All values of a checkpoint, float32 [P+Q]: parameters, then BatchNorm's statistics. Raises DataError."""
    return vector_of(root, read_state(root, version))


def vector_of(root: Path, state: State) -> Float32s:
    """The same of the checkpoint that has this state, not of another generation's that has taken its place."""
    return np.concatenate([part.values(0, part.total) for part in slices_of(root, state)])


def versions(root: Path) -> list[int]:
    """Every version that has a folder, finished or not, ascending."""
    if not root.is_dir():
        return []
    return sorted(int(entry.name) for entry in os.scandir(root) if re.fullmatch(r"\d{8,}", entry.name))


def whole(root: Path) -> list[int]:
    """The versions whose state and slices are all there, ascending; what the slices hold is not looked at."""
    return [state.version for state in whole_states(root)]


def whole_states(root: Path) -> list[State]:
    """Their states. Raises OSError where the folder cannot be read."""
    generations = read_generations(root)
    return [state for version in versions(root) if (state := _whole_state(root, version, generations))]


def newest(root: Path, *, verify: bool = False, warn: Callable[[str], None] | None = None) -> int | None:
    """The newest whole version, or None. With ``verify`` the newest sound one: a broken one is skipped and told of."""
    generations = read_generations(root)
    for version in reversed(versions(root)):
        try:
            if _finished_state(root, version, generations) and (not verify or read_slices(root, version)):
                return version
        except DataError as error:
            if warn:
                warn(str(error))
    return None


def is_whole(root: Path, state: State) -> bool:
    """Whether this is, now, the state of a whole checkpoint: neither discarded, nor of a history that was left."""
    return _whole_state(root, state.version, read_generations(root)) == state


def unevaluated(root: Path) -> list[State]:
    """The whole checkpoints that wait for the evaluator: ends of epochs and of the run, oldest first."""
    return [state for state in whole_states(root) if state.is_for_evaluation and not evaluation_of(root, state)]


def evaluation_of(root: Path, state: State) -> Evaluated | None:
    """What the evaluator left in the checkpoint that has this state."""
    try:
        found = Evaluated.from_bytes((folder_of(root, state.version) / EVALUATED).read_bytes())
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return found if found.is_of(state) else None


def _whole_state(root: Path, version: int, generations: Generations) -> State | None:
    try:
        return _finished_state(root, version, generations)
    except DataError:
        return None


def _finished_state(root: Path, version: int, generations: Generations) -> State | None:
    """The state, if all files are there and of a history that was not left. Raises DataError if it cannot tell which."""
    folder = folder_of(root, version)
    if not (folder / STATE).exists():
        return None
    state = read_state(root, version)
    if not generations.count(state.generation, version):
        return None
    return state if all(path.exists() for path in _slice_paths(folder, state)) else None


def is_sound(root: Path, version: int) -> bool:
    try:
        return bool(read_slices(root, version))
    except DataError:
        return False


def _slice_paths(folder: Path, state: State) -> list[Path]:
    return [folder / slice_name(index, state.num_servers, state.generation) for index in range(state.num_servers)]


def _broken(path: Path, fact: str) -> DataError:
    return DataError(f"{path} {fact}; delete {path.parent} to go on from an older checkpoint")
