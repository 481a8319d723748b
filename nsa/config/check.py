"""The rules that config values obey; each raises a ConfigError that names the key."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NoReturn

from nsa.config.errors import ConfigError, nearest


def refuse(key: str, given: object, allowed: str, todo: str) -> NoReturn:
    """Raise the three-part error: what was given, what is allowed, what to do."""
    raise ConfigError(f"{key}={given!r} is not allowed; it must be {allowed}; {todo}", key=key)


def at_least(least: int, group: object, group_name: str, *keys: str) -> None:
    """Require whole numbers that are not below `least`."""
    for key in keys:
        value = getattr(group, key)
        if value < least:
            refuse(f"{group_name}.{key}", value, f">= {least}", f"use {least} or more")


def finite_positive(group: object, group_name: str, *keys: str) -> None:
    """Require numbers above zero that are neither infinite nor NaN."""
    for key in keys:
        value = getattr(group, key)
        if not (math.isfinite(value) and value > 0):
            refuse(f"{group_name}.{key}", value, "a finite number > 0", "use a positive number")


def between(low: float, high: float, group: object, group_name: str, *keys: str) -> None:
    """Require numbers in [low, high]; NaN is in no range."""
    for key in keys:
        value = getattr(group, key)
        if not low <= value <= high:
            refuse(f"{group_name}.{key}", value, f"from {low:g} to {high:g}", "use a value inside")


def divides(part_key: str, part: int, whole_key: str, whole: int) -> None:
    """Require `whole` to be a multiple of `part`, and offer the two neighbours that are."""
    if whole % part:
        low = max(whole // part, 1) * part
        todo = f"use {low} or {low + part}" if low < whole else f"use {low}"
        refuse(whole_key, whole, f"a multiple of {part_key}={part}", todo)


def one_of(key: str, given: str, allowed: Sequence[str]) -> None:
    """Require one of a few words."""
    if given not in allowed:
        refuse(key, given, " | ".join(allowed), f"the nearest is {nearest(given, allowed)!r}")


def parse_layers(text: str) -> tuple[int, int]:
    """Read the layer range "A:B" as (A, B); raise ValueError for anything else."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match:
        raise ValueError(f"{text!r} is not a layer range; write A:B, for example 0:6")
    return int(match[1]), int(match[2])


def ok_layers(key: str, text: str, n_layers: int) -> None:
    """Require a non-empty layer range "A:B" inside the model."""
    allowed = f"A:B with 0 <= A < B <= n_layers={n_layers}"
    if not re.fullmatch(r"\d+:\d+", text):
        refuse(key, text, allowed, 'write it in quotes in YAML, for example "0:6"')
    first, last = parse_layers(text)
    if not first < last <= n_layers:
        refuse(key, text, allowed, f'use a range inside "0:{n_layers}"')
