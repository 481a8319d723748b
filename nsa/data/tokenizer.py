"""What a tokenizer is, and the byte tokenizer: text to UTF-8 bytes and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nsa.data.errors import DataError
from nsa.data.fingerprint import fingerprint_of
from nsa.data.manifest import id_bytes

Ids = NDArray[np.unsignedinteger[Any]]
"""Token ids in the smallest type that holds the vocabulary."""


class Tokenizer(Protocol):
    """Text to ids and back. The ids of a text never hold the end mark."""

    @property
    def name(self) -> str:
        """What kind it is: byte, gpt2 or hf."""

    @property
    def vocab(self) -> int:
        """Number of ids: all are below it."""

    @property
    def eos(self) -> int:
        """The id that ends a document."""

    def encode(self, text: str) -> Ids:
        """Return the ids of `text`, without an end mark; names of special tokens are mere text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`."""

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of one id, a part of a character perhaps; None where it has none."""

    def fingerprint(self) -> str:
        """Return a sha256 of everything that decides the ids of a text."""


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

    def token_bytes(self, token: int) -> bytes:
        """Return the byte that the id is."""
        return bytes([token])

    def fingerprint(self) -> str:
        """Return a sha256 of what decides the ids: the name says it all."""
        return fingerprint_of(tokenizer=self.name, vocab=self.vocab, eos=self.eos)


def id_type(vocab: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest little-endian type that holds every id below `vocab`."""
    return np.dtype(f"<u{id_bytes(vocab)}")
