"""The error of data that cannot be used."""

from __future__ import annotations

from nsa.config import ConfigError


class DataError(ConfigError):
    """A source, a tokenizer or a row length that this version cannot serve."""


class SourceLost(RuntimeError):
    """A source that was there does not deliver any more, or did not begin to in time."""


class WaitEnded(RuntimeError):
    """Somebody asked to stop while a batch was waited for."""
