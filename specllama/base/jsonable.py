"""Frozen dataclasses to JSON data and back, checked field by field.

A class may check its values in `__post_init__` and raise ValueError or SpecllamaError.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from specllama.base.errors import ReportError, SpecllamaError
from specllama.base.text import counted

T = TypeVar("T")
_hints = cache(get_type_hints)  # 0.1 ms a call, and a conversation has many messages

_HINT = "give a report that specllama wrote"

# Exceptions of reading a damaged file.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, ReportError)


def parsed(text: str) -> Any:
    """The JSON value of `text`. Raises ValueError, also for deep nesting and very long numbers."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def not_json(error: json.JSONDecodeError) -> str:
    """What is wrong in a line that should be JSON."""
    return f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"


def to_plain(value: Any) -> Any:
    """A dataclass, or a value of a field, as dicts, lists, text and numbers."""
    if is_dataclass(value):
        return {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _refuse(where: str, found: object, expected: str) -> ReportError:
    return ReportError(f"{where} is {type(found).__name__}, expected {expected}", hint=_HINT)


def _finite(data: float, where: str) -> float:
    """`data` as a float. Python's JSON reads NaN, infinity and numbers beyond every float."""
    try:
        number = float(data)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ReportError(f"{where} is not a finite number", hint=_HINT)
    return number


def shown(value: object) -> str:
    """The start of the value's text, for messages."""
    try:
        text = repr(value)
    except RecursionError:
        return "a value with very deep nesting"
    except ValueError:  # Python writes at most 4,300 digits
        return "a number with very many digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _one_of(data: object, where: str, choices: Iterable[object]) -> ReportError:
    return ReportError(f"{where} is {shown(data)}, expected one of {', '.join(map(str, choices))}")


def typed(kind: Any, data: Any, where: str = "the value") -> Any:
    """`data`, checked to be the plain form of a value of this type. Raises ReportError."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (Any, object):
        return data
    if origin in (types.UnionType, Union):
        if data is None and type(None) in arguments:
            return None
        return typed(next(each for each in arguments if each is not type(None)), data, where)
    if is_dataclass(kind):
        return from_plain(kind, data, where)  # type: ignore[arg-type]  # mypy narrows to an instance
    if origin in (tuple, list, Sequence):
        if not isinstance(data, (list, tuple)):
            raise _refuse(where, data, "a list")
        if origin is tuple and Ellipsis not in arguments:
            if len(data) != len(arguments):
                raise ReportError(f"{where} has {counted(len(data), 'entry', 'entries')}, expected {len(arguments)}")
            return tuple(typed(each, item, where) for each, item in zip(arguments, data, strict=True))
        values = [typed(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data)]
        return values if origin is list else tuple(values)
    if origin in (dict, Mapping):
        if not isinstance(data, Mapping):
            raise _refuse(where, data, "an object")
        return {str(key): typed(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if kind is float and type(data) in (int, float):
        return _finite(data, where)
    if origin is not None:  # Literal
        if data not in arguments:
            raise _one_of(data, where, arguments)
        return data
    if kind is Path and type(data) is str:
        return Path(data)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(data)
        except ValueError:
            raise _one_of(data, where, (each.value for each in kind)) from None
    if type(data) is not kind:
        raise _refuse(where, data, kind.__name__)
    return data


def from_plain(kind: type[T], data: object, where: str = "the report") -> T:
    """The inverse of `to_plain`; unknown keys are ignored. Raises ReportError."""
    if not isinstance(data, Mapping):
        raise _refuse(where, data, "an object")
    hints = _hints(kind)  # type: ignore[arg-type]  # a class is hashable
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]  # T is a dataclass
        if field.name in data:
            values[field.name] = typed(hints[field.name], data[field.name], f"{where}.{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ReportError(f"{where} has no {field.name!r}", hint=_HINT)
    try:
        return kind(**values)
    except (ValueError, SpecllamaError) as error:
        raise ReportError(f"{where}: {error}", hint=_HINT) from None


def require_schema(data: object, name: str, version: int) -> Mapping[str, Any]:
    """`data`, checked to be a report of this name and version. Raises ReportError."""
    schema = data.get("schema") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(schema, Mapping) or schema.get("name") != name:
        raise ReportError(f"this is not a {name} report", hint="write one with --format json --output FILE")
    if schema.get("version") != version:
        raise ReportError(
            f"the {name} report has version {schema.get('version')}, expected {version}",
            hint="measure again with this version of specllama",
        )
    return data
