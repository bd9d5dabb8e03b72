"""The export of a run's model to a file or folder."""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec

from pipeline.core.errors import UsageError
from trainer.export.formats import BEGUN, ONNX, SAFETENSORS, TORCHSCRIPT
from trainer.export.graphs import make_onnx, make_torchscript
from trainer.export.hub import CARD, make_hub_files
from trainer.export.target import check_outside, locked_folder, names_in, read_begun, unwritable_is_usage_error
from trainer.home.place import Place, is_file, make, place_of, read_range, write_whole
from trainer.inference.classifier import find_model, load
from trainer.run_files import MODEL

ONNX_PACKAGES = ("onnx", "onnxscript")
# Near the beginning of the files that are exported: the name of the metadata of the model, and the writer of the graph.
HEADS = {TORCHSCRIPT: b"archive/extra/model", ONNX: b"pytorch"}
HEAD_BYTES = 64


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
    check = partial(_check_target, target, kind, model, overwrite=overwrite)
    check()  # before anything is written into the folder, even a lock
    classifier = load(run, best=best)
    if kind == SAFETENSORS:
        with locked_folder(target):
            check()
            marker = json.dumps({"model": classifier.digest, "format": kind}).encode()
            _write_folder(target, {BEGUN: marker, **make_hub_files(classifier, model)})
        return target
    data = {TORCHSCRIPT: make_torchscript, ONNX: make_onnx}[kind](classifier)
    check()  # again, because another command may have written the file meanwhile
    with unwritable_is_usage_error(target):
        make(target.parent)
        write_whole(target, data)
    return target


def _write_folder(target: Place, files: dict[str, bytes]) -> None:
    """Write files by name into a folder, in order. The card comes last: a folder without one is unfinished."""
    with unwritable_is_usage_error(target):
        make(target)
        (target / CARD).unlink(missing_ok=True)  # of an earlier export
        for name, data in files.items():
            write_whole(target / name, data)


def _check_target(target: Place, kind: str, model: Place, *, overwrite: bool) -> None:
    """Raise UsageError if the target is of the wrong kind, lies in a run or set, or must not be replaced.

    Only an earlier export is replaced, with ``overwrite``, or one that was killed. model: the model file to export."""
    is_folder = kind == SAFETENSORS
    with unwritable_is_usage_error(target):
        if is_folder and is_file(target):
            raise UsageError(f"--to {target} is a file; name a folder")
        if not is_folder and target.is_dir():
            raise UsageError(f"--to {target} is a folder; name a file")
        check_outside(target)
        # An empty folder is as good as none: the export may have been killed while it locked the folder.
        names = names_in(target) if is_folder else set()
        if not (names if is_folder else target.exists()):
            return
        if not (read_begun(target, "model") if is_folder else HEADS[kind] in read_range(target, 0, HEAD_BYTES)):
            raise UsageError(f"--to {target} exists, and is no export as {kind}: delete it, or choose another")
        if is_folder and str(model) == str(target / MODEL):
            raise UsageError(f"--to {target} holds the model itself; choose another")
        is_killed = is_folder and CARD not in names
        if not overwrite and not is_killed:
            raise UsageError(f"--to {target} exists: give --overwrite, or choose another")
