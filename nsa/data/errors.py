"""The error of data that cannot be used."""

from __future__ import annotations

from nsa.config import ConfigError


class DataError(ConfigError):
    """A source, a tokenizer or a row length that this version cannot serve."""
