"""Writing checkpoints."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from trainer.checkpoints.slice_file import Float32s
from trainer.checkpoints.state import EVALUATED, STATE, EvaluationMark, RunState, folder_of, slice_name
from trainer.home.place import Place, make, write_whole


class WriteOutcome(IntEnum):
    """The result of writing a server's slice. NOT_FINITE: it holds a NaN or an infinity, and was not written."""

    WRITTEN = 0
    FAILED = 1
    NOT_FINITE = 2


def write_slice(
    folder: Place,
    index: int,
    count: int,
    version: int,
    begin: int,
    end: int,
    total: int,
    values: Float32s,
    momentum: Float32s,
    generation: int = 0,
    slots: int = 1,
) -> None:
    """Write one server's slice of a checkpoint. Costs one copy of the arrays. Raises OSError.

    Args:
        folder: the checkpoint's folder.
        index, count: number of the server, and of all servers.
        version, generation: of the checkpoint.
        begin, end, total: the range of the flat vector [total] on this server.
        values: float32 [end - begin].
        momentum: float32, ``slots`` neighbouring elements per parameter in the range.
        slots: elements of the update rule's state per parameter.
    """
    arrays = {
        "values": np.ascontiguousarray(values, np.float32),
        "momentum": np.ascontiguousarray(momentum, np.float32),
    }
    numbers = {"version": version, "generation": generation, "begin": begin, "end": end, "total": total}
    numbers |= {"slots": slots} if slots > 1 else {}
    data = save(arrays, metadata={name: str(number) for name, number in numbers.items()})
    make(folder)
    write_whole(folder / slice_name(index, count, generation), data)


def write_model(
    folder: Place, version: int, values: Float32s, momentum: Float32s, generation: int = 0, slots: int = 1
) -> None:
    """Write the whole model as the only slice of a checkpoint. Raises OSError. See ``write_slice`` for the arguments."""
    total = len(values)
    write_slice(folder, 0, 1, version, 0, total, total, values, momentum, generation, slots)


def write_state(folder: Place, state: RunState) -> None:
    """Write the state of a checkpoint. Raises OSError.

    An evaluation that the folder still contains belongs to another generation."""
    if isinstance(folder, Path):  # elsewhere the slices have made it
        make(folder)
    write_whole(folder / STATE, state.to_bytes())


def mark_final(root: Place, state: RunState, *, final: bool) -> None:
    """Mark the checkpoint with a given state as the run's final one, or as one past which the run continues."""
    if state.final != final:
        write_whole(folder_of(root, state.version) / STATE, replace(state, final=final).to_bytes())


def delete_mark(root: Place, version: int) -> None:
    """Have the evaluator handle a checkpoint again: what it has logged stays, and it decides anew. Raises OSError."""
    (folder_of(root, version) / EVALUATED).unlink(missing_ok=True)


def mark_evaluated(root: Place, state: RunState, accuracy: float | None = None, loss: float | None = None) -> bool:
    """Mark a checkpoint as evaluated, and return whether it still exists. Raises OSError.

    accuracy, loss: see EvaluationMark; None for both if nothing was measured."""
    if not folder_of(root, state.version).is_dir():
        return False
    mark = EvaluationMark(state.generation, state.final, accuracy, loss)
    write_whole(folder_of(root, state.version) / EVALUATED, mark.to_bytes())
    return True
