"""The byte tokenizer: text to UTF-8 bytes and back, with byte 0 as the end of a document."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from nsa.data.errors import DataError


class ByteTokenizer:
    """Ids 0 to 255 are the bytes; id 0, which no text holds, ends a document."""

    name = "byte"
    vocab = 256
    eos = 0

    def encode(self, text: str) -> NDArray[np.uint8]:
        """Return the bytes of `text`, without an end mark."""
        ids = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
        if (ids == self.eos).any():
            at = int(np.argmax(ids == self.eos))
            raise DataError(f"the text holds a NUL at byte {at}; byte 0 ends a document; remove it")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return bytes(ids).decode("utf-8", errors="replace")
