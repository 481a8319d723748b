"""Tokens to text as they come: never half a character, never the beginning of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from nsa.data import Tokenizer

HELD_TOKENS = 16
"""Tokens that a tokenizer without bytes may keep back for one character; then it is shown as is."""
UNFINISHED = "\ufffd"


class TextStream:
    """Turns tokens into text; what it returned is never taken back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._shown: list[int] = []  # the latest tokens whose text is out: context of the next
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        content = self._tokenizer.token_bytes(token)
        if content is not None:
            return self._utf8.decode(content)
        self._held.append(token)
        text = self._held_text()
        if text.endswith(UNFINISHED) and len(self._held) < HELD_TOKENS:
            return ""
        self._shown, self._held = self._held, []
        return text

    def finish(self) -> str:
        """Return what is left at the end: U+FFFD for a character that was never completed."""
        return self._utf8.decode(b"", final=True) + (self._held_text() if self._held else "")

    def _held_text(self) -> str:
        """Decode after some context: at the start of a text a decoder may drop a space."""
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode([*self._shown, *self._held])[len(before) :]


class StopStrings:
    """Ends a text before the first stop string; shows nothing that may become part of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError(
                "a stop string is empty; it would end every text at once; give at least one "
                "character, or leave it out"
            )
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Return the text that can be shown now."""
        text = self._held + text
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        self.found = bool(starts)
        kept = 0 if starts else self._possible_start(text)
        cut = min(starts) if starts else len(text) - kept
        self._held = text[cut:] if kept else ""
        return text[:cut]

    def finish(self) -> str:
        """Return what was held back, where no stop string came of it."""
        text, self._held = self._held, ""
        return text

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
