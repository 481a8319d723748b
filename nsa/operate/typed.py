"""Whether a record that was read has the types that it should: files may hold anything."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Union, get_args, get_origin, get_type_hints


def require_types(record: Any, where: str) -> None:
    """Raise ValueError where a field of a dataclass has another type than it says."""
    for name, kind in get_type_hints(type(record)).items():
        if dataclasses.is_dataclass(record) and not _fits(getattr(record, name), kind):
            raise ValueError(
                f"{where}: {name}={getattr(record, name)!r:.60} is not of type {kind}; the file is "
                "damaged, or of another program"
            )


def _fits(value: Any, kind: Any) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, parts[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, parts[1]) for item in value.values())
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind is Any or isinstance(value, kind)
