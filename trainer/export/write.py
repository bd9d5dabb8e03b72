"""The export of a run's model to a file or folder."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

from pipeline.core.errors import UsageError
from trainer.export.formats import BEGUN, ONNX, SAFETENSORS, TORCHSCRIPT
from trainer.export.graphs import make_onnx, make_torchscript
from trainer.export.hub import CARD, CONFIG, make_hub_files
from trainer.export.target import LOCKS, locked_folder, unwritable_is_usage_error
from trainer.home.place import Place, entries, is_file, make, place_of, write_whole
from trainer.inference.classifier import find_model, load
from trainer.run_files import BEST, BEST_OF, METRICS, MODEL, PUSHES, REPORT, RESULT

ONNX_PACKAGES = ("onnx", "onnxscript")
RUN_FILES = (CONFIG, METRICS, PUSHES, MODEL, BEST, BEST_OF, RESULT, REPORT)


def export(run: str, to: str, kind: str, *, best: bool = False, overwrite: bool = False) -> Place:
    """Write the model of a run in another format, and return its place.

    A file appears atomically. In a folder, the model card is written last.

    Args:
        run: folder of a run, or its model file, local, on HDFS or in an object store.
        to: file to write, or folder for safetensors.
        kind: a key of ``MODEL_FORMATS``.
        best: the model of the best evaluation instead of the final one.
        overwrite: whether to replace an earlier export.
    Raises:
        DataError: there is no such model, or its file is damaged.
        UsageError: the target exists or cannot be written, a package is missing, or the format cannot hold the network.
    """
    missing = [name for name in ONNX_PACKAGES if find_spec(name) is None]
    if kind == ONNX and missing:
        raise UsageError(f"--as onnx needs {' and '.join(missing)}: run pip install {' '.join(ONNX_PACKAGES)}")
    target = place_of(to)
    model = find_model(run, best=best)
    check = partial(_check_target, target, model, overwrite=overwrite)
    check(is_folder=kind == SAFETENSORS)  # before anything is written into the folder, even a lock
    classifier = load(run, best=best)
    if kind == SAFETENSORS:
        with locked_folder(target):
            check(is_folder=True)
            _write_folder(target, make_hub_files(classifier, model))
        return target
    data = {TORCHSCRIPT: make_torchscript, ONNX: make_onnx}[kind](classifier)
    with unwritable_is_usage_error(target):
        make(target.parent)
        write_whole(target, data)
    return target


def _write_folder(target: Place, files: dict[str, bytes]) -> None:
    """Write files by name into a folder. The card comes last: a folder without one is unfinished."""
    with unwritable_is_usage_error(target):
        make(target)
        (target / CARD).unlink(missing_ok=True)  # of an earlier export
        for name, data in files.items():
            write_whole(target / name, data)


def _check_target(target: Place, model: Place, *, is_folder: bool, overwrite: bool) -> None:
    """Raise UsageError if the target is of the wrong kind, belongs to the run, or exists without ``overwrite``.

    model: the model file, which must not be replaced."""
    with unwritable_is_usage_error(target):
        if is_folder and is_file(target):
            raise UsageError(f"--to {target} is a file; name a folder")
        if not is_folder and target.is_dir():
            raise UsageError(f"--to {target} is a folder; name a file")
        # A store may refuse to look below a file, so that is asked of folders alone.
        is_of_a_run = (target / METRICS).exists() if is_folder else _is_run_file(target)
        if is_folder and (target / BEGUN).exists():
            raise UsageError(f"--to {target} holds the export of a shard set; choose another")
        if str(model) in (str(target), str(target / model.name)) or is_of_a_run:
            raise UsageError(f"--to {target} belongs to a run; choose another")
        if not overwrite and (_is_taken(target) if is_folder else target.exists()):
            raise UsageError(f"--to {target} exists: give --overwrite, or choose another")


def _is_run_file(target: Place) -> bool:
    return target.name in RUN_FILES and (target.parent / METRICS).exists()


def _is_taken(folder: Place) -> bool:
    """Return whether a folder holds anything but an export that was killed before its card was written."""
    names = {entry.name for entry in entries(folder)}
    return CARD in names or any(name not in (MODEL, CONFIG, *LOCKS) and not name.endswith(".tmp") for name in names)
