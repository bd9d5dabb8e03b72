"""Saving and loading of fitted models whose state is a few arrays: spark.ml's metadata and one .npz file."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy.typing as npt
from pyspark import SparkContext
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter

from pipeline.core.errors import DataError, UsageError
from pipeline.core.json_values import parse_object
from pipeline.core.npz import from_bytes, to_bytes
from pipeline.core.storage.store import Store
from pipeline.spark.store import open_store

T = TypeVar("T")
ARRAYS = "arrays.npz"


class ArrayWritable(MLWritable):
    """A model whose whole state is ``arrays()`` and its params."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        raise NotImplementedError

    @classmethod
    def from_arrays(cls, arrays: dict[str, npt.NDArray[Any]]) -> Any:
        raise NotImplementedError

    def write(self) -> MLWriter:
        return _Writer(self)


class ArrayReadable(MLReadable[Any]):
    @classmethod
    def read(cls) -> MLReader[Any]:
        return _Reader(cls)


class _Writer(MLWriter):
    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:
        context = SparkContext.getOrCreate()
        store = open_store(context)
        uri = store.resolve(path)
        # save_model would replace an older model's files. With overwrite(), MLWriter.save has deleted them before.
        if not self.shouldOverwrite and store.list(uri):
            raise UsageError(
                f"{uri} holds files; save to another folder, or replace them by write().overwrite().save()"
            )
        save_model(self.instance, store, uri, context)


def save_model(model: Any, store: Store, uri: str, context: SparkContext) -> None:
    """Write a model in spark.ml's own layout (metadata/part-00000, one line of JSON), but without a Spark job.

    Args:
        model: an ArrayWritable.
        store: the file system.
        uri: the folder of the model, which nobody else uses; files of the same names are replaced.
        context: supplies Spark's version for the metadata.
    """
    files = {
        "metadata/part-00000": DefaultParamsWriter._get_metadata_to_save(model, context).encode() + b"\n",
        "metadata/_SUCCESS": b"",
        ARRAYS: to_bytes(**model.arrays()),
    }
    store.makedirs(f"{uri}/metadata")
    for name, data in files.items():
        store.write_new(f"{uri}/{name}", data)


class _Reader(MLReader[Any]):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def load(self, path: str) -> Any:
        store = open_store(SparkContext.getOrCreate())
        # Read through the same store as save_model, because Spark's own reader uses the default file system.
        return load_model(self.kind, store, store.resolve(path))


def load_model(kind: type[T], store: Store, uri: str) -> T:
    """Return a saved model. Raises DataError if none was saved or it is damaged. kind: its class, an ArrayReadable."""
    about = _metadata(store, uri)
    try:
        metadata = parse_object(about)
        model: Any = kind.from_arrays(from_bytes(store.read(f"{uri}/{ARRAYS}")))  # type: ignore[attr-defined]
        model._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(model, metadata)
    except FileNotFoundError:
        raise DataError(f"{uri}/{ARRAYS} is missing; the model is damaged") from None
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, UsageError) as error:  # Spark asserts
        reason = f"it lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
        raise DataError(
            f"{uri} is a damaged model, or of another kind: {reason}; restore it, or fit it again"
        ) from None
    typed_model: T = model
    return typed_model


def _metadata(store: Store, uri: str) -> bytes:
    """Return the line of JSON that spark.ml writes. Raises DataError if no model was saved."""
    try:
        parts = [path for path in store.walk(f"{uri}/metadata") if "/part-" in path]
        return store.read(parts[0])
    except (IndexError, FileNotFoundError):
        raise DataError(f"{uri} holds no saved model: it has no metadata/part-00000") from None
