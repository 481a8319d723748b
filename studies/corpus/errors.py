"""The error of a corpus that cannot be made, packed or restored."""

from __future__ import annotations


class CorpusError(ValueError):
    """A list, a package, a client or a file that cannot be used; the message says what to do."""
