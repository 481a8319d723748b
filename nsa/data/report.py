"""A line every so many documents, so that a person sees a stream flow."""

from __future__ import annotations

import time
from collections.abc import Callable


class Report:
    """Counts the documents and tokens that were read in this process."""

    def __init__(self, every: int, say: Callable[[str], None] = lambda line: None) -> None:
        """`every` 0 says nothing."""
        self._every, self._say = every, say
        self._documents = self._tokens = 0
        self._since = time.perf_counter()

    def add(self, epoch: int, tokens: int) -> None:
        """A document was tokenized."""
        self._documents, self._tokens = self._documents + 1, self._tokens + tokens
        if self._every and self._documents % self._every == 0:
            seconds = time.perf_counter() - self._since
            self._say(
                f"[data] {self._documents:,} documents, {self._tokens:,} tokens in {seconds:.1f} s "
                f"(epoch {epoch + 1})"
            )
