"""The held-out split: text is cut into pieces, and the hash of a piece decides its side."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

TRAIN, VAL = "train", "val"
"""Names of the two sides."""
PIECE_CHARS = 8192
"""A piece ends with the paragraph that reaches this length: about a scene."""
HELD_OUT_OF_256 = 13
"""Hash values out of 256 that are held out: 5 percent of the pieces."""


@dataclass(kw_only=True)
class Counts:
    """What became of the documents that were read."""

    documents: int = 0
    """On either side; empty ones are not counted here."""
    empty: int = 0
    """Dropped, because they hold nothing but white space."""
    held_out: int = 0
    """Those on the side that is never trained on."""


class Split(NamedTuple):
    """The documents of both sides; no piece is on both."""

    train: list[str]
    val: list[str]


def split_works(works: Iterable[str]) -> Split:
    """Put each run of neighbouring pieces on its side, as one document.

    A document never joins text that does not stand together in the work. The side depends on the
    words of the piece alone, so it stays the same when works are added, removed or reordered.
    """
    split = Split([], [])
    for work in works:
        previous = None
        for piece in cut_pieces(work):
            side = split.val if is_held_out(piece) else split.train
            if side is previous:
                side[-1] += piece
            else:
                side.append(piece)
            previous = side
    return split


def cut_pieces(text: str) -> Iterator[str]:
    """Cut at empty lines into pieces of about PIECE_CHARS; their sum is the text."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        paragraph_end = text.find("\n\n", start + PIECE_CHARS)
        if paragraph_end < 0:
            break
        yield text[start : paragraph_end + 2]
        start = paragraph_end + 2
    if start < len(text):
        yield text[start:]


def is_held_out(piece: str) -> bool:
    """Decide by the words alone, so that the same words in another layout fall on the same side."""
    words = " ".join(piece.split())
    return hashlib.sha256(words.encode("utf-8")).digest()[0] < HELD_OUT_OF_256
