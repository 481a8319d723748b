"""Values of a run as strict JSON, which knows neither tensors nor NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NON_FINITE = "non_finite"
"""Name of the field that says which numbers were NaN or infinite."""


def strict(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors become numbers; what is not finite becomes null, with a note under NON_FINITE."""
    lost: dict[str, str] = {}
    line = {str(key): _plain(value, str(key), lost) for key, value in extra.items()}
    return line | {NON_FINITE: lost} if lost else line


def _plain(value: Any, key: str, lost: dict[str, str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        lost[key] = str(value)
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(inner, f"{key}.{name}", lost) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{key}[{i}]", lost) for i, inner in enumerate(value)]
    if hasattr(value, "tolist"):  # tensors and numpy numbers
        return _plain(value.tolist(), key, lost)
    return str(value)
