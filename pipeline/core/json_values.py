"""Parsing of untrusted or damaged JSON, and checks of its values against the types that readers rely on.

The rule for keys of another version of the program, which every contract in JSON follows:

* A missing key takes the default of its field. Without a default it is refused.
* An unknown key is refused if the program acts on the whole contract: configurations, checkpoints, results and launch
  arguments, where dropping it could silently change a run.
* An unknown key is ignored if the program only reports on the contract or reads some parts of it: manifests, the
  status, and the events and pushes of a log. Whoever rewrites such a file drops it.
* A refusal is one line that names the key: a DataError for a file or a message, never a KeyError."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
MOST = 1 << 63  # whole numbers lie in int64


def parse(text: bytes | str, constant: Callable[[str], Any] | None = None) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for too deep nesting.

    constant: converts the names of NaN and the infinities; None makes numbers of them."""
    try:
        return json.loads(text, parse_constant=constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_object(text: bytes | str) -> dict[str, Any]:
    """Return the object in a JSON text as a dict. Raises ValueError for any other value."""
    value = parse(text)
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__}, not an object")
    return value


def fits(value: object, hint: Any) -> bool:
    """True if a value has the type of an annotation. Numbers must be finite, and integers must fit into int64."""
    return _check_of(hint)(value)


@cache
def _check_of(hint: Any) -> Callable[[Any], bool]:
    """Return the function that checks values against an annotation. It is made once, as logs have a million values."""
    if hint is Any:
        return lambda value: True
    if hint is None or hint is types.NoneType:
        return lambda value: value is None
    if hint is int:
        return lambda value: type(value) is int and -MOST <= value < MOST
    if hint is float:
        # Other writers of JSON write 1.0 as 1.
        return lambda value: math.isfinite(value) if type(value) is float else fits(value, int)
    origin = get_origin(hint)
    args = get_args(hint)
    if origin in (Union, types.UnionType):
        checks = [_check_of(kind) for kind in args]
        return lambda value: any(check(value) for check in checks)
    if origin is Literal:
        # In Python, True equals 1 and is an int; in JSON they are different values.
        return lambda value: any(type(value) is type(arg) and value == arg for arg in args)
    if origin in (dict, Mapping):
        of_key, of_item = _check_of(args[0]), _check_of(args[1])
        return lambda value: isinstance(value, dict) and all(of_key(k) and of_item(v) for k, v in value.items())
    if origin is list or (origin is tuple and args[-1] is Ellipsis):
        # JSON has no tuples; a configuration that has not been written yet still has them.
        kinds = list if origin is list else (list, tuple)
        of_item = _check_of(args[0])
        return lambda value: isinstance(value, kinds) and all(of_item(item) for item in value)
    return lambda value: isinstance(value, origin or hint)


def field_types(kind: Any) -> Mapping[str, Any]:
    """Return the types of a class's fields by name."""
    return _evaluate_annotations(kind)


# Python evaluates the annotations of a class anew each time: a third of the time of a short run in virtual time.
_evaluate_annotations = cache(get_type_hints)


def build(kind: type[T], values: object, *, ignore_unknown: bool = False) -> T:
    """Return a dataclass made of an object's values.

    Raises ValueError with the first key that is missing, unknown or of another type, and errors of the dataclass.

    ignore_unknown: whether unknown keys are ignored instead of refused, by the rule of this module."""
    if not isinstance(values, dict):
        raise ValueError(f"it is a {type(values).__name__}, not an object")
    hints = field_types(kind)
    fields_by_name = {item.name: item for item in fields(kind) if item.init}  # type: ignore[arg-type]
    unknown = next((key for key in values if key not in fields_by_name), None)
    if unknown is not None and not ignore_unknown:
        raise ValueError(f"unknown key {str(unknown)[:80]!r}")
    for name, item in fields_by_name.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"it lacks {name!r}")
        if name in values and not fits(values[name], hints[name]):
            raise ValueError(f"{name!r} is {str(values[name])[:80]!r}, not {item.type}")
    return kind(**{name: values[name] for name in fields_by_name if name in values})
