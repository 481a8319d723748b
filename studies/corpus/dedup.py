"""What was there before: equal documents, documents made of known text, and repeated paragraphs.

equal   the same words in the same order, whatever their case, spaces and punctuation
near    at least NEAR_SHARE of a document's shingles (runs of 8 words, of which one in 16 is looked
        at, chosen by its hash) occur in documents that were kept before
paragraph  in prose, a paragraph of LONG_CHARS or more that another document had before is cut out
"""

from __future__ import annotations

import hashlib
import re
import zlib

import numpy as np
from numpy.typing import NDArray

SHINGLE_WORDS = 8
SAMPLE_BITS = 4
"""One shingle in 2 to this power is looked at."""
NEAR_SHARE = 0.8
LEAST_SAMPLES = 4
"""A document with fewer sampled shingles is too short to be called nearly equal."""
LONG_CHARS = 200
WORD = re.compile(r"\w+")


class Seen:
    """All that was kept so far, as hashes."""

    def __init__(self) -> None:
        self._documents: set[bytes] = set()
        self._paragraphs: set[bytes] = set()
        self._shingles: set[int] = set()
        self._words = _WordHashes()

    def why_not(self, text: str) -> str:
        """Return "exact", "near" or, for a document that is new and is now known, ""."""
        words = WORD.findall(text.lower())
        key = _key(words)
        if key in self._documents:
            return "exact"
        shingles = self._sample(words)
        num_known = len(self._shingles.intersection(shingles))
        if len(shingles) >= LEAST_SAMPLES and num_known >= NEAR_SHARE * len(shingles):
            return "near"
        self._documents.add(key)
        self._shingles.update(shingles)
        return ""

    def without_repeats(self, text: str) -> tuple[str, int]:
        """Return the text without long paragraphs of earlier documents, and how many went."""
        kept, new, num_cut = [], set(), 0
        for paragraph in text.split("\n\n"):
            if len(paragraph) >= LONG_CHARS:
                key = _key(WORD.findall(paragraph.lower()))
                if key in self._paragraphs:
                    num_cut += 1
                    continue
                new.add(key)
            kept.append(paragraph)
        self._paragraphs |= new
        return ("\n\n".join(kept).strip("\n") + "\n" if num_cut else text), num_cut

    def _sample(self, words: list[str]) -> list[int]:
        """Return the sampled hashes of the shingles; the same words always give the same."""
        if len(words) < SHINGLE_WORDS:
            return []
        hashes = np.fromiter(map(self._words.__getitem__, words), dtype=np.uint64, count=len(words))
        shingles = _shingle_hashes(hashes)
        chosen = shingles >> np.uint64(64 - SAMPLE_BITS) == 0
        return np.unique(shingles[chosen]).tolist()


def _key(words: list[str]) -> bytes:
    return hashlib.blake2b(" ".join(words).encode("utf-8"), digest_size=16).digest()


class _WordHashes(dict[str, int]):
    """A hash of each word that is the same in every process, found once."""

    def __missing__(self, word: str) -> int:
        content = word.encode("utf-8")
        self[word] = value = zlib.crc32(content) << 32 | zlib.adler32(content)
        return value


def _shingle_hashes(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix every SHINGLE_WORDS neighbours into one number; arithmetic is modulo 2 to the 64."""
    num_shingles = len(words) - SHINGLE_WORDS + 1
    total = np.zeros(num_shingles, dtype=np.uint64)
    for at in range(SHINGLE_WORDS):
        total = total * np.uint64(0x9E3779B97F4A7C15) + words[at : at + num_shingles]
        total ^= total >> np.uint64(29)
    total *= np.uint64(0xBF58476D1CE4E5B9)
    return total ^ (total >> np.uint64(32))
