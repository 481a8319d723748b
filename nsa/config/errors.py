"""The error of bad settings, and the one definition of "the nearest known name"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A setting that cannot be used; it says what was given, what is allowed and what to do."""

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key
        """The "group.key" at fault, where there is one: the loader adds who set it."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that looks most like `name`; it always names one."""
    choices = sorted(known)
    assert choices, "nearest() needs at least one known name"
    return difflib.get_close_matches(name, choices, n=1, cutoff=0.0)[0]
