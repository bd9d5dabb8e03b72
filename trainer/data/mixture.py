"""Mixtures: several shard sets as one, from which every worker draws in given shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError
from pipeline.core.shardset.parts import Evaluation, ShardFile
from pipeline.core.storage.uri import is_remote
from trainer.data.opening import open_shards
from trainer.data.shards import SET_BITS, Shards


def open_mixture(uris: Sequence[str], *, lists_files: bool = True) -> Shards:
    """Open several sets as one, whose worker w has the shards w of all. Raises UsageError for sets that differ in form.

    Ids of set k begin at k * 2^40. All their evaluation rows are evaluated. Raises as ``open_shards``.

    lists_files: as for ``open_shards``."""
    sets = [open_shards(uri, lists_files=lists_files) for uri in uris]
    first = sets[0]
    _check_apart(uris, sets)
    for other in sets[1:]:
        _check_alike(first, other)
    manifest = first.manifest
    workers = [
        replace(worker, files=[file for each in sets for file in _addressed(each, each.worker_files(worker.index))])
        for worker in manifest.workers
    ]
    evaluation = [file for each in sets for file in _addressed(each, each.eval_files())]
    rows = np.array([each.rows for each in sets])
    mean = np.average([each.manifest.image.mean for each in sets], axis=0, weights=rows)
    combined = replace(
        manifest,
        rows=int(rows.sum()),
        workers=workers,
        evaluation=Evaluation(rows=sum(file.rows for file in evaluation), files=evaluation) if evaluation else None,
        image=replace(manifest.image, mean=mean.tolist()),
        # Passes over all rows, which a fingerprint would prove, are not made.
        input=replace(manifest.input, fingerprint=None),
        neighbourhoods=None,
        stream=None,
        generations=[],
    )
    # A store that reads remote files reads local ones, too, but not the other way round.
    store = next((each.store for each in sets if is_remote(each.uri)), first.store)
    return Shards(store, ", ".join(each.uri for each in sets), combined, tuple(sets))


def sources_of(ids: Ints) -> Ints:
    """Return the number of the set of each row of a mixture. ids: int64 [N]."""
    return ids >> SET_BITS


def _addressed(shards: Shards, files: Sequence[ShardFile]) -> list[ShardFile]:
    return [replace(file, path=shards.address(file)) for file in files]


def _check_apart(uris: Sequence[str], sets: Sequence[Shards]) -> None:
    """Raise UsageError if two sets have a file in common. uris: the sets as they were given."""
    uri_by_file: dict[str, str] = {}
    for uri, each in zip(uris, sets, strict=True):
        for address in {each.address(file) for file in [*each.files(), *each.eval_files()]}:
            if address in uri_by_file:
                raise UsageError(
                    f"--mix: {uri_by_file[address]} and {uri} have the same rows, {address}: name each set once, with the"
                    " sum of its shares"
                )
            uri_by_file[address] = uri


def _check_alike(first: Shards, other: Shards) -> None:
    """Raise UsageError if two sets cannot be mixed, because a worker or the model would need both forms."""
    # A worker has one size of mini-batch, and the model one form of images and one number of outputs.
    about: dict[str, tuple[Any, Any]] = {
        "workers": (first.num_workers, other.num_workers),
        "image shape": (first.shape, other.shape),
        "image type": (first.layout.dtype, other.layout.dtype),
        "classes": (first.num_classes, other.num_classes),
        "label columns": (first.manifest.labels.columns, other.manifest.labels.columns),
        "ratios": (first.ratios, other.ratios),
        "names of classes": (first.manifest.labels.class_names, other.manifest.labels.class_names),
    }
    for name, (one, two) in about.items():
        if one != two:
            raise UsageError(f"--mix: {first.uri} and {other.uri} differ in {name}, {one} and {two}: shard them alike")
